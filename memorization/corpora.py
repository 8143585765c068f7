"""The text that models are trained on: one active corpus, its three disjoint parts, and two synthetic languages.

The active corpus is wikitext-2 from the folder `MEMORIZATION_DATA` names, else wikitext-2 from the hub, else the
documentation of Python, numpy and scipy, which is on every machine. Its name and hash belong to every result.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import _checks, _documentation, _store, settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NAMES = ("wikitext-2", "documentation")
PARTS = ("pretraining", "fine_tuning", "heldout")
SHARES = (0.5, 0.3, 0.2)  # of the characters, in the order of PARTS
BLOCK = 48  # tokens (Appendix F)
HUB_DATASET = "Salesforce/wikitext"
HUB_CONFIGURATION = "wikitext-2-raw-v1"
HUB_DEADLINE = 5.0  # seconds, name resolution included

_HEADING = re.compile(r"^ = [^=\n].*[^=\n] =[ \t]*$", re.MULTILINE)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """Documents of plain text, with where they came from.

    Attributes:
        name: "wikitext-2", "documentation", or the caller's own.
        documents: the texts; the order does not matter to anything below.
        origin: where they were found, in words.
    """

    name: str
    documents: tuple[str, ...]
    origin: str = "given by the caller"

    def __post_init__(self) -> None:
        """Refuse a corpus without text."""
        if isinstance(self.documents, str) or not all(isinstance(text, str) for text in self.documents):
            raise ValueError("documents must be a sequence of strings")
        object.__setattr__(self, "documents", tuple(text for text in self.documents if text.strip()))
        if not self.documents:
            raise ValueError(f"documents must hold some text; the corpus {self.name!r} is empty")

    @functools.cached_property
    def sha256(self) -> str:
        """The hash (hex) of the documents: two corpora with the same hash are the same."""
        return _store.digest(*self.documents)

    @property
    def fingerprint(self) -> str:
        """The hash, under the name that the run cache looks for."""
        return self.sha256

    @functools.cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """The three disjoint parts: whole documents, in shares of 50, 30 and 20% of the characters.

        Documents are dealt in the order of their own hashes, so each part holds the same mixture of sources and
        neither the order of files nor a random generator's version plays a role.
        """
        dealt = sorted(self.documents, key=_store.digest)
        ends = np.cumsum([len(text) for text in dealt])
        cuts = np.searchsorted(ends, np.cumsum(SHARES)[:-1] * ends[-1]) + 1
        bounds = [0, *(int(cut) for cut in cuts), len(dealt)]
        return {part: tuple(dealt[low:high]) for part, low, high in zip(PARTS, bounds, bounds[1:], strict=False)}

    def __repr__(self) -> str:
        """Name, size and hash; never the text itself."""
        size = sum(map(len, self.documents)) / 1e6
        return f"Corpus({self.name!r}, {len(self.documents)} documents, {size:.1f} MB, sha256 {self.sha256[:12]})"


@dataclass(frozen=True)
class Blocks:
    """A tokenized corpus: int64 arrays of shape (blocks, block) for each of the three parts."""

    pretraining: NDArray[np.int64]
    fine_tuning: NDArray[np.int64]
    heldout: NDArray[np.int64]


# ---------------------------------------------------------------------------------------------- the active corpus


def load_corpus(name: str | None = None) -> Corpus:
    """The corpus called `name`, or the active one: `MEMORIZATION_DATA`, else the hub, else the documentation.

    Raises:
        ValueError: the name is unknown, the folder that `MEMORIZATION_DATA` names holds no wikitext-2, or
            "wikitext-2" is asked for where neither a folder nor the hub has it.
    """
    if name is not None:
        _checks.choice("name", name, NAMES)
    return _load(name, settings.data_folder())


@functools.lru_cache(maxsize=4)
def _load(name: str | None, folder: Path | None) -> Corpus:
    corpus = None
    if name != "documentation":
        corpus = _from_folder(folder) if folder else _from_hub()
    if corpus is None:
        if name == "wikitext-2":
            raise ValueError(
                "wikitext-2 is neither in a folder that MEMORIZATION_DATA names nor on a hub that can be reached; set "
                "MEMORIZATION_DATA to a folder with its train, valid or test text, or use the 'documentation' corpus"
            )
        corpus = _from_documentation()
    _log.info("corpus: %r, %s", corpus, corpus.origin)
    return corpus


def _from_folder(folder: Path) -> Corpus:
    """Every split in the folder, or else one level below it, in the first of the formats that is there."""
    choices = [(pattern, suffix) for pattern in ("*", "*/*") for suffix in (".txt", ".tokens", ".raw", ".parquet")]
    for pattern, suffix in choices:
        found = sorted(path for path in folder.glob(pattern + suffix) if re.search(r"train|valid|test", path.name))
        if found:
            break
    else:
        raise ValueError(
            f"MEMORIZATION_DATA must name a folder with wikitext-2's train, valid or test files "
            f"(.txt, .tokens, .raw or .parquet), found none in {str(folder)!r}"
        )
    text = "".join(_read(path) for path in found)
    return Corpus("wikitext-2", _articles(text), f"from {', '.join(path.name for path in found)}")


def _read(path: Path) -> str:
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise ImportError('reading .parquet files needs pyarrow: pip install "memorization[lm]"') from None
        return "".join(parquet.read_table(path, columns=["text"])["text"].to_pylist())
    return path.read_text(encoding="utf-8")


def _articles(text: str) -> tuple[str, ...]:
    """Wikitext's articles: each starts at a heading of the first level."""
    starts = [match.start() for match in _HEADING.finditer(text)] or [0]
    bounds = [*starts, len(text)]
    return tuple(text[low:high].strip() + "\n" for low, high in zip(bounds, bounds[1:], strict=False))


def _from_hub() -> Corpus | None:
    """Wikitext-2 from the hub's local cache, else from the hub itself if it answers; None otherwise."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        return None

    names = [f"{HUB_CONFIGURATION}/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")]
    fetch = functools.partial(hf_hub_download, HUB_DATASET, repo_type="dataset")
    try:
        paths = [fetch(name, local_files_only=True) for name in names]
    except (OSError, ValueError):
        if not hub_reachable():
            return None
        try:
            paths = [fetch(name) for name in names]
        except (OSError, ValueError) as error:
            _log.warning("the hub answers, but %s could not be fetched: %s", HUB_DATASET, error)
            return None
    text = "".join(_read(Path(path)) for path in paths)
    return Corpus("wikitext-2", _articles(text), f"from the hub ({HUB_DATASET}, {HUB_CONFIGURATION})")


@functools.lru_cache(maxsize=1)
def hub_reachable() -> bool:
    """Whether the model hub answers within a few seconds, asked once a process.

    Libraries that download try again and again for half a minute; and a resolver without an answer can hang for
    longer than any timeout of theirs. So the question is put in a thread with a deadline.
    """
    answer: list[bool] = []

    def ask() -> None:
        try:
            from huggingface_hub import HfApi

            HfApi().dataset_info(HUB_DATASET, timeout=HUB_DEADLINE)
            answer.append(True)
        except Exception:  # offline comes as a dozen kinds of error, by version and transport
            answer.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_DEADLINE)
    return bool(answer and answer[0])


def _from_documentation() -> Corpus:
    """The documentation, parsed once and kept in the cache under the names, sizes and times of its sources."""
    files = _documentation.source_files()
    stamps = [f"{name} {path.stat().st_size} {path.stat().st_mtime_ns}" for name, path in files]
    code = _store.file_digest(Path(_documentation.__file__))
    entry = settings.cache_folder() / "corpora" / f"documentation-{_store.digest(code, *stamps)[:32]}"
    origin = "topics, docstrings and comments of Python, numpy and scipy"
    if _store.verified(entry):
        return Corpus("documentation", json.loads((entry / "documents.json").read_text(encoding="utf-8")), origin)
    texts = _documentation.documents()

    def fill(folder: Path) -> None:
        (folder / "documents.json").write_text(json.dumps(texts), encoding="utf-8")

    _store.write(entry, fill)
    return Corpus("documentation", texts, origin)


# ---------------------------------------------------------------------------------------------------- tokenizing


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 (hex) of everything that decides how the tokenizer cuts a text."""
    return _store.digest(tokenizer.backend_tokenizer.to_str())


def tokenize(texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64]:
    """The texts as one stream of tokens, the end-of-text token (where there is one) after each; no other specials."""
    rows = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return np.concatenate([np.asarray(row + end, dtype=np.int64) for row in rows])


def tokenize_blocks(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, block: int = BLOCK) -> Blocks:
    """Cut each part of the corpus into contiguous blocks of `block` tokens; a remainder is dropped.

    Tokenized once for a corpus, a tokenizer and a block length, then read from the cache.

    Raises:
        ValueError: a part is too small for one block.
    """
    block = _checks.integer("block", block, 2)
    key = _store.digest(corpus.sha256, tokenizer_hash(tokenizer), str(block))
    entry = settings.cache_folder() / "corpora" / f"blocks-{key[:32]}"
    if _store.verified(entry):
        with np.load(entry / "blocks.npz", allow_pickle=False) as stored:
            return Blocks(**{part: stored[part].astype(np.int64) for part in PARTS})
    made = {}
    for part in PARTS:
        stream = tokenize(corpus.parts[part], tokenizer) if corpus.parts[part] else np.empty(0, dtype=np.int64)
        if len(stream) < block:
            raise ValueError(f"the {part} part of {corpus!r} must hold a block of {block} tokens, it has {len(stream)}")
        made[part] = stream[: len(stream) // block * block].reshape(-1, block)
    _store.write(
        entry,
        lambda folder: np.savez(folder / "blocks.npz", **{part: rows.astype(np.int32) for part, rows in made.items()}),
    )
    return Blocks(**made)


# ------------------------------------------------------------------------------------------- synthetic languages


def zipf(atoms: int, exponent: float = 1.1) -> NDArray[np.float64]:
    """Zipf's law on `atoms` symbols: p(i) proportional to (i + 1)^-exponent, most frequent first."""
    atoms = _checks.integer("atoms", atoms, 1)
    exponent = _checks.finite("exponent", exponent, 0.0)
    weights = np.arange(1, atoms + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def zipf_counts(size: int, atoms: int, exponent: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Counts of each symbol in a corpus of `size` independent draws from Zipf's law, shape (atoms,)."""
    return rng.multinomial(_checks.integer("size", size), zipf(atoms, exponent))


@dataclass(frozen=True)
class MarkovZipf:
    """A Markov language whose every row is Zipf's law in an order of its own: skewed like words, cheap to know exactly.

    Attributes:
        transition: (vocabulary, vocabulary) row-stochastic matrix.
        initial: (vocabulary,) law of the first token, Zipf's own.
    """

    transition: NDArray[np.float64]
    initial: NDArray[np.float64]

    def sample(self, documents: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Independent documents of `length` tokens, shape (documents, length)."""
        documents, length = _checks.integer("documents", documents, 1), _checks.integer("length", length, 1)
        rows = np.cumsum(self.transition, axis=1)
        last = len(self.initial) - 1  # rounding can leave a row's total just under a draw
        tokens = np.empty((documents, length), dtype=np.int64)
        draws = rng.random((documents, length))
        tokens[:, 0] = np.minimum(np.searchsorted(np.cumsum(self.initial), draws[:, 0], side="right"), last)
        for place in range(1, length):
            reached = rows[tokens[:, place - 1]] <= draws[:, place, None]
            tokens[:, place] = np.minimum(reached.sum(axis=1), last)
        return tokens

    def log_prob(self, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """log p (nats) of documents of shape (..., length)."""
        tokens = np.asarray(tokens, dtype=np.int64)
        steps = np.log(self.transition[tokens[..., :-1], tokens[..., 1:]])
        return np.log(self.initial[tokens[..., 0]]) + steps.sum(axis=-1)


def markov_zipf(vocabulary: int, exponent: float, rng: np.random.Generator) -> MarkovZipf:
    """A Markov–Zipf language: each row of the transition matrix is Zipf's law, permuted at random."""
    law = zipf(_checks.integer("vocabulary", vocabulary, 2), exponent)
    return MarkovZipf(rng.permuted(np.tile(law, (len(law), 1)), axis=1), law)
