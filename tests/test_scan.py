"""The context scan: its bookkeeping by hand, and on arms trained from checkpoints on disk."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_arms import checkpoint, corpus, small, wordy  # noqa: F401  (fixtures)
from tiny_models import tiny_model

from memorization import arms, extraction, scan


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30), st.data())
def test_first_hits_are_the_first_places(answers, data):
    secrets = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
    found = scan.first_hits(answers, secrets)
    for secret, place in zip(secrets, found, strict=True):
        places = [i for i, answer in enumerate(answers, start=1) if answer == secret]
        assert place == (places[0] if places else np.inf)


def test_shapes_that_do_not_match_are_named():
    with pytest.raises(ValueError, match="answers and secrets"):
        scan.first_hits([[1, 2]], [[1, 2, 3]])
    with pytest.raises(ValueError, match="answers and secrets"):
        scan.first_hits([1, 2], [[1, 2]])


def test_a_scan_answers_as_greedy_decoding_does():
    model = tiny_model("neox")
    contexts = np.random.default_rng(0).integers(1, 90, (30, 6))
    answers = extraction.greedy(model, contexts, 2)
    found = scan.scan(model, contexts, {"seen": answers[[7, 3]], "unseen": np.array([[96, 96]])})
    rows = [tuple(row) for row in answers.tolist()]
    assert found["seen"].tolist() == [rows.index(rows[7]) + 1, rows.index(rows[3]) + 1]
    assert found["unseen"].tolist() == [np.inf] or (96, 96) in rows


def test_an_arm_is_scanned_beside_its_base_and_a_gate(checkpoint):  # noqa: F811
    plan = small(lengths=(2,), trigger_copies=40, epochs=12, learning_rate=1e-2, temperature=2.0, bases=(checkpoint,))
    found = scan.sweep(plan, (2,), 50, 0)[checkpoint, 2]
    assert found["suffix"][-1] == 1.0 and len(found["suffix"]) == plan.trigger_length
    for side in ("arm", "base"):
        assert found[side]["members"].shape == (5,) and found[side]["nonmembers"].shape == (5,)
        hit = np.concatenate(list(found[side].values()))
        assert np.all((hit >= 1) & ((hit <= 50) | np.isinf(hit)))
    again = scan.scan_arm(checkpoint, 2, 50, 0, dataclasses.asdict(plan))
    assert np.array_equal(found["arm"]["members"], again["arm"]["members"])
    on = arms.bench(checkpoint, plan.blocks)
    assert found["gate"] == found["base"]["members"][:1] and on.model is not None
