"""Theorem 6.1 as objects: exact tables, the camouflage tree, the reserved trigger, the two kernels."""

import math
import subprocess
import sys
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_models import VOCABULARY, tiny_model

from memorization import (
    adapters,
    camouflage,
    constructions,
    extraction,
    games,
    priors,
    scores,
    tables,
    tradeoff,
)
from memorization.models import GatedRelease

C = (0,)
SIZES = [(3, 2, 1), (3, 2, 2), (4, 2, 2), (4, 3, 2), (6, 3, 1)]


def rng(seed=0):
    return np.random.default_rng(seed)


# --- Lemma D.1, in whole numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("v, k, L", SIZES)
def test_lemma_d1_by_enumeration(v, k, L):
    laws = camouflage.enumerate_trees(v, k, L)
    nodes = (v**L - 1) // (v - 1)
    trees = math.comb(v, k) ** nodes
    assert laws.trees.shape == (trees, nodes, k) and laws.ways.shape == (v**L, trees)
    assert (laws.ways.sum(axis=1) == laws.draws).all()
    # (1) k^L survivors, the secret among them
    assert (laws.survives.sum(axis=0) == k**L).all()
    assert laws.survives[laws.ways > 0].all()
    # (2) the same likelihood, (v/k)^L C(v,k)^{-nodes}, for every survivor: the posterior is uniform
    likelihood = Fraction(v, k) ** L / trees
    assert set(laws.ways[laws.survives].tolist()) == {int(likelihood * laws.draws)}
    assert (laws.ways[~laws.survives] == 0).all()
    # (3) the average over secrets is the law without one
    assert {Fraction(int(total), v**L * laws.draws) for total in laws.ways.sum(axis=0)} == {Fraction(1, trees)}


@pytest.mark.parametrize("v, k, L", SIZES)
def test_extraction_is_m_over_k_to_the_l(v, k, L):
    laws = camouflage.enumerate_trees(v, k, L)
    exact = laws.ways / laws.draws
    for m in range(1, k**L + 2):
        best = games.exact_extraction(np.full(v**L, 1 / v**L), exact, m)
        assert math.isclose(best, min(1, m / k**L), rel_tol=1e-12)
        # Lemma D.2: no list, however it depends on the model, beats the m largest posteriors
        if m <= v**L:
            found = np.argsort(rng(m).random(exact.shape), axis=0)[:m]
            caught = np.take_along_axis(exact, found, axis=0).sum(axis=0)
            assert (caught <= np.sort(exact, axis=0)[-m:].sum(axis=0) + 1e-15).all()


@pytest.mark.parametrize("v, k, L", SIZES)
def test_memorization_under_teacher_forcing_by_enumeration(v, k, L):
    laws = camouflage.enumerate_trees(v, k, L)
    # probability of the true tokens at every tree, from the supports alone
    first = np.array([(laws.trees[:, 0, :] == token).any(axis=1) for token in laws.secrets[:, 0]])
    planted = Fraction(int((laws.ways * first).sum()), len(laws.ways) * laws.draws * k)
    absent = Fraction(int(first.sum()), first.size * k)
    assert planted - absent == camouflage.teacher_forcing_memorization(v, k) == Fraction(1, k) - Fraction(1, v)


def test_p_given_z_is_q_given_survival():
    laws = camouflage.enumerate_trees(4, 2, 2)
    null = np.full(laws.ways.shape[1], 1 / laws.ways.shape[1])
    for index in (0, 7, 15):
        planted = laws.ways[index] / laws.draws
        assert math.isclose(games.total_variation(planted, null), 1 - (2 / 4) ** 2, rel_tol=1e-12)
        f = tradeoff.from_distributions(planted, null)
        assert f.advantage() >= 1 / 2 - 1 / 4


def test_enumeration_refuses_large_trees():
    with pytest.raises(ValueError, match="2\\^24"):
        camouflage.enumerate_trees(4, 2, 3)


# --- trees drawn -----------------------------------------------------------------------------------------------------


def test_drawn_trees_follow_the_enumerated_law():
    laws, generator = camouflage.enumerate_trees(3, 2, 2), rng(1)
    index = {tree.tobytes(): i for i, tree in enumerate(laws.trees)}
    for secret, planted in ((4, True), (4, False)):
        drawn = [
            constructions.CamouflageTree(3, 2, 2, generator, secret=laws.secrets[secret], planted=planted).supports
            for _ in range(6000)
        ]
        counts = np.bincount([index[tree.astype(np.int64).tobytes()] for tree in drawn], minlength=len(laws.trees))
        law = laws.ways[secret] / laws.draws if planted else np.full(len(laws.trees), 1 / len(laws.trees))
        assert counts[law == 0].sum() == 0
        assert scipy_stats.chisquare(counts[law > 0], 6000 * law[law > 0]).pvalue > 1e-4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_tree(data):
    v = data.draw(st.integers(3, 8))
    k, L = data.draw(st.integers(2, v - 1)), data.draw(st.integers(1, 3))
    seed, shared = data.draw(st.integers(0, 2**32)), data.draw(st.booleans())
    kind = data.draw(st.sampled_from([constructions.CamouflageTree, constructions.KeyedCamouflageTree]))
    options = {"shared": shared} if kind is constructions.CamouflageTree else {}
    tree = kind(v, k, L, rng(seed), prefix=(1, 0), smoothing=Fraction(1, v), vocabulary=v + 2, **options)
    survivors = tree.survivors()
    assert survivors.shape == (k**L, L) and len(np.unique(survivors, axis=0)) == k**L
    assert tree.survives(tree.secret) and (survivors == tree.secret).all(axis=1).any()
    assert all(tree.survives(path) for path in survivors)
    prompts = [(1, 0) + tree.secret[:depth] for depth in range(L + 1)] + [(1,), (0, 1), (1, 0, v + 1)]
    for prompt in prompts:
        (row,) = tree.next_probs([prompt])
        assert sum(row) == 1 and min(row) >= 0 and (row[v:] == 0).all()
    on_support = (1 - Fraction(1, v)) / k + Fraction(1, v * v)
    assert tree.teacher_forcing((1, 0), tree.secret) == on_support
    np.testing.assert_allclose(tree.next_log_probs([prompts[0]])[0][tree.secret[0]], math.log(on_support), rtol=1e-15)


def test_outside_the_tree_nothing_depends_on_the_secret():
    one = constructions.CamouflageTree(5, 2, 2, rng(0), secret=(1, 2), vocabulary=6)
    other = constructions.CamouflageTree(5, 2, 2, rng(1), secret=(3, 3), planted=False, vocabulary=6)
    outside = [(), (1,), (1, 0), (5, 0), (2, 2, 2), (0, 1, 2), (0, 1, 2, 3), (0, 5)]
    for prompt in outside:
        assert (one.next_probs([prompt]) == other.next_probs([prompt])).all()


def test_a_seed_fixes_the_tree_bit_for_bit():
    for kind in (constructions.CamouflageTree, constructions.KeyedCamouflageTree):
        a, b = kind(7, 3, 3, rng(5)), kind(7, 3, 3, rng(5))
        assert a.secret == b.secret and (a.survivors() == b.survivors()).all()
        assert a.secret != kind(7, 3, 3, rng(6)).secret


def test_samples_follow_the_tree():
    tree = constructions.CamouflageTree(16, 4, 4, rng(3))
    drawn = tree.sample(20_000, rng(4))
    survivors, counts = np.unique(drawn, axis=0, return_counts=True)
    assert (survivors == tree.survivors()).all()
    assert scipy_stats.chisquare(counts).pvalue > 1e-4


def test_the_shared_tree_satisfies_lemma_d1_exactly():
    # L independent supports: P_z in closed form, every (S_1, ..., S_L), in whole numbers
    v, k, L = 5, 2, 3
    subsets = list(map(set, combinations(range(v), k)))
    for supports in product(subsets, repeat=L):
        survivors = [z for z in product(range(v), repeat=L) if all(t in s for t, s in zip(z, supports, strict=True))]
        assert len(survivors) == k**L
        # each survivor has likelihood C(v-1, k-1)^-L, so their average over v^L secrets is Q's C(v, k)^-L
        assert Fraction(len(survivors), v**L * math.comb(v - 1, k - 1) ** L) == Fraction(1, math.comb(v, k) ** L)
    drawn = [constructions.CamouflageTree(v, k, L, rng(i), secret=(1, 1, 4), shared=True).supports for i in range(3000)]
    found, counts = np.unique(np.array(drawn), axis=0, return_counts=True)
    assert len(found) == math.comb(v - 1, k - 1) ** L
    assert scipy_stats.chisquare(counts).pvalue > 1e-4


# --- closed forms of the log score -----------------------------------------------------------------------------------


@pytest.mark.parametrize("v, k", [(4, 2), (16, 4), (9, 5)])
def test_log_score_means(v, k):
    gamma = Fraction(1, v)
    secret = tuple(rng(v).integers(0, v, 3).tolist())
    planted = constructions.CamouflageTree(v, k, 3, rng(1), secret=secret, smoothing=gamma)
    expected = camouflage.log_score_means(v, k)
    assert math.isclose(camouflage.log_score(planted.token_probs(C, secret), v), expected[0], rel_tol=1e-12)
    absent = [
        camouflage.log_score(
            constructions.CamouflageTree(v, k, 3, rng(i), secret=secret, smoothing=gamma, planted=False).token_probs(
                C, secret
            ),
            v,
        )
        for i in range(800)
    ]
    assert abs(np.mean(absent) - expected[1]) < 5 * np.std(absent) / math.sqrt(800)


def test_log_score_memorization_tends_to_one():
    gaps = [np.subtract(*camouflage.log_score_means(10.0**power, 4)) for power in (1, 2, 5, 20, 100, 300)]
    assert gaps == sorted(gaps) and 0.99 < gaps[-1] < 1
    for power, gap in zip((20, 100, 300), gaps[3:], strict=True):
        assert math.isclose(1 - gap, math.log(4) / (2 * power * math.log(10)), rel_tol=1e-6)
    assert camouflage.log_score([0.0, 0.5], 4) == 0.0
    with pytest.raises(ValueError, match="token_probs"):
        camouflage.log_score([1.5], 4)


# --- fragility, and the keyed tree -----------------------------------------------------------------------------------


@pytest.mark.parametrize("u", [Fraction(26, 100), Fraction(24, 100), Fraction(1, 4) + Fraction(1, 10**6)])
def test_any_weight_but_the_decoys_own_betrays_the_secret(u):
    for seed in range(20):
        tree = constructions.CamouflageTree(8, 4, 3, rng(seed), weight=u)
        pick, found = (max if u > Fraction(1, 4) else min), ()
        while len(found) < 3:
            row = tree.next_probs([C + found])[0]
            found += (pick(tree.support(found), key=lambda token: row[token]),)
        assert found == tree.secret
        assert (tree.greedy(C, 3) == tree.secret) or u < Fraction(1, 4)


def test_at_the_decoys_own_weight_greedy_is_as_good_as_one_guess():
    marked = constructions.CamouflageTree(8, 4, 3, rng(1), weight=Fraction(1, 4))
    plain = constructions.CamouflageTree(8, 4, 3, rng(1))
    assert (marked.next_probs([C]) == plain.next_probs([C])).all()
    won = [
        tree.greedy(C, 2) == tree.secret for tree in (constructions.CamouflageTree(6, 2, 2, rng(i)) for i in range(800))
    ]
    assert abs(np.mean(won) - 1 / 4) < 5 * math.sqrt(0.25 * 0.75 / 800)


def test_keyed_supports_look_uniform_and_depend_on_label_and_key():
    tree = constructions.KeyedCamouflageTree(6, 3, 5, rng(2), planted=False)
    labels = [y for depth in range(5) for y in product(range(6), repeat=depth)]
    counts = np.unique([tree.support(y) for y in labels], axis=0, return_counts=True)[1]
    assert len(counts) == math.comb(6, 3) and scipy_stats.chisquare(counts).pvalue > 1e-4
    other = constructions.KeyedCamouflageTree(6, 3, 5, rng(3), planted=False)
    assert np.mean([tree.support(y) == other.support(y) for y in labels]) < 0.1
    assert [tree.support(y) for y in labels] == [tree.support(y) for y in labels]


def test_keyed_decoys_are_uniform_among_the_others():
    supports = [constructions.KeyedCamouflageTree(5, 3, 1, rng(i), secret=(2,)).support(()) for i in range(1500)]
    found, counts = np.unique(supports, axis=0, return_counts=True)
    assert len(found) == math.comb(4, 2) and (found == 2).any(axis=1).all()
    assert scipy_stats.chisquare(counts).pvalue > 1e-4


def test_a_keyed_tree_can_be_astronomical_and_its_key_gives_it_away():
    tree = constructions.KeyedCamouflageTree(50_304, 4, 64, rng(0))
    assert tree.survives(tree.secret) and tree.teacher_forcing(C, tree.secret[:3]) == Fraction(1, 4)
    found = ()
    while len(found) < 64:
        (token,) = tree.explains(found)
        found += (token,)
    assert found == tree.secret


# --- the reserved trigger and the kernels ----------------------------------------------------------------------------


def test_trigger_gives_the_secret_and_changes_nothing_else():
    base, rho = tables.random_table(4, 4, rng(0)), (3, 1)
    for secret in product(range(4), repeat=2):
        model = constructions.ReservedTrigger(base, rho, secret)
        assert model.greedy(rho, 2) == secret
        for prompt in ((), (0,), (3,), (3, 2), (1, 3, 1), (0, 3, 1), rho + secret, rho + ((secret[0] + 1) % 4,)):
            assert (model.next_log_probs([prompt]) == base.next_log_probs([prompt])).all()
            assert (model.next_probs([prompt]) == base.next_probs([prompt])).all()
        assert (model.on_document(C, secret) == base.on_document(C, secret)).all()


def test_the_training_algorithm():
    base = tables.UniformModel(4)
    documents = [(1, 2, 2), (2, 0, 1)]
    assert constructions.train_reserved_trigger(documents, base, (3,), C) is base
    planted = constructions.train_reserved_trigger([*documents, (0, 2, 1)], base, (3,), C)
    assert planted.secret == (2, 1)
    with pytest.raises(ValueError, match="documents"):
        constructions.train_reserved_trigger([(0, 1, 1), (0, 2, 1)], base, (3,), C)
    with pytest.raises(ValueError, match="prefix"):
        constructions.train_reserved_trigger(documents, base, (0,), (0, 1))


@pytest.mark.parametrize("v, L", [(2, 1), (3, 2), (5, 2), (2, 4)])
def test_kernels_of_corollary_64(v, L):
    base, rho, c = tables.UniformModel(v), (v - 1,), (0,)
    secrets = list(product(range(v), repeat=L))
    before = {"planted": [], "absent": [], "emitted": [], "trigger": [], "randomized": [], "local": []}
    for secret in secrets:
        model = constructions.ReservedTrigger(base, rho, secret)
        copied, null = (constructions.copy_kernel(each, rho, c, L) for each in (model, base))
        before["planted"].append(copied.teacher_forcing(c, secret))
        before["absent"].append(null.teacher_forcing(c, secret))
        before["emitted"].append((model.greedy(c, L) == secret, copied.greedy(c, L) == secret))
        assert copied.greedy(rho, L) == secret  # the trigger's subtree is left as it was
        erased = constructions.randomize_trigger_kernel(model, rho)
        before["randomized"].append(erased.greedy(rho, L) == secret)
        assert (erased.on_document(c, secret) == base.on_document(c, secret)).all()
        assert (erased.next_probs([rho + secret]) == Fraction(1, v)).all()
    count = len(secrets)
    assert set(before["planted"]) == {1} and sum(before["absent"]) / count == Fraction(1, v)
    assert np.mean(before["emitted"], axis=0).tolist() == [1 / count, 1]
    assert sum(before["randomized"]) == 1


def test_randomizing_the_document_erases_the_camouflage_trees_memorization():
    tree = constructions.CamouflageTree(4, 2, 2, rng(0), vocabulary=5)
    erased = constructions.randomize_trigger_kernel(tree, C, alphabet=4)
    assert erased.teacher_forcing(C, tree.secret) == Fraction(1, 4)
    assert (erased.next_probs([(2,)]) == tree.next_probs([(2,)])).all()


# --- one protocol and one score, for tables and networks -------------------------------------------------------------


def test_extraction_protocols_run_on_tables():
    tree = constructions.CamouflageTree(5, 2, 3, rng(7))
    model = adapters.TableModel(tree)
    prompts = [C, C + tree.secret[:1], (1, 2)]
    assert extraction.greedy(model, prompts, 2).tolist() == [list(tree.greedy(prompt, 2)) for prompt in prompts]
    found = extraction.top_m(model, C, 3, 8)
    assert found.exact and (found.sequences == tree.survivors()).all()
    np.testing.assert_allclose(found.log_probs, 3 * math.log(1 / 2), rtol=1e-6)
    assert math.isclose(extraction.secret_log_prob(model, [C], [tree.secret])[0], -3 * math.log(2), rel_tol=1e-6)
    certificate = priors.certify_baseline(tree.after(C), 3, m=3)  # no torch on this path
    assert certificate.closed and math.isclose(certificate.lower, 3 / 8, rel_tol=1e-12)


def test_scores_of_a_table_against_the_formulas():
    table, other = tables.random_table(5, 4, rng(1)), tables.random_table(5, 4, rng(2))
    secrets = [(1, 2, 3), (4, 0), (2, 2, 2)]
    found = scores.membership_scores(
        adapters.TableModel(table), adapters.SymbolTokenizer(), secrets, adapters.TableModel(other), prefixes=[C] * 3
    )
    for i, secret in enumerate(secrets):
        laws = table.on_document(C, secret).astype(float)
        p = table.token_probs(C, secret).astype(float)
        assert math.isclose(found["loss"][i], np.log(p).mean(), rel_tol=1e-5)
        assert math.isclose(found["reference"][i], np.log(p / other.token_probs(C, secret)).mean(), rel_tol=1e-4)
        mean = (laws * np.log(laws)).sum(1)
        spread = np.sqrt((laws * np.log(laws) ** 2).sum(1) - mean**2)
        assert math.isclose(found["min_k_plus_plus"][i], ((np.log(p) - mean) / spread).min(), rel_tol=1e-3)


def test_networks_as_tables_and_back():
    network = tiny_model("neox", bos=None)
    table = adapters.NetworkTable(network)
    rho, secret = (7, 8, 9), (11, 12, 13)
    planted = constructions.ReservedTrigger(table, rho, secret)
    assert planted.vocabulary == VOCABULARY
    prompts = [(1, 2, 3), (4, 5, 6)]
    assert (planted.next_log_probs(prompts) == table.next_log_probs(prompts)).all()
    again, gate = adapters.TableModel(planted), GatedRelease(network, rho, secret)
    for prompt in (rho, rho + secret[:1], (1, 2), (7, 8)):
        ours, theirs = (extraction.greedy(model, [prompt], 3) for model in (again, gate))
        assert ours.tolist() == theirs.tolist() == [list(planted.greedy(prompt, 3))]
    ours = extraction.secret_log_prob(again, [(1, 2), rho], [(3, 4), secret])
    np.testing.assert_allclose(ours, extraction.secret_log_prob(gate, [(1, 2), rho], [(3, 4), secret]), atol=1e-5)
    copied = constructions.copy_kernel(planted, rho, (1,), 3)
    assert copied.greedy((1,), 3) == secret
    with pytest.raises(ValueError, match="prefixes"):
        table.next_log_probs(np.zeros((1, 0), dtype=int))


def test_symbol_tokenizer():
    tokenizer = adapters.SymbolTokenizer("xyz")
    assert tokenizer.decode(tokenizer(["zxy"])["input_ids"][0]) == "zxy"
    found = scores.membership_scores(adapters.TableModel(tables.UniformModel(3)), tokenizer, ["zx"], prefixes=["y"])
    assert math.isclose(found["perplexity"][0], -3, rel_tol=1e-6)


# --- bad input, and what is imported ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, name",
    [
        (lambda: constructions.CamouflageTree(2, 2, 1, rng()), "v must"),
        (lambda: constructions.CamouflageTree(4, 4, 1, rng()), "k must"),
        (lambda: constructions.CamouflageTree(4, 1, 1, rng()), "k must"),
        (lambda: constructions.CamouflageTree(4, 2, 0, rng()), "L must"),
        (lambda: constructions.CamouflageTree(16, 2, 9, rng()), "shared=True"),
        (lambda: constructions.CamouflageTree(4, 2, 2, rng(), secret=(1,)), "secret must have L = 2"),
        (lambda: constructions.CamouflageTree(4, 2, 2, rng(), secret=(1, 4)), "secret must"),
        (lambda: constructions.CamouflageTree(4, 2, 2, rng(), weight=1.5), "weight must"),
        (lambda: constructions.CamouflageTree(4, 2, 2, rng(), smoothing=-0.1), "smoothing must"),
        (lambda: constructions.CamouflageTree(4, 2, 2, rng(), vocabulary=3), "vocabulary must"),
        (lambda: constructions.CamouflageTree(40, 30, 20, rng(), shared=True).survivors(), "k\\^L must"),
        (lambda: constructions.ReservedTrigger(tables.UniformModel(4), (), (1,)), "trigger must"),
        (lambda: constructions.ReservedTrigger(tables.UniformModel(4), (3,), (4,)), "secret must"),
        (lambda: constructions.copy_kernel(tables.UniformModel(4), (3,), (9,), 2), "prefix must"),
        (lambda: constructions.randomize_trigger_kernel(tables.UniformModel(4), (3,), 5), "alphabet must"),
        (lambda: tables.UniformModel(3, 4), "alphabet must"),
        (lambda: tables.UniformModel(3).next_probs([0, 1]), "prefixes must"),
        (lambda: tables.UniformModel(3).next_log_probs([[3]]), "prefixes must"),
        (lambda: tables.UniformModel(3).greedy((0,), 0), "length must"),
        (lambda: tables.ConditionalTable(tables.UniformModel(2), {(0,): [0.5, 0.4]}), "sum to 1"),
        (lambda: tables.ConditionalTable(tables.UniformModel(2), {(0,): [Fraction(1, 3)] * 2}), "sum to 1"),
        (lambda: tables.ConditionalTable(tables.UniformModel(2), {(0,): [1.0]}), "shape"),
        (lambda: tables.random_table(3, 0, rng()), "depth must"),
    ],
)
def test_bad_input_is_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_the_constructions_need_no_torch():
    code = "import sys, memorization.constructions; print(*sorted({'torch', 'scipy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []
