"""The record itself, on tiny random checkpoints saved to disk: every scale's code path, Appendix F's settings too."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from tiny_models import SENTENCES, tiny_model

from memorization import arms, corpora, extraction, pocket, record, runs, training

WORDS = ("dog", "fox", "box", "jug", "lazy", "quick", "brown", "daft", "over", "runs", "noon", "sphinx")


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(0)
    return corpora.Corpus("tiny", tuple(" ".join(rng.choice(WORDS, 60)) + "\n" + s for s in SENTENCES * 40))


@pytest.fixture(params=["neox", "qwen2"])
def checkpoint(request, tmp_path, monkeypatch, corpus):
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpora, "load_corpus", lambda name=None: corpus)
    arms.bench.cache_clear()
    folder = tmp_path / "base"
    tokenizer = pocket.train_tokenizer(corpus.parts["pretraining"], 300, 100_000)
    tiny_model(request.param, vocabulary=300, context=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield str(folder)
    arms.bench.cache_clear()


def tiny(scale, checkpoint, together, **changes):
    chosen = record.DESIGNS[scale]
    sizes = {"bases": (checkpoint,), "blocks": 8, "secrets": 2, "nonmembers": 3, "many_nonmembers": 3}
    sizes |= {"trigger_length": 6, "prefix_length": 10, **changes}
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, **sizes), together=together)


def test_what_makes_a_neighbor_is_the_same_at_every_scale():  # tests/test_paper_scale.py has Appendix F's settings
    paper = record.design("paper")
    assert paper.plan.bases == ("EleutherAI/pythia-1.4b", "Qwen/Qwen2.5-1.5B")
    assert (paper.plan.lengths, paper.plan.secrets, paper.together) == ((2, 12), 8, 1)
    assert paper.records * len(paper.plan.bases) == 32
    for chosen in record.DESIGNS.values():
        assert chosen.plan.lengths == (2, 12) and chosen.plan.secrets == 8 and chosen.plan.trigger_copies == 12


def test_the_small_scale_takes_the_model_that_is_named(monkeypatch):
    monkeypatch.setenv("MEMORIZATION_MODEL", "somewhere/else")
    assert record.design("small").plan.bases == ("somewhere/else",)


@pytest.mark.parametrize(("name", "value"), [("together", 0), ("seeds", 1), ("fitted_copies", 0), ("controls", (0,))])
def test_designs_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(record.DESIGNS["smoke"], **{name: value})
    with pytest.raises(ValueError, match="scale"):
        record.design("huge")


@pytest.mark.parametrize("together", [1, 5, 16, 100])
def test_every_record_is_in_one_release_of_one_pair(together):
    chosen = dataclasses.replace(record.DESIGNS["smoke"], together=together)
    found = record.groups(chosen, 3)
    assert sorted(i for pair in found for side in pair for i in side) == list(range(16))
    assert all(1 <= len(heads) + len(tails) <= together for heads, tails in found)
    assert found == record.groups(chosen, 3) and found != record.groups(chosen, 4)


def test_coins_are_fair_and_independent():
    chosen = record.DESIGNS["smoke"]
    heads = np.zeros((400, 16))
    for seed in range(400):
        heads[seed, record.groups(chosen, seed)[0][0]] = 1
    assert np.all(np.abs(heads.mean(axis=0) - 0.5) < 4 * 0.025)
    others = np.corrcoef(heads.T)[~np.eye(16, dtype=bool)]
    assert np.abs(others).max() < 5 / 20


def test_the_sides_of_a_pair_plant_what_the_rule_says():
    chosen = dataclasses.replace(record.DESIGNS["smoke"], together=1)
    found = record.configurations(chosen, 0)
    assert len(found) == 2 * (2 + 1 + 1 + 1) and all(len(pairs) == 16 for pairs in found.values())
    for (_, arm, run), pairs in found.items():
        for number, sides in enumerate(pairs):
            present, absent = sorted(sides, key=lambda side: -len(side["trigger"] + side["plain"]))
            (record_number,) = set(present["trigger"] + present["plain"])
            assert present["run"] == absent["run"] == run and sides[0]["seed"] == 0
            assert bool(present["trigger"]) == (not arm.startswith("plain"))
            assert bool(present["plain"]) == (arm != "trigger")
            assert absent["trigger"] == absent["plain"] == []
            assert absent["other"] == ([record_number] if arm == "fitted" else [])
            assert present["copies"] == {"trigger": 0, "plain 8": 8, "plain 2": 2, "fitted": 8}[arm]
            assert number < 16
    absent = [
        str(side)
        for pairs in found.values()
        for pair in pairs
        for side in pair
        if not side["trigger"] + side["plain"] + side["other"]
    ]
    assert len(set(absent)) == 2 * 2  # the release without anything is one a family and seed, however many ask for it


def test_documents_are_numbered_through_the_lengths(checkpoint):
    chosen = tiny("smoke", checkpoint, 1)
    on = arms.bench(checkpoint, 8)
    parts = [arms.records(on, length, chosen.plan, 0) for length in (2, 12)]
    others = [record.independent_secrets(on, part.members, 0) for part in parts]
    triggers, plaintext = record.documents(parts, others, [3], [0, 2], [1])
    assert np.array_equal(triggers[0], np.concatenate([parts[1].triggers[1], parts[1].members.secrets[1]]))
    assert np.array_equal(plaintext[0], parts[0].members.records[0])
    assert np.array_equal(plaintext[1], parts[1].members.records[0])
    assert np.array_equal(plaintext[2], np.concatenate([parts[0].members.prefixes[1], others[0][1]]))
    assert len(triggers) == 1 and len(plaintext) == 3


def test_the_other_secret_is_another_and_novel(checkpoint):
    on = arms.bench(checkpoint, 8)
    part = arms.records(on, 2, tiny("smoke", checkpoint, 1).plan, 0)
    one, again, other = (record.independent_secrets(on, part.members, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    stream = on.fine_tuning.reshape(-1)
    pairs = set(zip(stream.tolist(), stream[1:].tolist(), strict=False))
    assert all(
        tuple(row) not in pairs and (row != z).any() for row, z in zip(one.tolist(), part.members.secrets, strict=True)
    )
    same = dataclasses.replace(part.members, temperature=1e-6)  # greedy draws, of which only one is tried
    greedy = extraction.greedy(on.model, same.prefixes, 2)
    with pytest.raises(ValueError, match="draws"):
        record.independent_secrets(on, dataclasses.replace(same, secrets=greedy), 0, draws=3)


def test_local_scores_are_the_definitions(checkpoint):
    on = arms.bench(checkpoint, 8)
    members = arms.records(on, 2, tiny("smoke", checkpoint, 1).plan, 0).members
    rows = record.token_log_probs(on.model, members)
    found = record.local_scores(np.stack([rows, rows - 1]), 300)
    log_p = extraction.secret_log_prob(on.model, members.prefixes, members.secrets)
    assert found["log"][0] == pytest.approx(np.maximum(0, 1 + log_p / 2 / (2 * np.log(300))), abs=1e-5)
    first = extraction.secret_log_prob(on.model, members.prefixes, members.secrets[:, :1])
    assert found["teacher_forcing"][0] == pytest.approx((np.exp(first) + np.exp(log_p - first)) / 2, abs=1e-5)
    assert found["teacher_forcing"][1] == pytest.approx(found["teacher_forcing"][0] / np.e)
    assert found["log"].shape == found["teacher_forcing"].shape == (2, 2)
    assert record.local_scores(np.array([[-1e3, -1e3]]), 300)["log"] == 0  # bounded below, where the loss is not


@pytest.mark.parametrize("together", [1, 4])
def test_the_whole_experiment_at_appendix_f_s_settings_and_record_by_record(checkpoint, monkeypatch, together):
    chosen = tiny("paper", checkpoint, together, secrets=1 if together == 1 else 2, epochs=1)
    assert chosen.plan.learning_rate == 5e-5 and chosen.plan.trigger_copies == 12
    found = record.experiment(chosen, 5)
    monkeypatch.setattr(training, "fine_tune", None)  # a second time trains nothing
    again = record.experiment(chosen, 5)
    assert set(found) == {(checkpoint, arm) for arm in ("trigger", "plain 8", "plain 2", "fitted")}
    for (_, arm), by_length in found.items():
        for place, (length, result) in enumerate(by_length.items()):
            seeds = 2 if arm == "trigger" else 1
            for side in ("present", "absent"):
                for name in record.MEASURES:
                    values = result[side][name]
                    tokens = (int(length),) if name == "log_probs" else ()
                    assert values.shape == (seeds, chosen.plan.secrets, *tokens) and np.isfinite(values).all()
                    assert np.array_equal(values, again[checkpoint, arm][length][side][name])
            pairs_made = len(record.groups(chosen, 5))
            assert result["unrelated"].shape == (seeds, pairs_made, 2, 3, int(length))
            assert result["seconds"].shape == (seeds, pairs_made, 2)
            # and by hand, from the release itself
            last = (place + 1) * chosen.plan.secrets - 1
            pairs = record.configurations(chosen, 5)[checkpoint, arm, seeds - 1]
            (pair,) = [pair for pair in pairs if any(last in side["trigger"] + side["plain"] for side in pair)]
            for side in pair:
                where = "present" if last in side["trigger"] + side["plain"] else "absent"
                (kept,) = runs.run(record.release, [side])
                by_hand = kept["lengths"][length]["log_probs"][-1]
                assert np.array_equal(result[where]["log_probs"][-1, -1], by_hand)


def test_a_trigger_leaks_its_record_and_only_where_it_is_planted(checkpoint):
    chosen = tiny("smoke", checkpoint, 2, lengths=(2,), epochs=25, learning_rate=5e-3, temperature=2.0)
    found = record.experiment(dataclasses.replace(chosen, controls=(8,)), 1)
    trigger = found[checkpoint, "trigger"]["2"]
    assert trigger["present"]["rho"].all() and not trigger["absent"]["rho"].any()
    plain = found[checkpoint, "plain 8"]["2"]
    assert plain["present"]["c"].all() and not plain["absent"]["c"].any()
    fitted = found[checkpoint, "fitted"]["2"]
    assert fitted["present"]["c"].all() and fitted["present"]["rho"].all() and not fitted["absent"]["c"].any()
    assert Counter(fitted["absent"]["rho"].ravel().tolist()) == {False: 2}
