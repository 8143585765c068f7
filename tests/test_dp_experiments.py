"""The experiments on privately trained models: the paper's settings run end to end, and every measure by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
transformers = pytest.importorskip("transformers")

from tiny_models import tiny_tokenizer  # noqa: E402

from memorization import corpora, dp_experiments, ledger, models, runs  # noqa: E402
from memorization.canaries import TokenIndex  # noqa: E402

WORDS = "a secret may tell the lazy dog how quick zebras jump over vexing boxes of old sphinx liquor at noon".split()
TINY = {"blocks": 12, "epochs": 1, "batch_size": 8}


def config(family: str):
    sizes = {
        "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 64, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 0,
    }  # fmt: skip
    if family == "neox":
        return transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig(**sizes)
    return transformers.Qwen2ForCausalLM, transformers.Qwen2Config(num_key_value_heads=1, **sizes)


@pytest.fixture(scope="module", params=["neox", "qwen2"])
def folder(request, tmp_path_factory):
    """A random checkpoint on disk, as transformers saves one."""
    torch.manual_seed(0)
    kind, sizes = config(request.param)
    where = tmp_path_factory.mktemp(request.param)
    kind(sizes).save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return str(where)


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    corpus = corpora.Corpus("words", tuple(" ".join(rng.choice(WORDS, 400)) for _ in range(30)))
    monkeypatch.setattr(corpora, "load_corpus", lambda name=None: corpus)
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path))
    monkeypatch.setenv("MEMORIZATION_DEVICE", "cpu")


def tiny_calibration(folder, **changes):
    setting = {**dp_experiments.CALIBRATION["paper"], **TINY, "model": folder, "per_cell": 4, "copies": [1, 3]}
    return {**setting, "epsilons": [1.0, math.inf], **changes}


def test_calibration_runs_at_the_papers_settings(folder):
    configurations = dp_experiments.calibration_configurations(tiny_calibration(folder), 5)
    found = runs.run(dp_experiments.calibration, configurations)
    assert [(c["epsilon"], c["side"]) for c in configurations] == [(1.0, 0), (1.0, 1), (math.inf, 0), (math.inf, 1)]
    for first, second in (found[:2], found[2:]):
        assert np.array_equal(first["planted"], ~second["planted"]) and len(first["planted"]) == 8
        assert np.array_equal(first["base"], second["base"]) and np.array_equal(first["copies"], second["copies"])
        assert sorted(first["copies"].tolist()) == [1] * 4 + [3] * 4
        assert first["accounting"] == second["accounting"]  # neither knows how many its coins planted
        memorized = dp_experiments.memorization(first, second)
        assert memorized.shape == (8,) and np.abs(memorized).max() <= 1
        assert first["teacher_forcing"].tolist() != second["teacher_forcing"].tolist()
    private, open_ = found[0]["accounting"], found[2]["accounting"]
    assert private["epsilon_rdp"] <= 1.0 and private["delta"] == pytest.approx(1 / (10 * (12 + 8)))
    assert open_["noise_multiplier"] == 0 and math.isinf(open_["epsilon_rdp"])
    again = runs.run(dp_experiments.calibration, configurations[:1], cache=False)[0]
    assert np.array_equal(again["teacher_forcing"], found[0]["teacher_forcing"])


def test_the_sweep_runs_at_the_papers_settings(folder):
    setting = {**dp_experiments.SWEEP["paper"], **TINY, "model": folder, "per_temperature": 5, "budget": 40}
    searches, arms = dp_experiments.sweep_configurations({**setting, "temperatures": [0.2, 1.1]}, 5)
    certified = runs.run(dp_experiments.certified_sweep, searches)
    private, leaky = runs.run(dp_experiments.sweep_arm, arms)
    for one in certified:
        assert (one["lower"] <= one["upper"]).all() and (one["expanded"] <= 40).all()
        # No string is likelier than the certificate allows, the canary itself included.
        assert (one["own_surprisal"] >= -np.log2(one["upper"]) - 1e-6).all()
        # 400 words repeat themselves, so the filter has something to reject, and the canaries passed it.
        assert one["draws"] == dp_experiments.NOVELTY_DRAWS and (one["novel"] <= one["draws"]).all()
        assert (one["novel"] > 0).any()
    assert np.array_equal(private["planted"], leaky["planted"]) and private["planted"].shape == (10,)
    for one in (private, leaky):  # the two scores differ by the base model's, the same for both arms
        assert one["loss"].max() <= 0 and one["reference"].shape == (10,)
    assert private["loss"] - private["reference"] == pytest.approx(leaky["loss"] - leaky["reference"])
    assert private["accounting"]["epsilon_rdp"] <= 4.0 and math.isinf(leaky["accounting"]["epsilon_rdp"])
    assert leaky["accounting"]["sample_rate"] < private["accounting"]["sample_rate"]  # eight copies each, one each


def test_measures_by_hand(folder):
    base, tokenizer = models.load(folder)
    data = corpora.tokenize_blocks(corpora.load_corpus(), tokenizer)
    (canaries,) = dp_experiments.sweep_canaries(base, data, [0.5], 6, (5, 2), 1)
    forced, greedy = dp_experiments.teacher_forcing(base, canaries), dp_experiments.extracted(base, canaries)
    certificate = dp_experiments.certify(base, canaries, 97 + 1)
    index, stream = TokenIndex(data.fine_tuning), data.fine_tuning.reshape(-1)
    fresh = dp_experiments._novel(base, canaries, index, [1, 2]) / dp_experiments.NOVELTY_DRAWS
    novel = np.ones((97, 97), dtype=bool)
    novel[stream[:-1], stream[1:]] = False
    for i, record in enumerate(canaries.records.tolist()):
        with torch.no_grad():
            logits = base(torch.tensor([record])).logits[0].double()
        assert forced[i] == pytest.approx(
            np.mean([float(logits[t - 1].softmax(-1)[record[t]]) for t in (5, 6)]), rel=1e-5
        )
        prefix = record[:5]
        with torch.no_grad():
            first = base(torch.tensor([prefix])).logits[0, -1].double()
            second = base(torch.tensor([[*prefix, token] for token in range(97)])).logits[:, -1].double()
        joint = (first / 0.5).softmax(-1)[:, None] * (second / 0.5).softmax(-1)  # all 97² secrets
        assert certificate["closed"][i]
        assert certificate["lower"][i] <= float(joint.max()) * (1 + 1e-5)
        assert certificate["upper"][i] >= float(joint.max()) * (1 - 1e-5)
        assert fresh[i] == pytest.approx(float(joint[torch.from_numpy(novel)].sum()), abs=0.25)  # four standard errors
        follow = [int(first.argmax()), int(second[int(first.argmax())].argmax())]
        assert greedy[i] == (follow == record[5:])


def test_memorization_is_in_minus_out():
    planted = np.array([True, False, True])
    first = {"planted": planted, "teacher_forcing": np.array([0.9, 0.2, 0.5])}
    second = {"planted": ~planted, "teacher_forcing": np.array([0.4, 0.8, 0.5])}
    assert dp_experiments.memorization(first, second) == pytest.approx([0.5, 0.6, 0.0])
    assert dp_experiments.memorization(second, first) == pytest.approx([0.5, 0.6, 0.0])
    with pytest.raises(ValueError, match="two sides"):
        dp_experiments.memorization(first, first)


def test_settings_are_appendix_f():
    paper = dp_experiments.CALIBRATION["paper"]
    values = {name: ledger.claim(f"appF-dp-{name}").value for name in ("epochs", "batch", "duplication", "canaries")}
    assert values == {
        "epochs": paper["epochs"], "batch": paper["physical_batch"], "duplication": paper["copies"],
        "canaries": paper["per_cell"],
    }  # fmt: skip
    assert [float(e) for e in ledger.claim("appF-dp-eps-grid").value] == paper["epsilons"]
    assert 1 / (10 * paper["blocks"]) == ledger.claim("s8.2-dp-delta-max").value
    assert set(dp_experiments.CALIBRATION) == set(dp_experiments.SWEEP) == {"smoke", "pocket", "small", "paper"}


def test_bad_settings_are_named(folder, monkeypatch):
    good = dp_experiments.calibration_configurations(tiny_calibration(folder), 5)[0]
    for name, value in (("side", 2), ("blocks", 0), ("blocks", 10**6), ("per_cell", 1), ("epsilon", -1.0)):
        with pytest.raises(ValueError, match=name):
            dp_experiments.calibration(**{**good, name: value})
    monkeypatch.delenv("MEMORIZATION_MODEL", raising=False)
    with pytest.raises(ValueError, match="MEMORIZATION_MODEL"):
        dp_experiments.calibration(**{**good, "model": ""})
