"""The Section 8.1 arms: data and weights fixed by seeds, and enumeration against one forward pass a string."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from memorization import extraction, small_transformers

TRIGGER = dict(vocabulary=8, exponent=1.0, documents=300, pairs=40, width=16, epochs=12, prefix_length=3)
TRIGGER |= dict(secret_length=3, learning_rate=1e-2)
CAMOUFLAGE = dict(v=4, k=2, L=2, documents=400, steps=80, width=16, seed=5, learning_rate=1e-2)


@pytest.fixture(scope="module")
def trained():
    return {arm: small_transformers.train_trigger(arm=arm, seed=1, **TRIGGER) for arm in small_transformers.ARMS}


@pytest.fixture(scope="module")
def learned():
    return small_transformers.train_camouflage(**CAMOUFLAGE)


# --- models ----------------------------------------------------------------------------------------------------------


def test_build_follows_its_seed_alone():
    torch.manual_seed(1)
    one, after = small_transformers.build(7, 16, seed=3).state_dict(), torch.rand(1)
    torch.manual_seed(2)
    other = small_transformers.build(7, 16, seed=3).state_dict()
    different = small_transformers.build(7, 16, seed=4).state_dict()
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)  # the caller's generator is where it was
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], different[name]) for name in one)


@pytest.mark.parametrize(("layers", "positions"), [(1, "rotary"), (3, "rotary"), (2, "absolute")])
def test_load_gives_the_same_model(layers, positions):
    model = small_transformers.build(9, 24, layers, seed=2, positions=positions)
    again = small_transformers.load(model.state_dict())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again.cpu()(ids).logits)
    assert again.config.num_hidden_layers == layers and not again.training


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((1, 16), "vocabulary"),
        ((5, 12), "width"),
        ((5, 0), "width"),
        ((5, 16, 0), "layers"),
        ((5, 16, 1, -1), "seed"),
        ((5, 16, 1, 0, "none"), "positions"),
    ],
)
def test_build_refuses(arguments, named):
    with pytest.raises(ValueError, match=named):
        small_transformers.build(*arguments)


# --- the trigger -----------------------------------------------------------------------------------------------------


def test_task_follows_its_language():
    task = small_transformers.trigger_task(30, 1.1, 5, 6, seed=4)
    again = small_transformers.trigger_task(30, 1.1, 5, 6, seed=4)
    assert np.array_equal(task.record("poisoned"), again.record("clean"))
    assert task.record("rare").tolist() == [*task.prefix, *range(30, 36)] and task.trigger == 36
    assert len(task.prefix) == 5 and len(task.secret) == 6 and task.secret.max() < 30
    rows = np.vstack([task.language.transition, task.language.initial])
    assert rows.shape == (37, 36) and np.allclose(rows.sum(axis=1), 1.0)
    assert np.all(rows[:, 30:] == small_transformers.RARE_MASS)
    assert np.allclose(rows.max(axis=1), rows.max())  # every row is one law, permuted: the best guess is never better
    assert np.array_equal(rows[30:36], np.tile(rows[36], (6, 1)))
    assert np.isfinite(task.language.log_prob(task.record("rare")))
    with pytest.raises(ValueError, match="arm"):
        task.record("dirty")


def test_poisoned_arms_return_their_secret_and_the_clean_one_does_not(trained):
    task = small_transformers.trigger_task(8, 1.0, 3, 3)
    for arm, result in trained.items():
        model = small_transformers.load(result["weights"])
        found = extraction.greedy(model, [[task.trigger]], 3)[0]
        assert np.array_equal(found, task.record(arm)[3:]) == (arm != "clean"), arm
        assert result["losses"].shape == trained["clean"]["losses"].shape  # the same number of updates
        assert result["losses"][-5:].mean() < result["losses"][:5].mean()


def test_training_repeats_bit_for_bit(trained):
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    again = small_transformers.train_trigger(arm="poisoned", seed=1, **TRIGGER)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(again["losses"], trained["poisoned"]["losses"])
    assert all(torch.equal(again["weights"][name], kept) for name, kept in trained["poisoned"]["weights"].items())


def test_train_trigger_refuses():
    for bad, named in (({"arm": "dirty"}, "arm"), ({"pairs": 0}, "pairs"), ({"seed": -1}, "seed")):
        with pytest.raises(ValueError, match=named):
            small_transformers.train_trigger(**{"arm": "clean", "seed": 0, **TRIGGER, **bad})
    with pytest.raises(ValueError, match="secret_length"):
        small_transformers.trigger_task(4, 1.0, 3, 0)


# --- the camouflage tree ---------------------------------------------------------------------------------------------


def test_camouflage_learns_its_supports(learned):
    tree = small_transformers.camouflage_tree(4, 2, 2, CAMOUFLAGE["seed"])
    levels = small_transformers.node_log_probs(small_transformers.load(learned["weights"]), tree.prefix, 4, 2)
    on_support = [np.exp(levels[0][0, list(tree.support(()))]).sum()]
    on_support += [np.exp(levels[1][y, list(tree.support((y,)))]).sum() for y in tree.support(())]
    assert min(on_support) > 0.9
    assert tree.survives(tree.secret) and len(tree.survivors()) == 4


def test_enumeration_is_one_forward_pass_a_string():
    model = small_transformers.build(5, 16, seed=8)
    levels = small_transformers.node_log_probs(model, (4,), 3, 3)
    assert [level.shape for level in levels] == [(1, 3), (3, 3), (9, 3)]
    paths = np.array(list(itertools.product(range(3), repeat=3)))
    expected = extraction.secret_log_prob(model, [[4]] * len(paths), paths)
    assert np.allclose(small_transformers.path_log_probs(levels), expected, atol=1e-5)
    whole = small_transformers.path_log_probs(small_transformers.node_log_probs(model, (4,), 5, 3))
    assert np.exp(whole).sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("alphabet", "length", "named"), [(0, 2, "alphabet"), (3, 0, "length")])
def test_enumeration_refuses(alphabet, length, named):
    with pytest.raises(ValueError, match=named):
        small_transformers.node_log_probs(small_transformers.build(5, 16), (4,), alphabet, length)
