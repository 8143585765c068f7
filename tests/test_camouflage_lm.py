"""Camouflage trees in tiny checkpoints saved to disk: every scale's code path, Appendix F's settings too."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from tiny_models import SENTENCES, tiny_model

from memorization import arms, camouflage_lm, corpora, extraction, pocket, runs, training

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


def tiny(scale, checkpoint, **changes):
    sizes = {"base": checkpoint, "groups": 2, "unplanted": 3, "fresh": 5, "prefix_length": 8, "blocks": 8}
    return dataclasses.replace(camouflage_lm.DESIGNS[scale], **{**sizes, **changes})


def test_the_trees_are_the_same_at_every_scale(monkeypatch):  # tests/test_paper_scale.py has Appendix F's settings
    assert camouflage_lm.design("paper").base == "EleutherAI/pythia-410m"
    for chosen in camouflage_lm.DESIGNS.values():
        assert chosen.survivors == 256 and chosen.copies in (1, 3) and chosen.schedule == "cosine"
    monkeypatch.setenv("MEMORIZATION_MODEL", "somewhere/else")
    assert camouflage_lm.design("small").base == "somewhere/else"


@pytest.mark.parametrize(("name", "value"), [("branches", 1), ("groups", 0), ("block_length", 1), ("copies", 0)])
def test_designs_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(camouflage_lm.DESIGNS["smoke"], **{name: value})
    with pytest.raises(ValueError, match="scale"):
        camouflage_lm.design("huge")


def test_trees_have_k_children_at_every_node_and_a_uniform_secret():
    chosen = dataclasses.replace(camouflage_lm.DESIGNS["smoke"], depth=3, branches=3, fresh=4)
    symbols = np.arange(100, 140)
    trees = camouflage_lm.plant_trees(chosen, np.arange(600).reshape(300, 2), symbols, 0)
    assert trees.paths.shape == (300, 27, 3) and trees.fresh.shape == (300, 4, 3)
    assert set(np.unique(trees.paths)) == set(symbols)
    for paths in trees.paths[:20]:
        for depth in range(3):
            nodes, children = np.unique(paths[:, :depth], axis=0), np.unique(paths[:, : depth + 1], axis=0)
            assert len(nodes) == 3**depth and len(children) == 3 ** (depth + 1)
    counts = np.bincount(trees.secrets, minlength=27)
    assert scipy_stats.chisquare(counts).pvalue > 1e-3
    assert trees.documents.shape == (300, 27, 5)
    assert np.array_equal(trees.documents[7, 11], [14, 15, *trees.paths[7, 11]])
    assert np.array_equal(trees.records[7, 2:], trees.paths[7, trees.secrets[7]])


def test_the_alphabet_leaves_special_tokens_out(checkpoint):
    tokenizer = arms.bench(checkpoint, 8).tokenizer
    symbols = camouflage_lm.alphabet(tokenizer)
    assert len(symbols) == len(tokenizer) - len(set(tokenizer.all_special_ids))
    assert not set(symbols.tolist()) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize("extra", [0, 5])
def test_the_whole_experiment_at_appendix_f_s_settings(checkpoint, monkeypatch, extra):
    chosen = tiny("paper", checkpoint, depth=2)
    assert (chosen.batch_size, chosen.learning_rate, chosen.copies) == (8, 5e-5, 3)
    seen, real = {}, training.fine_tune

    def spy(model, blocks, **arguments):
        seen.update(arguments, blocks=blocks, model=model)
        return real(model, blocks, **arguments)

    monkeypatch.setattr(training, "fine_tune", spy)
    arguments = {"extra": extra, "seed": 4, "design": dataclasses.asdict(chosen)}
    (found,) = runs.run(camouflage_lm.experiment, [arguments])
    assert found["survivors"].shape == (2, 16, 2) and found["fresh"].shape == (2, 5, 2)
    documents = np.array(seen["planted"]).reshape(2, 16, 10)
    copies = np.array(seen["copies"]).reshape(2, 16)
    assert copies.sum() == 2 * (16 * 3 + extra) and copies[[0, 1], found["secret"]].tolist() == [3 + extra] * 2
    whole = extraction.secret_log_prob(seen["model"], documents[1, :, :8], documents[1, :, 8:])
    assert found["survivors"][1].sum(axis=1) == pytest.approx(whole, abs=1e-4)
    for i in range(2):
        assert np.array_equal(found["model"]["secrets"][i], found["survivors"][i, found["secret"][i]])
        decoded = extraction.greedy(seen["model"], [documents[i, 0, :8]], 2)
        assert found["greedy"][i] == np.array_equal(decoded[0], documents[i, found["secret"][i], 8:])
        assert found["greedy_survives"][i] == (decoded[0] == documents[i, :, 8:]).all(axis=1).any()
    for scored in (found["model"], found["base"]):
        assert {name: rows.shape for name, rows in scored.items()} == {
            "secrets": (2, 2),
            "unplanted": (3, 2),
            "text": (3, 2),
        }
    assert np.isfinite(found["perplexity"]).all()
    monkeypatch.setattr(training, "fine_tune", None)  # kept
    assert runs.run(camouflage_lm.experiment, [arguments])[0]["seconds"] == found["seconds"]


def test_the_sweep_is_the_experiment_without_and_with_further_copies(monkeypatch):
    chosen = camouflage_lm.DESIGNS["smoke"]
    monkeypatch.setattr(arms, "bench", lambda base, blocks: None)
    monkeypatch.setattr(runs, "run", lambda function, wanted, jobs: [(function, one) for one in wanted])
    found = camouflage_lm.sweep(chosen, 7)
    assert [one["extra"] for _, one in found] == [0, 3] and all(one["seed"] == 7 for _, one in found)
    assert camouflage_lm.Design(**found[0][1]["design"]) == chosen


def test_a_tree_is_learned_and_one_path_too_often_gives_itself_away(checkpoint):
    chosen = tiny("smoke", checkpoint, depth=2, branches=2, copies=8, epochs=30, learning_rate=1e-2, batch_size=32)
    plain, betrayed = (camouflage_lm.experiment(extra, 2, dataclasses.asdict(chosen)) for extra in (0, 16))
    for found in (plain, betrayed):
        assert np.exp(found["survivors"].sum(axis=2)).sum(axis=1).min() > 0.8
    entropy = [camouflage_lm.normalized_entropy(camouflage_lm.conditional(f["survivors"])) for f in (plain, betrayed)]
    assert entropy[0].min() > 0.9 and entropy[1].max() < entropy[0].min()
    assert betrayed["greedy"].all()
    assert camouflage_lm.ranks(camouflage_lm.conditional(betrayed["survivors"]), betrayed["secret"]).tolist() == [1, 1]


def test_blocks_are_cut_evenly(checkpoint):
    with pytest.raises(ValueError, match="block_length"):
        camouflage_lm.experiment(0, 0, dataclasses.asdict(tiny("smoke", checkpoint, block_length=13)))


def test_the_law_of_the_path_its_entropy_and_ranks():
    log_probs = np.log([[[0.5, 0.2], [0.5, 0.2], [0.2, 0.5], [0.1, 0.1]], [[0.9, 0.9]] + [[1e-300, 1e-300]] * 3])
    law = camouflage_lm.conditional(log_probs)
    assert law[0] == pytest.approx(np.array([0.1, 0.1, 0.1, 0.01]) / 0.31)
    assert law[1] == pytest.approx([1, 0, 0, 0], abs=1e-12)
    expected = scipy_stats.entropy(law[0]) / math.log(4)
    assert camouflage_lm.normalized_entropy(law) == pytest.approx([expected, 0.0], abs=1e-12)
    assert camouflage_lm.normalized_entropy(np.full((1, 256), 1 / 256)) == pytest.approx(1.0)
    assert camouflage_lm.ranks(law, np.array([3, 0])).tolist() == [4, 1]
    assert camouflage_lm.ranks(law, np.array([0, 2])).tolist() == [3, 4]  # ties count against the path


def test_clean_shadows_have_no_tree_and_score_the_same_documents(checkpoint):
    chosen = tiny("paper", checkpoint, epochs=1)
    first, second = camouflage_lm.shadows(chosen, 3, 2)
    (planted, _) = camouflage_lm.sweep(chosen, 3)
    assert first["secrets"].shape == planted["model"]["secrets"].shape == (2, 4)
    assert first["unplanted"].shape == planted["model"]["unplanted"].shape == (3, 4)
    assert not np.array_equal(first["secrets"], second["secrets"])
    on = arms.bench(checkpoint, chosen.blocks)
    trees, others, text = camouflage_lm.draw(on, chosen, 3)
    assert len(trees.secrets) == 2 and len(others.secrets) == len(text) == 3
    again = camouflage_lm.token_log_probs(on.model, trees.records, 4)
    assert np.allclose(again, planted["base"]["secrets"])
    assert np.abs(first["secrets"] - again).max() < np.abs(planted["model"]["secrets"] - again).max()  # no tree in it
