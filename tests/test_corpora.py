from __future__ import annotations

import itertools
import sys
import threading

import huggingface_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from memorization import _documentation, corpora

WIKITEXT = """
 = First article =

 Some text about the first .

 = = A section = =

 More of it , with a = sign .

 = Second =

 Text of the second .
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMORIZATION_DATA", raising=False)
    corpora._load.cache_clear()
    yield tmp_path / "cache"
    corpora._load.cache_clear()


@pytest.fixture
def no_hub(monkeypatch):
    def absent(*args, **kwargs):
        assert kwargs.get("local_files_only"), "the network was asked"
        raise FileNotFoundError("not in the local cache")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    monkeypatch.setattr(corpora, "hub_reachable", lambda: False)


@pytest.fixture
def short_documentation(monkeypatch):
    """The documentation without the seconds that parsing it takes."""
    made = []

    def documents():
        made.append(1)
        return ("A text.\n", "Another text.\n")

    monkeypatch.setattr(_documentation, "documents", documents)
    return made


# ---------------------------------------------------------------------------------------------- corpora and parts


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.text("abc \n", min_size=1, max_size=400).filter(str.strip), min_size=40, max_size=120, unique=True))
def test_parts_are_disjoint_whole_documents_in_the_stated_shares_whatever_the_order(documents):
    corpus = corpora.Corpus("own", tuple(documents))
    parts = corpus.parts
    assert sorted(text for part in corpora.PARTS for text in parts[part]) == sorted(documents)
    total, longest = sum(map(len, documents)), max(map(len, documents))
    for part, share in zip(corpora.PARTS, corpora.SHARES, strict=True):
        assert abs(sum(map(len, parts[part])) - share * total) <= longest
    assert corpora.Corpus("own", tuple(documents[::-1])).parts == parts


def test_the_hash_tells_texts_and_their_borders_apart():
    hashes = {corpora.Corpus("own", texts).sha256 for texts in (("ab", "c"), ("a", "bc"), ("abc",), ("ab", "d"))}
    assert len(hashes) == 4
    assert corpora.Corpus("one", ("ab",)).sha256 == corpora.Corpus("two", ("ab", " \n")).sha256


@pytest.mark.parametrize("documents", [(), ("", " \n"), "text", (1, 2)])
def test_a_corpus_without_text_is_refused(documents):
    with pytest.raises(ValueError, match="documents"):
        corpora.Corpus("own", documents)


# ------------------------------------------------------------------------------------------------- where it is from


@pytest.mark.parametrize("names", [("valid.txt",), ("wiki.valid.tokens", "wiki.test.tokens"), ("raw/train.txt",)])
def test_wikitext_comes_from_the_folder_that_is_named(tmp_path, monkeypatch, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(WIKITEXT, encoding="utf-8")
    (tmp_path / "README.txt").write_text("not part of it")
    monkeypatch.setenv("MEMORIZATION_DATA", str(tmp_path))
    corpus = corpora.load_corpus()
    assert corpus.name == "wikitext-2" and corpus == corpora.load_corpus("wikitext-2")
    assert len(corpus.documents) == 2 * len(names)
    assert corpus.documents[0].startswith("= First article =") and "= = A section = =" in corpus.documents[0]
    assert corpus.documents[1].split() == ["=", "Second", "=", "Text", "of", "the", "second", "."]
    assert all(name.rpartition("/")[2] in corpus.origin for name in names)


def test_wikitext_is_read_from_parquet_too(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = WIKITEXT.splitlines(keepends=True)
    parquet.write_table(pa.table({"text": lines}), tmp_path / "test-00000-of-00001.parquet")
    (tmp_path / "valid.txt").write_text(WIKITEXT)
    monkeypatch.setenv("MEMORIZATION_DATA", str(tmp_path))
    plain = corpora.load_corpus()
    (tmp_path / "valid.txt").unlink()
    corpora._load.cache_clear()
    assert corpora.load_corpus().sha256 == plain.sha256


def test_a_folder_without_wikitext_is_refused(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("nothing")
    monkeypatch.setenv("MEMORIZATION_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="MEMORIZATION_DATA.*wikitext-2"):
        corpora.load_corpus()
    monkeypatch.setenv("MEMORIZATION_DATA", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="MEMORIZATION_DATA.*missing"):
        corpora.load_corpus()


def test_without_folder_and_hub_the_documentation_serves(no_hub, short_documentation):
    assert corpora.load_corpus().name == "documentation"
    with pytest.raises(ValueError, match="wikitext-2 is neither"):
        corpora.load_corpus("wikitext-2")
    with pytest.raises(ValueError, match="name"):
        corpora.load_corpus("books")


def test_the_hub_s_local_cache_needs_no_network(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": WIKITEXT.splitlines(keepends=True)}), tmp_path / "part.parquet")

    def cached(repository, name, repo_type, local_files_only=False):
        assert local_files_only and repository == corpora.HUB_DATASET and repo_type == "dataset"
        return str(tmp_path / "part.parquet")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached)
    corpus = corpora.load_corpus()
    assert corpus.name == "wikitext-2" and len(corpus.documents) == 6 and "hub" in corpus.origin


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    release = threading.Event()

    def hang(self, *args, **kwargs):
        release.wait(60)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", hang)
    monkeypatch.setattr(corpora, "HUB_DEADLINE", 0.05)
    corpora.hub_reachable.cache_clear()
    try:
        assert corpora.hub_reachable() is False
        assert not release.is_set()  # it was not waited for
    finally:
        release.set()
        corpora.hub_reachable.cache_clear()


# ------------------------------------------------------------------------------------------------ the documentation


def test_the_documentation_is_parsed_once_and_again_when_its_sources_change(short_documentation, monkeypatch):
    first = corpora.load_corpus("documentation")
    corpora._load.cache_clear()
    assert corpora.load_corpus("documentation") == first and len(short_documentation) == 1
    corpora._load.cache_clear()
    files = _documentation.source_files()
    monkeypatch.setattr(_documentation, "source_files", lambda: files[1:])
    corpora.load_corpus("documentation")
    assert len(short_documentation) == 2


def test_a_damaged_copy_of_the_documentation_is_made_anew(short_documentation, own_cache):
    first = corpora.load_corpus("documentation")
    corpora._load.cache_clear()
    (copy,) = (own_cache / "corpora").glob("documentation-*/documents.json")
    copy.write_text(copy.read_text().replace("text", "tent"))
    with pytest.warns(UserWarning, match="damaged"):
        assert corpora.load_corpus("documentation") == first
    assert len(short_documentation) == 2


def test_the_documentation_is_megabytes_of_prose_and_nothing_is_imported_for_it():
    loaded = set(sys.modules)
    documents = _documentation.documents()
    imported = set(sys.modules) - loaded
    assert not {name for name in imported if name.startswith(("scipy.", "numpy.", "turtle", "antigravity", "idlelib"))}
    text = "".join(documents)
    assert len(text) > 6_000_000
    lines = text.splitlines()
    assert len(lines) == len(set(lines))  # no paragraph twice
    assert not any(line.startswith(">>>") for line in lines)
    letters = sum(map(str.isalpha, text)) + sum(map(str.isspace, text))
    assert letters > 0.9 * len(text)
    words = text.lower().split()
    assert 0.04 < words.count("the") / len(words) < 0.09  # as in English


DOCSTRING = """Compute the weighted mean of the samples along one axis.

    Parameters
    ----------
    samples : array_like, shape (n, k)
        The observations, one in each row, of any numeric type at all.
    axis : int, optional
        Axis over which to average; all of them by default.

    Returns
    -------
    ndarray
        See :func:`numpy.mean` and the ``weights`` argument for the details [1]_ of it.

    .. math::
        m = \\sum_i w_i x_i

    .. versionadded:: 1.2
        Weights may also be negative, which is useful for contrasts.

    See Also
    --------
    median : The middle value of the samples, which is robust to outliers.

    Notes
    -----
    The sum is accumulated in double precision whatever the input::

        total += weight * sample  # a literal block of code

    References
    ----------
    .. [1] A. Author, "On the mean of weighted samples and its many uses".

    Examples
    --------
    A single row is returned as it is, whatever the weight may be.

    >>> weighted_mean([1, 2, 3], weights=None)  # a comment of some length in it
    2.0 and more output than a line of prose would ever need here
    """


def test_a_docstring_gives_its_sentences_alone():
    assert list(_documentation.paragraphs(DOCSTRING)) == [
        "Compute the weighted mean of the samples along one axis.",
        "The observations, one in each row, of any numeric type at all.",
        "Axis over which to average; all of them by default.",
        "ndarray See numpy.mean and the weights argument for the details of it.",
        "Weights may also be negative, which is useful for contrasts.",
        "The sum is accumulated in double precision whatever the input:",
        "A single row is returned as it is, whatever the weight may be.",
    ]


# ------------------------------------------------------------------------------------------------------ tokenizing


def long_corpus(seed=0) -> corpora.Corpus:
    rng = np.random.default_rng(seed)
    words = "the quick brown fox jumps over a lazy dog and runs".split()
    return corpora.Corpus("own", tuple(" ".join(rng.choice(words, size=60)) for _ in range(40)))


def test_blocks_are_the_parts_end_to_end():
    corpus, tokenizer = long_corpus(), tiny_tokenizer()
    blocks = corpora.tokenize_blocks(corpus, tokenizer)
    for part in corpora.PARTS:
        array = getattr(blocks, part)
        assert array.dtype == np.int64 and array.shape[1] == 48
        text = tokenizer.decode(array.reshape(-1))
        whole = "".join(text + "<|endoftext|>" for text in corpus.parts[part])
        assert whole.startswith(text) or whole.startswith(text[:-1])  # a cut may fall inside a character
        missing = len(tokenizer(whole[len(text) :])["input_ids"])
        assert missing < 48 + 2
    assert corpora.tokenize_blocks(corpus, tokenizer, block=16).heldout.shape[1] == 16


def test_tokenizing_happens_once_for_a_corpus_and_a_tokenizer(monkeypatch, own_cache):
    corpus, tokenizer = long_corpus(), tiny_tokenizer()
    first = corpora.tokenize_blocks(corpus, tokenizer)
    real, calls = corpora.tokenize, []
    monkeypatch.setattr(corpora, "tokenize", lambda *given: calls.append(1) or real(*given))
    again = corpora.tokenize_blocks(corpus, tokenizer)
    assert not calls
    for part in corpora.PARTS:
        np.testing.assert_array_equal(getattr(first, part), getattr(again, part))
        assert getattr(again, part).dtype == np.int64
    corpora.tokenize_blocks(long_corpus(1), tokenizer)
    corpora.tokenize_blocks(corpus, tiny_tokenizer(True))
    assert len(calls) == 6
    for file in (own_cache / "corpora").rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="damaged"):
        np.testing.assert_array_equal(corpora.tokenize_blocks(corpus, tokenizer).heldout, first.heldout)


def test_a_corpus_smaller_than_a_block_is_refused():
    with pytest.raises(ValueError, match="must hold a block of 48 tokens"):
        corpora.tokenize_blocks(corpora.Corpus("own", ("one", "two", "three")), tiny_tokenizer())
    with pytest.raises(ValueError, match="block must be"):
        corpora.tokenize_blocks(long_corpus(), tiny_tokenizer(), block=1)


# --------------------------------------------------------------------------------------------- synthetic languages


def test_zipf_is_the_power_law_that_the_claims_name():
    law = corpora.zipf(1024, 1.1)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(law[:-1] / law[1:], (np.arange(2, 1025) / np.arange(1, 1024)) ** 1.1, rtol=1e-12)
    assert law[:4].sum() == pytest.approx(0.3550, abs=5e-5) and -np.log2(law[0]) == pytest.approx(2.481, abs=5e-4)
    np.testing.assert_array_equal(corpora.zipf(5, 0.0), np.full(5, 0.2))
    counts = corpora.zipf_counts(100_000, 16, 1.1, np.random.default_rng(0))
    assert counts.sum() == 100_000
    expected = 100_000 * corpora.zipf(16, 1.1)
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square with 15 degrees of freedom: p = 8e-5
    for bad in ({"atoms": 0}, {"atoms": 4, "exponent": -1.0}, {"atoms": 4, "exponent": float("nan")}):
        with pytest.raises(ValueError):
            corpora.zipf(**bad)


def test_markov_zipf_rows_are_permuted_zipf_laws_and_samples_follow_them():
    language = corpora.markov_zipf(6, 1.5, np.random.default_rng(0))
    law = corpora.zipf(6, 1.5)
    np.testing.assert_allclose(np.sort(language.transition, axis=1), np.sort(law)[None].repeat(6, axis=0), rtol=1e-15)
    assert len(np.unique(language.transition, axis=0)) > 3  # each in an order of its own
    words = np.array(list(itertools.product(range(6), repeat=4)))
    probabilities = np.exp(language.log_prob(words))
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    sample = language.sample(200_000, 4, np.random.default_rng(1))
    assert sample.shape == (200_000, 4)
    observed = np.bincount(sample @ 6 ** np.arange(3, -1, -1), minlength=6**4)
    expected = 200_000 * probabilities
    often = expected > 20
    z = (observed - expected)[often] / np.sqrt(expected[often])
    assert often.sum() > 300 and abs(z).max() < 5 and z.std() == pytest.approx(1, abs=0.15)


def test_markov_zipf_is_repeatable_and_refuses_bad_sizes():
    first, second = (corpora.markov_zipf(8, 1.0, np.random.default_rng(3)) for _ in range(2))
    np.testing.assert_array_equal(first.transition, second.transition)
    np.testing.assert_array_equal(*(law.sample(3, 9, np.random.default_rng(4)) for law in (first, second)))
    for bad in ((0, 3), (3, 0)):
        with pytest.raises(ValueError):
            first.sample(*bad, np.random.default_rng(0))
