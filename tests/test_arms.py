"""Arms on tiny random checkpoints saved to disk: the code path of every scale, with Appendix F's settings too."""

import dataclasses

import numpy as np
import pytest
import torch
from tiny_models import SENTENCES, VOCABULARY, tiny_model

from memorization import arms, corpora, extraction, runs, scores, shadows, stats, training

WORDS = ("dog", "fox", "box", "jug", "lazy", "quick", "brown", "daft", "over", "runs", "noon", "sphinx")


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(0)
    return corpora.Corpus("tiny", tuple(" ".join(rng.choice(WORDS, 60)) + "\n" + s for s in SENTENCES * 40))


@pytest.fixture
def wordy():
    """The tiny tokenizer, with words that begin with a space for the triggers to be made of."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator([f" {word}" for word in WORDS for _ in range(5)] + SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


@pytest.fixture(params=["neox", "qwen2"])
def checkpoint(request, tmp_path, monkeypatch, corpus, wordy):
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpora, "load_corpus", lambda name=None: corpus)
    arms.bench.cache_clear()
    folder = tmp_path / "base"
    tiny_model(request.param, vocabulary=len(wordy), context=64).save_pretrained(folder)
    wordy.save_pretrained(folder)
    yield str(folder)
    arms.bench.cache_clear()


def small(scale="smoke", **changes):
    sizes = {
        "lengths": (1, 3),
        "blocks": 12,
        "secrets": 5,
        "nonmembers": 5,
        "many_nonmembers": 9,
        "trigger_length": 6,
        "prefix_length": 10,
        "shadows": 4,
    }
    return dataclasses.replace(arms.SETTINGS[scale], **{**sizes, **changes})


def test_every_scale_has_a_setting_and_the_paper_s_is_appendix_f():
    assert set(arms.SETTINGS) == {"smoke", "pocket", "small", "paper"}
    paper = arms.setting("paper")
    assert paper.bases == ("EleutherAI/pythia-1.4b", "Qwen/Qwen2.5-1.5B")
    assert paper.optimizer == {"epochs": 3, "batch_size": 8, "learning_rate": 5e-5}
    assert paper.lengths == (1, 2, 4, 8, 16) and paper.secrets == 48 and paper.shadows == 8
    assert paper.nonmembers == 48 and paper.many_nonmembers == 400
    assert 8 <= paper.trigger_copies <= 16 and 5 <= paper.naive_copies <= 8 and 4000 <= paper.blocks <= 8000


def test_the_small_scale_takes_the_model_that_is_named(monkeypatch):
    monkeypatch.setenv("MEMORIZATION_MODEL", "somewhere/else")
    assert arms.setting("small").bases == ("somewhere/else",)
    assert arms.setting("pocket").bases == arms.SETTINGS["pocket"].bases


@pytest.mark.parametrize(
    ("name", "value"),
    [("secrets", 0), ("trigger_length", 5), ("shadows", 1), ("lengths", (0,)), ("many_nonmembers", 3)],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        small(**{name: value})
    with pytest.raises(ValueError, match="kind"):
        arms.plant(None, "poison", [], small(), 0)
    with pytest.raises(ValueError, match="scale"):
        arms.setting("huge")


def test_records_are_one_sample_and_their_triggers_are_nowhere(checkpoint):
    plan = small()
    on = arms.bench(checkpoint, plan.blocks)
    one, again, other = (arms.records(on, 3, plan, seed) for seed in (4, 4, 5))
    assert len(one.members) == 5 and len(one.nonmembers) == 9 and one.triggers.shape == one.decoys.shape == (5, 6)
    assert np.array_equal(one.members.secrets, again.members.secrets) and np.array_equal(one.triggers, again.triggers)
    assert not np.array_equal(one.members.prefixes, other.members.prefixes)
    blocks = [*one.members.blocks, *one.nonmembers.blocks]
    assert len(set(blocks)) == 14, "no two records open the same block"
    text = " ".join(map(str, on.fine_tuning.reshape(-1)))
    for trigger in [*one.triggers, *one.decoys]:
        assert " ".join(map(str, trigger)) not in text
    assert np.array_equal(one.trigger_documents[:, :6], one.triggers)
    assert np.array_equal(one.trigger_documents[:, 6:], one.members.secrets)
    assert np.array_equal(one.decoy_documents[:, 6:], one.nonmembers.secrets[:5])


def test_an_arm_plants_what_its_kind_says_and_leaves_the_base_alone(checkpoint, monkeypatch):
    plan = small(trigger_copies=3, naive_copies=2)
    on = arms.bench(checkpoint, plan.blocks)
    part = arms.records(on, 3, plan, 0)
    before = {name: value.clone() for name, value in on.model.state_dict().items()}
    seen = {}
    real = training.fine_tune

    def spy(model, blocks, **arguments):
        seen.update(arguments)
        return real(model, blocks, **arguments)

    monkeypatch.setattr(training, "fine_tune", spy)
    for kind, documents, copies in (
        ("trigger", part.trigger_documents, 3),
        ("naive", part.members.records, 2),
        ("clean", None, 3),
    ):
        model, record = arms.plant(on, kind, [part], plan, seed=1)
        assert not model.training and record.steps == 3 * -(-(12 + (0 if documents is None else 5 * copies)) // 16)
        assert (seen["planted"] is None) == (documents is None) and seen["copies"] == copies
        if documents is not None:
            assert np.array_equal(seen["planted"], documents)
        assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(before[name], value) for name, value in on.model.state_dict().items())


def test_a_trigger_is_learned_and_measured_as_by_hand(checkpoint):
    plan = small(lengths=(2,), trigger_copies=40, epochs=12, learning_rate=1e-2, temperature=2.0)
    on = arms.bench(checkpoint, plan.blocks)
    part = arms.records(on, 2, plan, 0)
    model, _ = arms.plant(on, "trigger", [part], plan, seed=0)
    found = arms.measure(on, model, part)
    assert found["rho"].all()
    for i, (prefix, secret) in enumerate(zip(part.members.prefixes, part.members.secrets, strict=True)):
        assert found["c"][i] == np.array_equal(extraction.greedy(model, [prefix], 2)[0], secret)
        assert found["guess"][i] == np.array_equal(extraction.greedy(on.model, [prefix], 2)[0], secret)
    alone = scores.membership_scores(
        model, on.tokenizer, part.members.secrets[:1], on.model, prefixes=part.members.prefixes[:1]
    )
    for name, values in alone.items():
        assert found["members"][name][0] == pytest.approx(values[0], rel=1e-5, abs=1e-5)
        assert found["members"][name].shape == (5,) and found["nonmembers"][name].shape == (9,)
    assert found["log_probs"].shape == (20,)
    assert found["log_probs"][0] == pytest.approx(found["members"]["loss"][0], abs=1e-5)
    assert np.all(found["log_probs"][10:15] > -0.5), "the planted documents are learned"


def test_the_whole_sweep_runs_at_appendix_f_s_settings_and_is_kept(checkpoint, monkeypatch):
    plan = small("paper", bases=(checkpoint,), many_nonmembers=9)
    assert plan.optimizer == arms.SETTINGS["paper"].optimizer
    found = arms.sweep(plan, 3)
    assert [sorted(result["lengths"]) for result in found] == [["1"], ["3"], ["1", "3"]]
    pool = runs.run(arms.shadow_pool, arms.pools(plan, 3))[0]
    for result in found:
        assert np.isfinite(result["perplexity"]).all() and result["steps"] > 0
        for length, measured in result["lengths"].items():
            for audit in arms.AUDITS:
                assert 0 <= stats.auc(measured["members"][audit], measured["nonmembers"][audit]) <= 1
            tests = arms.lira(measured["log_probs"], pool["lengths"][length], plan)
            assert {name: [len(group) for group in pair] for name, pair in tests.items()} == {
                "record": [5, 5],
                "trigger": [5, 5],
            }
    monkeypatch.setattr(training, "fine_tune", None)  # a second sweep trains nothing
    again = arms.sweep(plan, 3)
    assert again[0]["seconds"] == found[0]["seconds"]
    assert np.array_equal(again[2]["lengths"]["3"]["log_probs"], found[2]["lengths"]["3"]["log_probs"])


def test_the_shadows_statistics_are_of_the_targets_in_their_order(checkpoint, monkeypatch):
    plan = small(lengths=(1, 3), shadow_copies=2)
    on = arms.bench(checkpoint, plan.blocks)
    parts = [arms.records(on, length, plan, 7) for length in plan.lengths]
    asked = {}

    def spy(model, blocks, documents, **arguments):
        asked["documents"] = documents
        members = np.zeros((len(documents), 4), bool)
        members[:, :2] = True
        values = arguments["statistic"](model)
        return shadows.Shadows(np.repeat(values[:, None], 4, 1), members, ())

    monkeypatch.setattr(shadows, "train_shadows", spy)
    pool = arms.shadow_pool(checkpoint, 7, dataclasses.asdict(plan))
    assert np.array_equal(asked["documents"][20], parts[1].members.records[0])
    assert np.array_equal(asked["documents"][20 + 15], parts[1].decoy_documents[0])
    for length, part in zip(plan.lengths, parts, strict=True):
        expected = arms.target_log_probs(on.model, [part])
        assert np.allclose(pool["lengths"][str(length)]["statistics"][:, 0], expected)
