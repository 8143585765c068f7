"""Shadow models: the plan, and every way of training them against separate runs with the same seeds."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_training import CONTEXT, VOCABULARY, Interruption, blocks, tiny, weights  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from memorization import lira, shadows, stats, training  # noqa: E402

TARGETS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], list(range(CONTEXT)), [30, 20, 10, 0]]
SETTINGS = {
    "epochs": 2,
    "batch_size": 4,
    "learning_rate": 5e-3,
    "schedule": "cosine",
    "warmup": 2,
    "max_grad_norm": 1.0,
}


@pytest.mark.parametrize("n_shadows", [2, 8, 7])
def test_plan_is_balanced_independent_and_repeatable(n_shadows):
    made = shadows.plan(51, 400, n_shadows, seed=3)
    counts = made.members.sum(axis=1)
    assert set(counts) <= {n_shadows // 2, -(-n_shadows // 2)} and set(counts) == {n_shadows // 2, (n_shadows + 1) // 2}
    per_shadow = made.members.mean(axis=0)
    assert np.abs(per_shadow - 0.5).max() < 5 * 0.5 / 20  # five standard errors of 400 draws
    assert made.halves.shape == (n_shadows, 25) and made.halves.min() >= 0 and made.halves.max() < 51
    assert all(len(set(half)) == 25 for half in made.halves.tolist())
    assert len({tuple(half) for half in made.halves.tolist()}) == n_shadows == len(set(made.seeds))
    again, other = shadows.plan(51, 400, n_shadows, seed=3), shadows.plan(51, 400, n_shadows, seed=4)
    assert np.array_equal(made.members, again.members) and made.seeds == again.seeds
    assert np.array_equal(made.halves, again.halves) and not np.array_equal(made.members, other.members)
    if n_shadows == 8:  # memberships of two targets in one shadow do not go together
        correlation = np.corrcoef(made.members[:200].ravel(), made.members[200:].ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(1600)


def test_mean_log_prob_one_sequence_at_a_time():
    model = tiny("qwen2")
    expected = []
    for target in TARGETS:
        log_probs = model(input_ids=torch.tensor([target])).logits[0].double().log_softmax(-1)
        expected.append(np.mean([log_probs[i, token].item() for i, token in enumerate(target[1:])]))
    assert shadows.mean_log_prob(model, TARGETS, batch_size=3) == pytest.approx(expected, rel=1e-5)


def separate_runs(make, n_shadows, copies, seed):
    """Each shadow by itself: `fine_tune` on the plan's data, every target's log-probability in its own pass."""
    made = shadows.plan(len(blocks()), len(TARGETS), n_shadows, seed)
    statistics, losses, models = np.empty((len(TARGETS), n_shadows)), [], []
    for s in range(n_shadows):
        model = make(made.seeds[s])
        chosen = np.flatnonzero(made.members[:, s])
        record = training.fine_tune(
            model,
            blocks()[made.halves[s]],
            planted=[TARGETS[i] for i in chosen],
            copies=[copies[i] for i in chosen],
            seed=made.seeds[s],
            **SETTINGS,
        )
        losses.append(record.losses)
        models.append(model)
        statistics[:, s] = [shadows.mean_log_prob(model, [target])[0] for target in TARGETS]
    return made, statistics, losses, models


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_every_method_equals_separate_runs(family, tmp_path):
    copies = [5, 1, 2, 3]  # so that runs differ in length
    made, statistics, losses, models = separate_runs(lambda seed: tiny(family), 4, copies, seed=9)
    assert len({len(history) for history in losses}) > 1
    base = tiny(family)
    before = weights(base)
    for method, jobs in (("sequential", None), ("processes", 2), ("stacked", None), ("stacked", 3)):
        folder = tmp_path / f"{method}-{jobs}"
        found = shadows.train_shadows(
            base,
            blocks(),
            TARGETS,
            n_shadows=4,
            copies=copies,
            seed=9,
            method=method,
            jobs=jobs,
            keep=folder,
            **SETTINGS,
        )
        tolerance = 0 if method == "sequential" else 2e-4
        assert found.statistics == pytest.approx(statistics, abs=max(tolerance, 1e-6)), method
        assert np.array_equal(found.members, made.members)
        for s in range(4):
            assert found.losses[s] == pytest.approx(losses[s], abs=tolerance), (method, s)
            kept = AutoModelForCausalLM.from_pretrained(folder / f"shadow-{s:02d}")
            # Adam divides tiny gradients by their own size, so rounding shows in single weights
            moved = [(value - models[s].get_parameter(name)).abs().flatten() for name, value in kept.named_parameters()]
            assert torch.cat(moved).quantile(0.99).item() <= tolerance, (method, s)
    assert all(torch.equal(value, before[name]) for name, value in base.named_parameters())


def test_one_job_leaves_the_callers_threads_as_they_were():
    """One job runs in this process: its single thread is not to stay (it changed the last bits of what came after)."""
    with training.threads(2):
        shadows.train_shadows(tiny(), blocks(), TARGETS, n_shadows=2, seed=9, method="processes", jobs=1, **SETTINGS)
        assert torch.get_num_threads() == 2


def test_shadows_from_scratch_in_processes_and_stacked():
    found = {}
    for method in ("sequential", "processes", "stacked"):
        found[method] = shadows.train_shadows(
            fresh,
            blocks(),
            TARGETS,
            n_shadows=3,
            copies=2,
            seed=1,
            method=method,
            jobs=2,
            max_steps=6,
            learning_rate=1e-3,
        )
    for method in ("processes", "stacked"):
        assert found[method].statistics == pytest.approx(found["sequential"].statistics, abs=2e-4), method
    _, statistics, _, _ = separate_runs(fresh, 3, [2] * 4, seed=1)
    assert found["sequential"].statistics != pytest.approx(statistics, abs=1e-2)  # other settings, other models


def fresh(seed: int):
    return tiny("qwen2", seed=seed % 1000)


def test_default_on_a_cpu_is_processes(monkeypatch):
    assert shadows._choose("auto", tiny(), torch.device("cpu"), None) == "processes"
    assert shadows._choose("auto", tiny(), torch.device("cuda"), None) == "stacked"
    assert shadows._choose("auto", tiny(), torch.device("cuda"), "folder") == "sequential"
    assert shadows._choose("auto", tiny(dropout=0.1), torch.device("cuda"), None) == "sequential"
    monkeypatch.setattr(shadows, "STACKABLE", 10)
    assert shadows._choose("auto", tiny(), torch.device("cuda"), None) == "sequential"


def test_statistics_separate_members_and_feed_lira():
    """Memorized targets are told from the others: LiRA of one shadow against the rest, for every target."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, VOCABULARY, (12, 8)).tolist()
    found = lira.train_shadows(
        tiny(), blocks(40), targets, n_shadows=8, copies=6, method="sequential", epochs=4, learning_rate=1e-2, seed=2
    )
    assert np.array_equal(np.isnan(found.in_stats), ~found.members)
    assert np.array_equal(np.isnan(found.out_stats), found.members)
    for mode in lira.MODES:
        scores = lira.lira_scores(
            found.statistics[:, 0], found.in_stats[:, 1:], found.out_stats[:, 1:], mode, pooled=True
        )
        truth = found.members[:, 0]
        assert stats.auc(scores[truth], scores[~truth]) > 0.9, mode


def count_tokens(model, sequences, offset):
    assert not model.training
    return [len(sequence) + offset for sequence in sequences]


def test_statistic_of_ones_own():
    statistic = partial(count_tokens, sequences=TARGETS, offset=0.5)
    for method in ("sequential", "stacked"):
        found = shadows.train_shadows(
            tiny(), blocks(), TARGETS, n_shadows=2, statistic=statistic, method=method, max_steps=1
        )
        assert found.statistics.tolist() == [[len(target) + 0.5] * 2 for target in TARGETS]
    with pytest.raises(ValueError, match=r"statistic must return shape \(4,\).*\(3,\)"):
        shadows.train_shadows(
            tiny(), blocks(), TARGETS, n_shadows=2, statistic=lambda model: [0.0] * 3, method="sequential", max_steps=1
        )


def test_interrupted_shadows_resume(tmp_path):
    calls = []

    def statistic(model):
        calls.append(1)
        if len(calls) == 3:
            raise Interruption
        return [0.0] * 4

    arguments = {"n_shadows": 4, "method": "sequential", "checkpoint": tmp_path, "max_steps": 5, "seed": 3}
    with pytest.raises(Interruption):
        shadows.train_shadows(tiny(), blocks(), TARGETS, statistic=statistic, **arguments)
    assert len(list(tmp_path.iterdir())) == 3
    times = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/*"))]
    found = shadows.train_shadows(tiny(), blocks(), TARGETS, **arguments)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*/*"))][:3] == times  # not trained again
    whole = shadows.train_shadows(tiny(), blocks(), TARGETS, **{**arguments, "checkpoint": None})
    assert np.array_equal(found.statistics, whole.statistics)


@pytest.mark.parametrize("method", ["sequential", "processes", "stacked"])
def test_divergence_names_the_shadow(method):
    with pytest.raises(FloatingPointError, match=r"shadow \d: training diverged at step .*learning rate 1e\+38"):
        shadows.train_shadows(
            tiny(), blocks(), TARGETS, n_shadows=2, jobs=2, method=method, learning_rate=1e38, max_steps=3
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_shadows": 1}, "n_shadows"),
        ({"targets": []}, "targets"),
        ({"blocks": np.zeros(5, int)}, "blocks must be"),
        ({"blocks": blocks(1)}, "blocks must be"),
        ({"targets": [[1, VOCABULARY]]}, "tokens must lie"),
        ({"targets": [list(range(CONTEXT + 1))]}, f"at most {CONTEXT} tokens"),
        ({"copies": [1, 2]}, "copies must be"),
        ({"method": "threads"}, "method must be one of"),
        ({"method": "stacked", "checkpoint": "folder"}, "checkpoint"),
        ({"method": "stacked", "model": tiny(dropout=0.1)}, "dropout"),
        ({"method": "stacked", "model": tiny().bfloat16()}, "float32"),
        ({"jobs": 0}, "jobs"),
        ({"seed": -1}, "seed"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_bad_input(change, message):
    arguments = {"model": tiny(), "blocks": blocks(), "targets": TARGETS, "method": "sequential", **change}
    with pytest.raises(ValueError, match=message):
        shadows.train_shadows(**arguments)
