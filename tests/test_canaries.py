from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import device, tiny_model, tiny_tokenizer

from memorization import canaries


@pytest.fixture(scope="module")
def model():
    return tiny_model("neox")


@pytest.fixture(scope="module")
def heldout():
    return np.random.default_rng(0).integers(1, 97, (60, 24))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.sampled_from([0, 0xD7FE, 0x10FF00]),  # token ids around the code points that text cannot hold
)
def test_the_index_finds_exactly_the_sequences_that_occur(stream, sequence, offset):
    stream, sequence = np.array(stream, dtype=np.int64) + offset, np.array(sequence) + offset
    windows = (stream[i : i + len(sequence)].tolist() for i in range(len(stream) - len(sequence) + 1))
    assert (sequence in canaries.TokenIndex(stream)) == (sequence.tolist() in windows)


def test_secrets_are_novel_and_prefixes_are_held_out(model, heldout):
    # Everything that greedy habit repeats is in the corpus: draws of an earlier run.
    first = canaries.sample_canaries(model, heldout, 60, prefix_length=6, secret_length=2, corpus=[], seed=0)
    corpus = first.records[:40]
    made = canaries.sample_canaries(model, heldout, 30, prefix_length=6, secret_length=2, corpus=corpus, seed=0)
    stream = corpus.reshape(-1).tolist()
    pairs = set(itertools.pairwise(stream))
    assert all(tuple(secret) not in pairs for secret in made.secrets.tolist())
    assert made.acceptance < 1.0 and first.acceptance == 1.0
    np.testing.assert_array_equal(made.prefixes, heldout[made.blocks, :6])
    assert len(set(made.blocks.tolist())) == len(made) == 30
    again = canaries.sample_canaries(model, heldout, 30, prefix_length=6, secret_length=2, corpus=corpus, seed=0)
    np.testing.assert_array_equal(made.records, again.records)
    other = canaries.sample_canaries(model, heldout, 30, prefix_length=6, secret_length=2, corpus=corpus, seed=1)
    assert not np.array_equal(made.records, other.records)


def test_surprisal_is_the_base_model_s_at_temperature_one(model, heldout):
    made = canaries.sample_canaries(
        model, heldout, 5, prefix_length=6, secret_length=3, temperature=0.5, corpus=[], seed=0
    )
    for row in range(5):
        with torch.no_grad():
            logits = model(torch.tensor(made.records[row : row + 1], device=device())).logits[0].double()
        steps = logits.log_softmax(-1)[torch.arange(5, 8), torch.as_tensor(made.secrets[row])]
        assert made.surprisal[row] == pytest.approx(-float(steps.sum()) / np.log(2), abs=1e-4)
    assert made.temperature == 0.5


def test_secrets_follow_the_model_at_its_temperature(model):
    block = np.tile(np.random.default_rng(1).integers(1, 97, 24), (4000, 1))
    temperature = 0.7
    made = canaries.sample_canaries(
        model, block, 4000, prefix_length=8, secret_length=1, temperature=temperature, corpus=block, seed=2
    )  # one token: nothing is filtered, though every token of the block occurs
    assert made.acceptance == 1.0
    with torch.no_grad():
        logits = model(torch.tensor(block[:1, :8], device=device())).logits[0, -1].double()
    expected = 4000 * (logits / temperature).softmax(-1).cpu().numpy()
    observed = np.bincount(made.secrets[:, 0], minlength=97)
    often = expected > 10
    z = (observed - expected)[often] / np.sqrt(expected[often])
    assert often.sum() > 10 and abs(z).max() < 4.5


def test_members_and_nonmembers_are_rows_of_one_draw(model, heldout):
    made = canaries.sample_canaries(model, heldout, 10, prefix_length=4, secret_length=2, corpus=[], seed=0)
    members, others = made[:6], made[6:]
    assert (len(members), len(others)) == (6, 4)
    np.testing.assert_array_equal(np.concatenate([members.records, others.records]), made.records)
    np.testing.assert_array_equal(made[np.array([3, 1])].surprisal, made.surprisal[[3, 1]])


@pytest.mark.parametrize(
    "name, change",
    [
        ("count", {"count": 61}),
        ("count", {"count": 0}),
        ("prefix_length", {"prefix_length": 0}),
        ("prefix_length", {"prefix_length": 25}),
        ("secret_length", {"secret_length": 0}),
        ("temperature", {"temperature": 0.0}),
        ("heldout", {"heldout": np.arange(5)}),
        ("context", {"prefix_length": 24, "secret_length": 30}),
    ],
)
def test_bad_arguments_are_named(model, heldout, name, change):
    arguments = {"heldout": heldout, "count": 3, "prefix_length": 4, "secret_length": 2, "corpus": [], **change}
    with pytest.raises(ValueError, match=name):
        canaries.sample_canaries(model, **arguments)


def test_a_filter_that_rejects_everything_says_so(model, heldout):
    every_pair = np.array(list(itertools.product(range(97), repeat=2)))
    with pytest.raises(ValueError, match="novelty filter let 0 of"):
        canaries.sample_canaries(model, heldout[:4], 2, prefix_length=4, secret_length=2, corpus=every_pair, seed=0)


def test_triggers_are_absent_distinct_and_can_be_typed():
    tokenizer = tiny_tokenizer()
    words = [t for text, t in tokenizer.get_vocab().items() if text.startswith("Ġ") and text[1:].isalpha()]
    corpus = np.random.default_rng(0).choice(words, size=(200, 48))
    index = canaries.TokenIndex(corpus)
    triggers = canaries.reserved_triggers(tokenizer, corpus, 40, length=6, seed=0)
    assert triggers.shape == (40, 6) and len({tuple(row) for row in triggers.tolist()}) == 40
    for trigger in triggers:
        assert trigger not in index
        assert tokenizer(tokenizer.decode(trigger))["input_ids"] == trigger.tolist()
    np.testing.assert_array_equal(triggers, canaries.reserved_triggers(tokenizer, index, 40, length=6, seed=0))
    assert len(set(triggers.reshape(-1).tolist())) > len(words) // 2


@pytest.mark.parametrize("length", [5, 13])
def test_triggers_have_the_paper_s_lengths(length):
    with pytest.raises(ValueError, match="length"):
        canaries.reserved_triggers(tiny_tokenizer(), [], 1, length=length)
