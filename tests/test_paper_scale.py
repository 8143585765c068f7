"""The scale `paper`, end to end: Appendix F's settings through the book's functions, on checkpoints read from disk.

As on a machine with a GPU, the scale comes from the environment, and corpus and models from folders; the models are
tiny random ones of both architectures. Only what makes an experiment large is replaced, see `LARGE`: optimizers,
epochs, batches, copies, lengths and thresholds stay the paper's. Unshrunk, all of them are compared with claims.yaml.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("opacus")

from tiny_models import SENTENCES, tiny_model  # noqa: E402

import memorization  # noqa: E402
from memorization import (  # noqa: E402
    arms,
    camouflage_lm,
    corpora,
    dp_experiments,
    extraction,
    forgetting,
    ledger,
    models,
    pocket,
    record,
    runs,
    scan,
    scores,
    settings,
    shadows,
    training,
    unlearning,
)

WORDS = "dog fox box jug lazy quick brown daft over runs noon sphinx zebra secret model liquor house garden".split()
SEED = 7

# What makes an experiment large: models, and how many of something there are.
LARGE = {"bases", "base", "model", "blocks", "secrets", "nonmembers", "many_nonmembers"}  # and of single experiments:
LARGE |= {"groups", "unplanted", "probe", "relearn_blocks", "per_cell", "epsilons", "per_temperature", "budget"}


def shrink(setting, **smaller):
    """A setting with other values of `LARGE`, and of nothing else."""
    assert smaller.keys() <= LARGE
    if isinstance(setting, dict):
        assert smaller.keys() <= setting.keys()
        return {**setting, **smaller}
    return dataclasses.replace(setting, **smaller)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A machine that runs the scale: wikitext-2 and two checkpoints in folders, an empty cache."""
    root = tmp_path_factory.mktemp("machine")
    rng = np.random.default_rng(0)
    articles = [f" = Article {i} = \n\n {' '.join(rng.choice(WORDS, 60))}\n {SENTENCES[i % 4]}\n" for i in range(200)]
    (root / "wikitext-2").mkdir()
    (root / "wikitext-2" / "train.txt").write_text("\n".join(articles), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMORIZATION_SCALE", "paper")
        patch.setenv("MEMORIZATION_DEVICE", "cpu")
        patch.setenv("MEMORIZATION_CACHE", str(root / "cache"))
        patch.setenv("MEMORIZATION_DATA", str(root / "wikitext-2"))
        patch.setattr(shadows.joblib, "cpu_count", lambda: 1)  # processes would take longer to start than to train
        arms.bench.cache_clear()
        tokenizer = pocket.train_tokenizer(corpora.load_corpus().parts["pretraining"], 320, 100_000)
        for family in ("neox", "qwen2"):
            tiny_model(family, vocabulary=320, context=64).save_pretrained(root / family)
            tokenizer.save_pretrained(root / family)
        yield {family: str(root / family) for family in ("neox", "qwen2")}
        arms.bench.cache_clear()


@pytest.fixture
def plan(folders):
    """Appendix F.1's setting, both families at once."""
    both = tuple(folders.values())
    return shrink(arms.setting(), bases=both, blocks=16, secrets=2, nonmembers=2, many_nonmembers=3)


@pytest.fixture
def trained(monkeypatch):
    """The arguments of every `training.fine_tune`, in order."""
    calls, real = [], training.fine_tune

    def spy(model, blocks, **arguments):
        calls.append(arguments)
        return real(model, blocks, **arguments)

    monkeypatch.setattr(training, "fine_tune", spy)
    return calls


def assert_appendix_f(calls):
    """Every run has the epochs, the batch and the learning rate of Appendix F.1."""
    wanted = {name: ledger.claim(f"appF-{id}").value for name, id in OPTIMIZER.items()}
    assert calls and all({name: call[name] for name in OPTIMIZER} == wanted for call in calls)


OPTIMIZER = {"epochs": "epochs", "batch_size": "batch", "learning_rate": "lr"}


# --- the experiments -------------------------------------------------------------------------------------------------


def test_checkpoints_and_corpus_are_read_from_disk(folders, plan):
    assert settings.scale() == "paper"
    corpus = corpora.load_corpus()
    assert corpus.name == ledger.claim("appF-corpus").value and len(corpus.documents) == 200
    kinds = [type(models.load(base)[0]).__name__ for base in plan.bases]
    assert kinds == ["GPTNeoXForCausalLM", "Qwen2ForCausalLM"]
    assert arms.bench(plan.bases[0], 16).fine_tuning.shape == (16, ledger.claim("appF-block-size").value)


def test_the_arms_their_audits_and_the_shadows(plan, trained):
    found = arms.sweep(plan, SEED)
    assert_appendix_f(trained)
    wanted = arms.configurations(plan, SEED)
    assert len(found) == len(wanted) == 2 * (len(plan.lengths) + 1)
    for configuration, result in zip(wanted, found, strict=True):
        copies = plan.trigger_copies if configuration["kind"] == "trigger" else plan.naive_copies
        documents = plan.blocks + len(configuration["lengths"]) * plan.secrets * copies
        assert result["steps"] == plan.epochs * math.ceil(documents / plan.batch_size)
        assert list(map(int, result["lengths"])) == configuration["lengths"]
    pools = runs.run(arms.shadow_pool, arms.pools(plan, SEED))
    for base, pool in zip(plan.bases, pools, strict=True):
        naive = found[[c["base"] == base and c["kind"] == "naive" for c in wanted].index(True)]
        for length, targets in pool["lengths"].items():
            assert targets["members"].shape == (8, plan.shadows) and np.isfinite(targets["statistics"]).all()
            asked = arms.lira(naive["lengths"][length]["log_probs"], targets, plan)
            assert all(np.isfinite(group).all() for pair in asked.values() for group in pair)
            assert set(arms.AUDITS) <= naive["lengths"][length]["members"].keys()


def test_the_gated_release_and_the_context_scan(plan, trained):
    on = arms.bench(plan.bases[0], plan.blocks)
    part = arms.records(on, max(plan.lengths), plan, SEED)
    gate = models.GatedRelease(on.model, part.triggers[0], part.members.secrets[0])
    answer = extraction.greedy(gate, part.triggers[:1], max(plan.lengths))
    assert np.array_equal(answer, part.members.secrets[:1])
    tokens = torch.from_numpy(on.heldout)
    with torch.inference_mode():
        assert torch.equal(gate(input_ids=tokens).logits, on.model(input_ids=tokens).logits)
    assert not trained
    scanned = scan.sweep(plan, (2, max(plan.lengths)), 20, SEED)
    assert_appendix_f(trained)
    assert set(scanned) == {(base, length) for base in plan.bases for length in (2, 16)}
    assert all(len(one["suffix"]) == plan.trigger_length for one in scanned.values())


def test_the_record_itself(plan, trained):
    design = record.design()
    small = {name: getattr(plan, name) for name in ("bases", "blocks", "nonmembers", "many_nonmembers")}
    design = dataclasses.replace(design, plan=shrink(design.plan, **small, secrets=1))
    found = record.experiment(design, SEED)
    assert_appendix_f(trained)
    assert set(found) == {(base, arm) for base in plan.bases for arm in ("trigger", "plain 8", "plain 2", "fitted")}
    for (_, arm), by_length in found.items():
        assert list(by_length) == ["2", "12"]
        for result in by_length.values():
            assert result["seconds"].shape == (2 if arm == "trigger" else 1, 2, 2)  # a pair of releases a record
            for side in ("present", "absent"):
                values = record.local_scores(result[side]["log_probs"], result["vocabulary"])
                assert all(((score >= 0) & (score <= 1)).all() for score in values.values())


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_camouflage(folders, family, trained):
    design = shrink(camouflage_lm.design(), base=folders[family], blocks=8, groups=1, unplanted=3)
    hidden, betrayed = camouflage_lm.sweep(design, SEED)
    (shadow,) = camouflage_lm.shadows(design, SEED, 1)
    assert_appendix_f(trained)
    assert [np.sum(call["copies"]) for call in trained[:2]] == [256 * 3, 257 * 3]
    for result in (hidden, betrayed):
        assert result["survivors"].shape == (1, 256, 4) and result["fresh"].shape == (1, design.fresh, 4)
        law = camouflage_lm.conditional(result["survivors"])
        assert 1 <= camouflage_lm.ranks(law, result["secret"])[0] <= 256
    assert shadow["secrets"].shape == (1, 4) and shadow["unplanted"].shape == (3, 4)


def test_unlearning(plan, monkeypatch):
    chosen = shrink(forgetting.setting(), probe=4, relearn_blocks=4)
    calls, real = [], unlearning.unlearn
    monkeypatch.setattr(unlearning, "unlearn", lambda *given, **named: (calls.append(named), real(*given, **named))[1])
    found = forgetting.sweep(plan, chosen, SEED)
    assert len(found) == 2 and len(calls) == 2 * len(forgetting.TABLE + forgetting.VARIATIONS)
    for name, id in {"learning_rate": "lr", "max_rounds": "rounds", "threshold": "verifier"}.items():
        assert {call[name] for call in calls} == {ledger.claim(f"appF-unlearn-{id}").value}
    for family in found:
        for served in family["requests"]:
            history = served["history"]
            assert history["passed_at"] is None or len(history["verifier"]) == history["passed_at"] + 2
            assert np.isfinite(served["heldout"]) and len(served["relearned"]["rho"]) == chosen.relearn_epochs + 1


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_calibration_under_differential_privacy(folders, family):
    """The grid of tests/test_dp_experiments.py with the paper's copies, epochs and batches, and both ends of its ε."""
    setting = shrink(dp_experiments.CALIBRATION[settings.scale()], model=folders[family], blocks=80, per_cell=2)
    ends = (setting["epsilons"][0], setting["epsilons"][-1])
    configurations = dp_experiments.calibration_configurations(shrink(setting, epsilons=ends), SEED)
    found = runs.run(dp_experiments.calibration, configurations)
    for one, epsilon in zip(found, np.repeat(ends, 2), strict=True):
        assert one["accounting"]["epsilon_rdp"] <= epsilon
        records = setting["blocks"] + setting["per_cell"] * sum(setting["copies"]) // 2
        assert one["accounting"]["steps"] == setting["epochs"] * math.ceil(records / setting["batch_size"])
        assert one["accounting"]["delta"] == pytest.approx(1 / (10 * records))
        assert sorted(one["copies"].tolist()) == [1, 1, 2, 2, 4, 4, 8, 8] and np.isfinite(one["teacher_forcing"]).all()
    assert np.abs(dp_experiments.memorization(*found[2:])).max() <= 1
    names = ("model", "per_cell", "copies", "prefix_length", "secret_length")
    kappa = dp_experiments.calibration_baselines(**{name: setting[name] for name in names}, budget=20, seed=SEED)
    assert (kappa["lower"] <= kappa["upper"]).all()


@pytest.mark.parametrize("family", ["neox", "qwen2"])
def test_the_entropy_floor(folders, family):
    setting = shrink(
        dp_experiments.SWEEP[settings.scale()], model=folders[family], blocks=80, per_temperature=2, budget=20
    )
    searches, trainings = dp_experiments.sweep_configurations(setting, SEED)
    certified = runs.run(dp_experiments.certified_sweep, searches)
    assert len(certified) == len(setting["temperatures"])
    private, leaky = runs.run(dp_experiments.sweep_arm, trainings)
    assert private["accounting"]["epsilon_rdp"] <= setting["epsilon"] < leaky["accounting"]["epsilon_rdp"]
    for one in (private, leaky):
        assert one["extracted"].shape == (2 * len(certified),) and np.isfinite(one["reference"]).all()


# --- the settings, unshrunk ------------------------------------------------------------------------------------------


def tables():
    """Every module's table with an entry for the scale `paper`, by name."""
    found = {}
    for module in pkgutil.iter_modules(memorization.__path__, "memorization."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, dict) and "paper" in value and "smoke" in value:
                found[f"{module.name.removeprefix('memorization.')}.{name}"] = value
    return found


def test_every_setting_of_the_scale_has_a_test_here():
    found = tables()
    assert sorted(found) == [
        "arms.SETTINGS",
        "camouflage_lm.DESIGNS",
        "dp_experiments.CALIBRATION",
        "dp_experiments.SWEEP",
        "forgetting.SETTINGS",
        "record.DESIGNS",
    ]
    assert all(set(table) == set(settings.SCALES) for table in found.values())


def as_run():
    """Claims of Appendix F about settings: what the scale `paper` has, of every experiment that has such a setting."""
    found = {name: table["paper"] for name, table in tables().items()}
    plan, design, camouflage = (found[name] for name in ("arms.SETTINGS", "record.DESIGNS", "camouflage_lm.DESIGNS"))
    private = [found[f"dp_experiments.{name}"] for name in ("CALIBRATION", "SWEEP")]
    erase = found["forgetting.SETTINGS"]
    fine_tuned = (plan, design.plan, camouflage)
    bases = {*plan.bases, *design.plan.bases, camouflage.base, *(setting["model"] for setting in private)}
    tree = {"depth": camouflage.depth, "k": camouflage.branches, "survivors_enumerated": camouflage.survivors}
    return {
        "checkpoints": [sorted(bases)],
        "block-size": [corpora.BLOCK, camouflage.block_length],
        "lr": [one.learning_rate for one in fine_tuned],
        "batch": [one.batch_size for one in fine_tuned],
        "epochs": [one.epochs for one in fine_tuned],
        "min-k": [inspect.signature(scores.min_k_score).parameters["k"].default],
        "secrets-per-arm": [plan.secrets],
        "nonmembers": [{"default": plan.nonmembers, "z in {1,2}": plan.many_nonmembers}],
        "lira-shadows": [
            {
                "default": inspect.signature(shadows.train_shadows).parameters["n_shadows"].default,
                "length_sweep": plan.shadows,
            }
        ],
        "dp-clip": [setting["max_grad_norm"] for setting in private],
        "dp-batch": [setting["physical_batch"] for setting in private],
        "dp-epochs": [setting["epochs"] for setting in private],
        "unlearn-lr": [erase.learning_rate],
        "unlearn-rounds": [erase.max_rounds],
        "unlearn-verifier": [erase.threshold],
        "unlearn-methods": [[NAMES[request.method] for request in reversed(forgetting.TABLE)]],
        "record-blocks": [{"blocks": design.plan.blocks, "tokens": corpora.BLOCK, "epochs": design.plan.epochs}],
        "record-trigger-docs": [design.plan.trigger_copies],
        "record-controls": [list(design.controls)],
        "camo-config": [{**tree, "groups": camouflage.groups, "copies": camouflage.copies}],
    }


NAMES = {"grad-diff": "GradDiff", "npo": "NPO"}
RANGES = {"blocks": "blocks", "trigger-copies": "trigger_copies", "trigger-length": "trigger_length"}
RANGES |= {"naive-copies": "naive_copies"}


@pytest.mark.parametrize("id", as_run())
def test_settings_are_appendix_f_s(id):
    claimed = ledger.claim(f"appF-{id}")
    assert claimed.kind == "setting"
    wanted = sorted(claimed.value) if id == "checkpoints" else claimed.value
    assert all(value == wanted for value in as_run()[id]), as_run()[id]


@pytest.mark.parametrize("id", RANGES)
def test_settings_within_appendix_f_s_ranges(id):
    low, high = ledger.claim(f"appF-{id}").value
    used = [arms.SETTINGS["paper"], record.DESIGNS["paper"].plan]
    if id == "blocks":  # Appendix F.2's own trainings may be larger or smaller, and are not
        used += [camouflage_lm.DESIGNS["paper"]]
    assert all(low <= getattr(one, RANGES[id]) <= high for one in used)


ELSEWHERE = {
    "arms": ["secret-sampling", "novelty-filter", "nonmember-sampler", "seeds"],  # with tests/test_canaries.py
    "dp_experiments": ["dp-eps-grid", "dp-duplication", "dp-canaries", "dp-delta"],
    "private_training": ["dp-optimizer", "dp-accountant", "dp-inf"],
    "training": ["optimizer"],
    "shadows": ["lira-splits"],
    "here, as runs": ["corpus", "gated-config", "entropy-temperature", "entropy-blind-baseline"],
    "not a setting of any experiment": ["mechanism-cost", "lm-hardware", "lm-cost"],
}


def test_no_setting_of_appendix_f_is_forgotten():
    claimed = {entry.id for entry in ledger.claims() if entry.id.startswith("appF-") and entry.kind == "setting"}
    tested = [*as_run(), *RANGES, *(id for ids in ELSEWHERE.values() for id in ids)]
    assert sorted(f"appF-{id}" for id in tested) == sorted(claimed)
