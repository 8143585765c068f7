"""Baselines against exhaustive search over lists, and the certificate against every string of synthetic laws."""

from __future__ import annotations

import functools
import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memorization import priors

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)

weights = st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any)


def heaviest(masses, m):
    """The best mass of m candidates, by trying every list."""
    return max(sum(chosen, Fraction(0)) for chosen in itertools.combinations(masses, m))


# --- Priors that can be listed ----------------------------------------------------------------------------------


@PROPERTY
@given(weights)
def test_baseline_is_the_best_list_and_lies_under_the_entropy_envelope(integers):
    exact = [Fraction(w, sum(integers)) for w in integers]
    prior = np.array(exact, dtype=float)
    entropy = priors.min_entropy(prior)
    assert entropy == pytest.approx(-math.log2(max(exact)), abs=1e-12)
    for m in range(len(integers) + 1):
        kappa = priors.oblivious_baseline(prior, m)
        assert kappa == pytest.approx(float(heaviest(exact, m)), rel=1e-15)
        envelope = m * 2**-entropy  # Definition 3.3 and the slack noted under Theorem 5.1: between kappa and m kappa
        assert kappa * (1 - 1e-12) <= envelope <= m * kappa * (1 + 1e-12)


def test_envelope_is_met_by_uniform_priors_and_missed_by_a_factor_m():
    for support in [1, 3, 1000, 2**20]:
        uniform = np.full(support, 1 / support)
        for m in {1, min(4, support), support}:
            assert priors.oblivious_baseline(uniform, m) == pytest.approx(m / support, rel=1e-15)
            assert m * 2 ** -priors.min_entropy(uniform) == pytest.approx(m / support, rel=1e-12)
    assert priors.min_entropy(np.full(2**20, 2.0**-20)) == 20.0
    # One heavy atom and a negligible tail: the factor m is approached.
    heavy = np.append(1 - 1e-9, np.full(10**6, 1e-15))
    assert 16 * 2 ** -priors.min_entropy(heavy) / priors.oblivious_baseline(heavy, 16) == pytest.approx(16, rel=1e-8)


def test_sums_are_correctly_rounded_over_many_atoms():
    prior = priors.zipf_prior(200_000, 1.3)
    exact = sum(map(Fraction, sorted(prior.tolist(), reverse=True)[:150_000]))
    assert priors.oblivious_baseline(prior[::-1], 150_000) == float(exact)
    tiny = np.array([1.0, 3e-100, 2e-100, 1e-100])[::-1]
    assert priors.oblivious_baseline(tiny, 1) == 1.0
    assert priors.oblivious_baseline(tiny, 0) == 0.0


def test_zipf_canary_of_section_8_1():
    prior = priors.zipf_prior(1024, 1.1)
    kappa, entropy = priors.oblivious_baseline(prior, 4), priors.min_entropy(prior)
    assert kappa == pytest.approx(0.3550, abs=5e-5)
    assert entropy == pytest.approx(2.48, abs=5e-3)
    assert 4 * 2**-entropy == pytest.approx(0.716, abs=5e-4)  # printed 0.707 is 4 / 2^2.5
    assert kappa > math.exp(-1) * 0.41  # alpha*(0.41) at epsilon = 1: the 41% success refutes nothing
    # The reading that fits every printed number at once, the envelope of 0.707 included.
    other = priors.zipf_prior(590, 1.0745)
    assert priors.oblivious_baseline(other, 4) == pytest.approx(0.355, abs=5e-4)
    assert 4 * 2 ** -priors.min_entropy(other) == pytest.approx(0.707, abs=5e-4)


def test_zipf_prior():
    np.testing.assert_allclose(priors.zipf_prior(3, 1.0), np.array([6, 3, 2]) / 11, rtol=1e-15)
    np.testing.assert_array_equal(priors.zipf_prior(4, 0.0), [0.25] * 4)
    np.testing.assert_array_equal(priors.zipf_prior(3, 1e6), [1.0, 0.0, 0.0])
    assert priors.min_entropy([1.0]) == 0.0
    assert math.copysign(1.0, priors.min_entropy([1.0])) == 1.0


@PROPERTY
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=3).filter(
        lambda w: any(map(any, w))
    )
)
def test_conditional_baseline_is_the_best_informed_strategy(integers):
    total = sum(map(sum, integers))
    exact = [[Fraction(w, total) for w in row] for row in integers]
    joint, marginal = np.array(exact, dtype=float), [sum(column) for column in zip(*exact, strict=True)]
    for m in range(4):
        # Every map from corpora to lists, scored by the chance that the list named for the corpus holds the secret.
        lists = list(itertools.combinations(range(3), m))
        best = max(
            sum((row[z] for row, chosen in zip(exact, strategy, strict=True) for z in chosen), Fraction(0))
            for strategy in itertools.product(lists, repeat=len(exact))
        )
        kappa = priors.conditional_baseline(joint, m)
        assert kappa == pytest.approx(float(best), rel=1e-15)
        assert kappa >= float(heaviest(marginal, m)) * (1 - 1e-15)


def test_conditional_baseline_of_an_independent_corpus_is_the_oblivious_one():
    prior = priors.zipf_prior(50, 1.0)
    joint = np.array([0.2, 0.5, 0.3])[:, None] * prior
    assert priors.conditional_baseline(joint, 5) == pytest.approx(priors.oblivious_baseline(prior, 5), rel=1e-14)
    # A corpus that gives the secret away charges it all to the baseline.
    assert priors.conditional_baseline(np.eye(8) / 8, 1) == 1.0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: priors.oblivious_baseline([0.5, 0.5], 3), "m must be a whole number of at least 0 and at most 2"),
        (lambda: priors.oblivious_baseline([0.5, 0.5], -1), "m must"),
        (lambda: priors.oblivious_baseline([0.5, 0.5], 1.0), "m must"),
        (lambda: priors.oblivious_baseline([0.5, 0.4], 1), "prior must sum to 1"),
        (lambda: priors.oblivious_baseline([0.5, math.nan], 1), "prior must"),
        (lambda: priors.min_entropy([]), "prior must"),
        (lambda: priors.min_entropy([1.5, -0.5]), "prior must"),
        (lambda: priors.conditional_baseline([0.5, 0.5], 1), "joint must be a matrix"),
        (lambda: priors.conditional_baseline([[0.5, 0.5], [0.5, 0.5]], 1), "joint must sum to 1"),
        (lambda: priors.conditional_baseline([[0.5, 0.5]], 3), "m must"),
        (lambda: priors.zipf_prior(0, 1.0), "support"),
        (lambda: priors.zipf_prior(3, -1.0), "exponent"),
        (lambda: priors.zipf_prior(3, math.inf), "exponent"),
    ],
)
def test_baselines_refuse(call, named):
    with pytest.raises(ValueError, match=named):
        call()


# --- Autoregressive priors --------------------------------------------------------------------------------------


class Law:
    """An autoregressive law held as one table a depth, which also knows the mass of every string."""

    def __init__(self, tables):
        self.tables = tables  # table t has shape (v,) * (t + 1): next-token probabilities after each t-token prefix
        self.length, self.vocabulary = len(tables), tables[0].size
        self.asked = []

    def __call__(self, prefixes):
        assert prefixes.dtype == np.int64
        assert prefixes.shape[1] < self.length
        self.asked += map(tuple, prefixes.tolist())
        self.largest_batch = max(getattr(self, "largest_batch", 0), len(prefixes))
        with np.errstate(divide="ignore"):
            return np.log(self.tables[prefixes.shape[1]][tuple(prefixes.T)]).reshape(len(prefixes), -1)

    @functools.cached_property
    def joint(self):
        return functools.reduce(lambda mass, table: mass[..., None] * table, self.tables)

    def best(self, m):
        return -np.sort(-self.joint, axis=None)[:m]


def random_law(rng, vocabulary, length, kind):
    tables = []
    for depth in range(length):
        shape = (vocabulary,) * (depth + 1)
        if kind == "uniform":
            table = np.ones(shape)
        elif kind == "tied":  # powers of two over few values: exact ties between strings of different branches
            table = 2.0 ** rng.integers(0, 2, shape)
        elif kind == "sparse":  # many zero probabilities, at times fewer than m possible strings
            table = rng.random(shape) * (rng.random(shape) < 0.4)
            table[..., 0] += 1e-3
        else:
            table = rng.gamma({"peaked": 0.05, "rough": 0.5, "flat": 20.0}[kind], size=shape) + 1e-300
        tables.append(table / table.sum(axis=-1, keepdims=True))
    return Law(tables)


KINDS = ("peaked", "rough", "flat", "uniform", "tied", "sparse")


def check(certificate, law, m, budget, max_frontier):
    """Everything a certificate says, held against every string of the law."""
    best, slack = law.best(m), certificate.slack
    kappa = math.fsum(best)
    assert 0 < slack < 1e-11

    # The interval, now and after every batch; it only ever shrinks.
    expanded, lower, upper = certificate.trace.T
    assert (lower * (1 - slack) <= kappa).all() and (kappa <= upper * (1 + slack)).all()
    assert (np.diff(expanded) > 0).all() and (np.diff(lower) >= 0).all() and (np.diff(upper) <= 1e-12).all()
    assert certificate.expanded == expanded[-1] == len(law.asked) == len(set(law.asked)) <= budget
    assert (certificate.lower, certificate.upper) == (lower[-1], upper[-1])

    # The strings found: distinct, sorted, with their own masses.
    strings, log_probs = [s for s, _ in certificate.top], np.array([p for _, p in certificate.top])
    assert len(set(strings)) == len(strings) <= m and (np.diff(log_probs) <= 0).all()
    masses = np.array([law.joint[s] for s in strings])
    np.testing.assert_allclose(np.exp(log_probs), masses, rtol=slack)
    assert certificate.lower == pytest.approx(min(1.0, masses.sum()), rel=1e-12)

    # What was not found: either no better than the m-th found, or covered by the frontier's mass.
    beta, unexplored = certificate.frontier_mass, certificate.unexplored_mass
    others = law.joint.copy()
    for string in strings:
        others[string] = 0.0
    threshold = masses.min() if len(masses) == m else 0.0
    better = others[others > threshold * (1 + slack)]
    assert better.max(initial=0.0) <= beta * (1 + slack)
    assert better.sum() <= unexplored * (1 + slack)

    if certificate.closed:
        assert certificate.lower == certificate.upper == pytest.approx(kappa, rel=1e-12)
        assert (beta, unexplored) == (0.0, 0.0)
        np.testing.assert_allclose(masses, best[best > 0][: len(masses)], rtol=1e-12)
        assert len(masses) == min(m, (law.joint > 0).sum())
    else:
        assert beta > threshold * (1 - slack)
        assert certificate.expanded == budget or max_frontier < budget
        ranked = math.fsum(sorted([*np.exp(log_probs), *[beta] * m])[-m:])
        assert certificate.upper == pytest.approx(min(1.0, certificate.lower + unexplored, ranked), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_certificates_hold_on_thousands_of_random_laws(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    closed = 0
    for _ in range(500):
        vocabulary, length = int(rng.integers(1, 8)), int(rng.integers(1, 5))
        law, m = random_law(rng, vocabulary, length, kind), int(rng.choice([1, 2, 4, 16]))
        budget, max_frontier = int(rng.choice([1, 3, 10, 40, 10_000])), int(rng.choice([1, 2, 7, 30, 10**6]))
        batch_size = int(rng.choice([1, 2, 5, 64]))
        certificate = priors.certify_baseline(law, length, m, budget, batch_size=batch_size, max_frontier=max_frontier)
        check(certificate, law, m, budget, max_frontier)
        assert law.largest_batch <= batch_size
        if budget == max_frontier == 10_000:
            assert certificate.closed
        closed += certificate.closed
    assert 100 < closed < 500  # both outcomes are tested


@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize(("vocabulary", "length"), [(120, 2), (120, 3), (40, 3), (20, 4), (7, 4)])
def test_certificates_hold_on_larger_laws(vocabulary, length, m):
    rng = np.random.default_rng([vocabulary, length, m])
    for kind in ("peaked", "rough", "sparse"):
        law = random_law(rng, vocabulary, length, kind)
        for budget, batch_size in [(2, 1), (12, 8), (150, 1), (150, 64), (vocabulary**length, 64)]:
            law.asked = []
            certificate = priors.certify_baseline(law, length, m, budget, batch_size=batch_size)
            check(certificate, law, m, budget, 10**6)
        assert certificate.closed


def list_viterbi(initial, transition, length, m):
    """Masses of the m best strings of a Markov chain, by dynamic programming over the last token."""
    best = initial[:, None]  # (state, rank)
    for _ in range(length - 1):
        grown = best[:, :, None] * transition[:, None, :]  # previous state, rank, next state
        best = -np.sort(-grown.reshape(-1, transition.shape[1]), axis=0)[:m].T
    return -np.sort(-best, axis=None)[:m]


@pytest.mark.parametrize("m", [1, 4, 16])
def test_markov_chains_too_large_to_list(m):
    rng = np.random.default_rng(m)
    for vocabulary, length, shape in [(120, 4, 0.05), (30, 8, 0.02), (4, 12, 0.1)]:
        transition = rng.dirichlet(np.full(vocabulary, shape), size=vocabulary + 1) + 1e-12
        transition /= transition.sum(axis=1, keepdims=True)
        logs, exact = np.log(transition), math.fsum(list_viterbi(transition[-1], transition[:-1], length, m))

        def law(prefixes, logs=logs):
            return logs[prefixes[:, -1] if prefixes.shape[1] else np.full(len(prefixes), -1)]

        certificate = priors.certify_baseline(law, length, m, 20_000)
        assert certificate.closed
        assert certificate.lower == pytest.approx(exact, rel=1e-11)
        for budget in (1, length, 100):
            partial = priors.certify_baseline(law, length, m, budget, batch_size=7)
            assert partial.lower <= exact * (1 + 1e-11) and exact <= partial.upper * (1 + 1e-11)


def test_the_best_string_may_start_with_the_least_likely_token():
    """What a top-k slice of each row would lose."""
    first = np.linspace(1.2, 0.8, 120) / 120
    second = np.full((120, 120), 1 / 120)
    second[-1] = np.eye(120)[77]
    law = Law([first, second])
    certificate = priors.certify_baseline(law, 2)
    assert certificate.closed
    assert certificate.top == (((119, 77), pytest.approx(math.log(first[-1]), rel=1e-12)),)


def test_interval_with_its_slack_holds_in_exact_arithmetic():
    rng = np.random.default_rng(5)
    for _ in range(40):
        rows = [rng.integers(1, 50, (6,) * (depth + 1)) for depth in range(3)]
        law = Law([row / row.sum(axis=-1, keepdims=True) for row in rows])
        masses = []
        for a, b, c in itertools.product(range(6), repeat=3):
            first, second, third = rows[0], rows[1][a], rows[2][a, b]
            masses.append(
                Fraction(int(first[a]) * int(second[b]) * int(third[c]), int(first.sum() * second.sum() * third.sum()))
            )
        kappa = sum(sorted(masses)[-4:])
        certificate = priors.certify_baseline(law, 3, 4)
        assert certificate.closed
        low, high, slack = map(Fraction, (certificate.lower, certificate.upper, certificate.slack))
        assert low * (1 - slack) <= kappa <= high * (1 + slack)


def test_a_beam_search_comes_first_so_that_small_budgets_find_strings():
    law = random_law(np.random.default_rng(1), 7, 4, "flat")
    for max_frontier in (1, 10**6):
        certificate = priors.certify_baseline(law, 4, 1, budget=4, max_frontier=max_frontier)
        greedy = []
        for table in law.tables:
            greedy.append(int(table[tuple(greedy)].argmax()))
        assert certificate.top[0][0] == tuple(greedy)
        assert certificate.lower > 0


def test_dropping_prefixes_that_the_budget_cannot_reach_costs_nothing():
    """The frontier is cut at the budget: searches that just manage to close do so under any larger budget, too."""
    rng = np.random.default_rng(8)
    for kind in ("rough", "flat", "tied"):
        law = random_law(rng, 7, 4, kind)
        needed = priors.certify_baseline(law, 4, 4, 10**6, batch_size=1).expanded
        exact = priors.certify_baseline(law, 4, 4, needed, batch_size=1)
        assert exact.closed and exact.expanded == needed
        assert not priors.certify_baseline(law, 4, 4, needed - 1, batch_size=1).closed


@pytest.mark.parametrize("exponent", [0.0, 1.0])  # uniform: no child of a batch can be pruned
def test_memory_is_bounded_as_stated(exponent):
    row = np.log(priors.zipf_prior(3000, exponent))[None]
    tracemalloc.start()
    certificate = priors.certify_baseline(lambda p: np.broadcast_to(row, (len(p), 3000)), 3, 4, 500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert certificate.expanded > 64
    assert peak < 24 * 500 + 200 * certificate.expanded + 120 * 64 * 3000


@pytest.mark.parametrize("m", [1, 4])
def test_an_open_search_has_certified_what_its_budget_buys(m):
    """One prefix at a time, every one but the first search's is at least beta heavy, and a level's are disjoint."""
    rng = np.random.default_rng(m)
    opened = 0
    for kind in ("rough", "flat", "uniform", "peaked"):
        for _ in range(40):
            length, budget = int(rng.integers(2, 5)), int(rng.integers(14, 200))
            certificate = priors.certify_baseline(random_law(rng, 7, length, kind), length, m, budget, batch_size=1)
            if not certificate.closed:
                opened += 1
                assert certificate.frontier_mass <= (length - 1) / (budget - 1 - m * (length - 1)) * (1 + 1e-12)
    assert opened > 20


def test_strings_fewer_than_the_list_budget():
    certificate = priors.certify_baseline(Law([np.array([0.5, 0.0, 0.5]), np.eye(3)]), 2, 16)
    assert certificate.closed
    assert [string for string, _ in certificate.top] == [(0, 0), (2, 2)]
    assert certificate.lower == certificate.upper == pytest.approx(1.0, abs=1e-15)
    single = priors.certify_baseline(lambda prefixes: np.zeros((len(prefixes), 1)), 5, 3)
    assert (single.lower, single.top, single.closed) == (1.0, (((0,) * 5, 0.0),), True)


def test_temperature_is_part_of_the_measure():
    rng = np.random.default_rng(2)
    law = random_law(rng, 7, 3, "rough")
    for temperature in (0.3, 2.0, 50.0):
        tempered = [table ** (1 / temperature) for table in law.tables]
        tempered = Law([table / table.sum(axis=-1, keepdims=True) for table in tempered])
        certificate = priors.certify_baseline(law, 3, 4, temperature=temperature)
        assert certificate.lower == pytest.approx(math.fsum(tempered.best(4)), rel=1e-11)
    cold = priors.certify_baseline(law, 3, temperature=1e-300)  # greedy decoding
    assert (cold.lower, cold.closed) == (1.0, True)


def test_float32_rows_are_normalized():
    rng = np.random.default_rng(4)
    logits = 4 * rng.standard_normal((50, 50)).astype(np.float32)
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert rows.dtype == np.float32
    certificate = priors.certify_baseline(lambda p: rows[p.sum(axis=1) % 50], 1, 50)
    assert certificate.lower == pytest.approx(1.0, abs=1e-14)


def test_masses_below_the_smallest_float_neither_close_nor_warn():
    uniform = np.full((1, 50), -math.log(50))
    certificate = priors.certify_baseline(lambda p: uniform.repeat(len(p), 0), 200, budget=400)
    assert not certificate.closed
    assert certificate.top[0][1] == pytest.approx(-200 * math.log(50), rel=1e-12)
    assert certificate.entropy[0] < 15 and certificate.entropy[1] == math.inf


def test_entropy_encloses_the_min_entropy():
    law = random_law(np.random.default_rng(6), 7, 3, "flat")
    low, high = priors.certify_baseline(law, 3, budget=12).entropy
    exact = priors.min_entropy(law.joint.ravel() / law.joint.sum())
    assert low < exact <= high * (1 + 1e-12)
    assert priors.certify_baseline(law, 3).entropy == (pytest.approx(exact), pytest.approx(exact))


def test_searches_are_deterministic():
    law = random_law(np.random.default_rng(7), 7, 4, "tied")
    first, second = (priors.certify_baseline(law, 4, 16, 30, max_frontier=20) for _ in range(2))
    assert first == second
    np.testing.assert_array_equal(first.trace, second.trace)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda p: np.full((len(p), 4), -1.0), r"row for prefix \(\) sum to 1.47"),
        (lambda p: np.full((len(p), 4), 900.0), "sum to inf"),
        (lambda p: np.full((len(p), 4), math.nan), "sum to nan"),
        (lambda p: np.full((len(p), 4), -math.inf), "sum to 0"),
        (lambda p: np.log([[0.5, 0.25, 0.2]]), "sum to 0.95"),  # a top-k slice
        (lambda p: np.log([0.5, 0.5]), r"shape \(1, vocabulary\)"),
        (lambda p: np.zeros((1, 0)), "shape"),
        (lambda p: np.log(np.full((2, 4), 0.25)), "shape"),
        (lambda p: np.log(np.full((len(p), 4 + p.shape[1]), 1 / (4 + p.shape[1]))), r"shape \(1, 4\) .* \(1, 5\)"),
        (lambda p: [["a", "b"]], "real numbers"),
        (lambda p: None, "shape"),
    ],
)
def test_rows_are_checked(answer, named):
    with pytest.raises(ValueError, match=f"next_log_probs.*{named}"):
        priors.certify_baseline(answer, 3)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("length", 0),
        ("length", 2.0),
        ("m", 0),
        ("budget", 0),
        ("batch_size", 0),
        ("max_frontier", 0),
        ("temperature", 0.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
    ],
)
def test_certify_baseline_refuses(argument, value):
    law = random_law(np.random.default_rng(0), 3, 2, "flat")
    with pytest.raises(ValueError, match=f"^{argument} must"):
        priors.certify_baseline(law, **{"length": 2, argument: value})
