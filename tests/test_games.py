"""The referee against exact values: every small dataset by enumeration, rational arithmetic, and known mechanisms."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memorization import games, mechanisms
from memorization.tradeoff import ApproxDP, GaussianDP, PureDP

settings.register_profile("games", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("games")

SURE = 1.0 - 1e-7  # confidence of the intervals below: a correct referee fails one test with probability below 1e-6


def uniform_documents(size):
    return lambda shape, rng: rng.integers(size, size=shape)


def read(releases, x):
    return releases


def on_count(mechanism, x=0):
    return lambda datasets, rng: mechanism.sample((datasets == x).sum(axis=1), rng)


# --- Counterfactual memorization -----------------------------------------------------------------------------------


@pytest.mark.parametrize("functional", games.FUNCTIONALS)
@pytest.mark.parametrize(("n", "universe"), [(1, 2), (5, 3), (40, 30)])
def test_played_memorization_agrees_with_the_exact_value(functional, n, universe):
    staircase = mechanisms.bernoulli_staircase(1.5, 3)
    laws = games.copy_count_laws(n, 1.0 / universe, functional)
    exact = games.exact_memorization(*laws, staircase.mean(np.arange(n + 1)))

    def play(seed):
        return games.counterfactual_memorization(
            on_count(staircase), read, uniform_documents(universe), 0, n,
            functional=functional, trials=20_000, rng=np.random.default_rng(seed), confidence=SURE,
        )  # fmt: skip

    estimate = play(3)
    assert estimate.low <= exact <= estimate.high and estimate.trials == 20_000
    assert abs(estimate.value - exact) <= 5.5 * estimate.standard_error
    assert estimate.high - estimate.low < 0.15
    assert play(3) == estimate and play(4) != estimate


def enumerate_memorization(n, law, kernel, functional):
    """Definition 3.2 and Appendix A word for word: every dataset, with rational probabilities; x is document 0."""
    mean = lambda docs: kernel[sum(d == 0 for d in docs)]  # noqa: E731
    weight = lambda docs: math.prod((law[d] for d in docs), start=Fraction(1))  # noqa: E731
    every = lambda size: list(product(range(len(law)), repeat=size))  # noqa: E731
    if functional == "population-conditional":
        sides = []
        for present in (True, False):
            group = [docs for docs in every(n) if (0 in docs) == present]
            sides.append(sum(weight(d) * mean(d) for d in group) / sum(weight(d) for d in group))
        return sides[0] - sides[1]
    planted = sum(weight(rest) * mean((0, *rest)) for rest in every(n - 1))
    if functional == "leave-one-out":
        return planted - sum(weight(rest) * mean(rest) for rest in every(n - 1))
    return planted - sum(weight(docs) * mean(docs) for docs in every(n))


@pytest.mark.parametrize("functional", games.FUNCTIONALS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_copy_count_laws_by_enumeration(functional, n):
    law = [Fraction(1, 5), Fraction(1, 2), Fraction(3, 10)]
    kernel = [Fraction(1, 7), Fraction(2, 3), Fraction(1, 2), Fraction(5, 6), Fraction(1)][: n + 1]
    exact = enumerate_memorization(n, law, kernel, functional)
    laws = games.copy_count_laws(n, 0.2, functional)
    assert games.exact_memorization(*laws, [float(k) for k in kernel]) == pytest.approx(float(exact), abs=1e-15)


@given(st.integers(1, 12), st.integers(1, 10**6 - 1), st.sampled_from(games.FUNCTIONALS))
def test_copy_count_laws_in_rational_arithmetic(n, parts, functional):
    p = Fraction(parts / 10**6)  # the float, exactly
    pmf = lambda size: [math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]  # noqa: E731
    whole, rest = pmf(n), pmf(n - 1)
    if functional == "population-conditional":
        exact = [0, *(w / (1 - whole[0]) for w in whole[1:])], [1] + [0] * n
    else:
        exact = [0, *rest], whole if functional == "replace-one" else [*rest, 0]
    for law, wanted in zip(games.copy_count_laws(n, float(p), functional), exact, strict=True):
        np.testing.assert_allclose(law, [float(w) for w in wanted], rtol=1e-10)


@pytest.mark.parametrize("mass", [0.0, 1e-300, 1e-12, 0.5, 1.0 - 1e-12, 1.0])
@pytest.mark.parametrize("n", [1, 2, 3000])
def test_copy_count_laws_at_extremes(n, mass):
    for functional in games.FUNCTIONALS:
        if functional == "population-conditional" and mass in (0.0, 1.0):
            with pytest.raises(ValueError, match="mass must lie"):
                games.copy_count_laws(n, mass, functional)
            continue
        for law in games.copy_count_laws(n, mass, functional):
            assert law.shape == (n + 1,) and (law >= 0).all() and math.fsum(law) == pytest.approx(1.0, abs=1e-12)
    with_copies, without = games.copy_count_laws(n, mass)
    counts = np.arange(n + 1)
    assert counts @ with_copies == pytest.approx(1 + (n - 1) * mass, rel=1e-11)
    assert counts @ without == pytest.approx(n * mass, rel=1e-11)


@pytest.mark.parametrize(
    "f", [PureDP(1.0), ApproxDP(0.5, 0.1), GaussianDP(1.0)], ids=["pure", "approximate", "Gaussian"]
)
def test_targets_in_the_support_are_memorized_less(f):
    """Remark B.7: the tight canary gives exactly (1 − ω)^n η(f)."""
    canary = mechanisms.tight_canary(f)
    for n, omega in ((1, 0.3), (7, 0.05), (1000, 1e-4), (50, 0.0)):
        exact = games.exact_memorization(*games.copy_count_laws(n, omega), canary.mean(np.arange(n + 1)))
        assert exact == pytest.approx((1 - omega) ** n * f.advantage(), abs=1e-12)
        # leave-one-out misses x with n − 1 draws
        exact = games.exact_memorization(*games.copy_count_laws(n, omega, "leave-one-out"), canary.mean(range(n + 1)))
        assert exact == pytest.approx((1 - omega) ** (n - 1) * f.advantage(), abs=1e-12)


@given(st.floats(0.01, 3.0), st.integers(1, 8), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_leave_one_out_and_replace_one_obey_the_cap(epsilon, n, mass, seed):
    """Theorem 4.1 and Proposition A.1 on random ε-DP count mechanisms (a count is private under both adjacencies)."""
    rng = np.random.default_rng(seed)
    bias = [rng.random()]
    for _ in range(n):
        low = max(math.exp(-epsilon) * bias[-1], 1 - math.exp(epsilon) * (1 - bias[-1]), 0.0)
        high = min(math.exp(epsilon) * bias[-1], 1 - math.exp(-epsilon) * (1 - bias[-1]))
        bias.append(low + (high - low) * rng.choice([0.0, rng.random(), 1.0]))
    for functional in ("replace-one", "leave-one-out"):
        value = games.exact_memorization(*games.copy_count_laws(n, mass, functional), bias)
        assert abs(value) <= math.tanh(epsilon / 2) + 1e-12


def test_add_remove_guarantees_cost_two_steps_under_replacement():
    """Adjacency: ε-DP under add/remove, yet replace-one reaches η*_2 > tanh(ε/2); leave-one-out does not."""
    staircase = mechanisms.bernoulli_staircase(1.0, 2)

    def release(datasets, rng):  # climbs with copies of x = 0, falls with copies of 1: one document, one step
        return staircase.sample(np.clip(1 + (datasets == 0).sum(axis=1) - (datasets == 1).sum(axis=1), 0, 2), rng)

    def play(functional):
        return games.counterfactual_memorization(
            release, read, lambda shape, rng: np.where(np.arange(shape[1]) == 0, 1, 2) * np.ones(shape, int), 0, 1,
            functional=functional, trials=50_000, rng=np.random.default_rng(0), confidence=SURE,
        )  # fmt: skip

    replaced, removed = play("replace-one"), play("leave-one-out")
    assert replaced.low > math.tanh(0.5) and replaced.low <= 1 - math.exp(-1) <= replaced.high
    assert removed.high < 0.45 and removed.low <= staircase.mean(2) - staircase.mean(1) <= removed.high
    assert staircase.mean(2) - staircase.mean(1) <= math.tanh(0.5)


def test_planting_does_not_touch_the_source_and_rare_targets_are_refused():
    corpus = np.ones((10, 4), dtype=int)
    fixed = lambda shape, rng: corpus[: shape[0]]  # noqa: E731
    response = on_count(mechanisms.randomized_response(1.0))
    games.counterfactual_memorization(response, read, fixed, 0, 4, trials=10, rng=np.random.default_rng(0))
    assert (corpus == 1).all()
    with pytest.raises(ValueError, match="x must be present more often, got 0"):
        games.counterfactual_memorization(
            response, read, fixed, 0, 4, functional="population-conditional", trials=10, rng=np.random.default_rng(0)
        )


def test_score_must_stay_in_its_range_and_width_scales():
    response = mechanisms.randomized_response(1.0)
    play = lambda scale, **keywords: games.counterfactual_memorization(  # noqa: E731
        on_count(response), lambda releases, x: scale * releases, uniform_documents(3), 0, 2,
        trials=2000, rng=np.random.default_rng(1), **keywords,
    )  # fmt: skip
    with pytest.raises(ValueError, match="score must lie in"):
        play(2.0)
    unit, double = play(1.0), play(2.0, score_range=(0.0, 2.0))
    for field in ("value", "low", "high", "standard_error"):
        assert getattr(double, field) == pytest.approx(2 * getattr(unit, field))
    with pytest.raises(ValueError, match="one value a dataset"):
        games.counterfactual_memorization(
            on_count(response), lambda r, x: 0.5, uniform_documents(3), 0, 2, trials=5, rng=np.random.default_rng(0)
        )


def test_interval_is_the_empirical_bernstein_one():
    """A constant score has no variance, so only the second term is left: 7 · range · ln(4/δ) / (3(T − 1)) a group."""
    play = lambda functional: games.counterfactual_memorization(  # noqa: E731
        lambda datasets, rng: datasets, lambda releases, x: np.full(len(releases), 0.3), uniform_documents(3), 0, 4,
        functional=functional, trials=501, rng=np.random.default_rng(0), confidence=0.9,
    )  # fmt: skip
    for functional in ("replace-one", "leave-one-out"):  # paired differences in [−1, 1]
        assert play(functional).high == -play(functional).low == pytest.approx(7 * 2 * math.log(40) / 1500)
    independent = play("population-conditional")  # two groups, each in [0, 1] and at half the failure probability
    assert independent.high == -independent.low == pytest.approx(2 * 7 * math.log(80) / 1500)


def test_leave_one_out_removes_the_planted_slot_and_nothing_else():
    """Documents 1, …, 6, planted 0: both sides share S_−, so their sums agree on every single trial."""
    documents = lambda shape, rng: np.tile(np.arange(1, 7), (shape[0], 1))  # noqa: E731
    estimate = games.counterfactual_memorization(
        lambda datasets, rng: datasets.sum(axis=1) / 21, read, documents, 0, 6,
        functional="leave-one-out", trials=50, rng=np.random.default_rng(0),
    )  # fmt: skip
    assert estimate.value == estimate.standard_error == 0.0


def test_batches_do_not_change_the_law(monkeypatch):
    """Memory-bounded batches: the same experiment in pieces of seven datasets."""
    monkeypatch.setattr(games, "BATCH", 70)
    staircase = mechanisms.bernoulli_staircase(1.0, 2)
    for functional in games.FUNCTIONALS:
        exact = games.exact_memorization(*games.copy_count_laws(10, 0.1, functional), staircase.mean(np.arange(11)))
        estimate = games.counterfactual_memorization(
            on_count(staircase), read, uniform_documents(10), 0, 10,
            functional=functional, trials=3001, rng=np.random.default_rng(8), confidence=SURE,
        )  # fmt: skip
        assert estimate.trials == 3001 and estimate.low <= exact <= estimate.high


def test_intervals_cover_as_often_as_they_say():
    """800 small experiments at 80%: the misses of a valid interval stay below the binomial tail at 1e-6."""
    staircase = mechanisms.bernoulli_staircase(2.0, 1)
    exact = games.exact_memorization(*games.copy_count_laws(2, 0.5), staircase.mean(np.arange(3)))
    misses, rng = 0, np.random.default_rng(12)
    for _ in range(800):
        e = games.counterfactual_memorization(
            on_count(staircase), read, uniform_documents(2), 0, 2, trials=60, rng=rng, confidence=0.8
        )
        misses += not e.low <= exact <= e.high
    assert misses <= 160 + math.sqrt(800 / 2 * math.log(1e6))


# --- Appendix A ----------------------------------------------------------------------------------------------------


def test_size_bias_at_one_expected_copy():
    """Remark A.3: 0.582 against 0.368, in the Poisson limit and as the limit of finite corpora."""
    conditional, _ = games.poisson_copy_count_laws(1.0, "population-conditional")
    planted, _ = games.poisson_copy_count_laws(1.0)
    assert conditional[1] == pytest.approx(math.exp(-1) / (1 - math.exp(-1)), rel=1e-14)
    assert planted[1] == pytest.approx(math.exp(-1), rel=1e-14)
    assert f"{conditional[1]:.3f} {planted[1]:.3f}" == "0.582 0.368"
    for functional in games.FUNCTIONALS:
        for limit, finite in zip(
            games.poisson_copy_count_laws(1.0, functional), games.copy_count_laws(10**5, 1e-5, functional), strict=True
        ):
            np.testing.assert_allclose(finite[: limit.size], limit, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 1e-12, 0.5, 30.0, 1e4])
def test_poisson_laws_have_their_moments(rate):
    planted, without = games.poisson_copy_count_laws(rate)
    counts = np.arange(without.size)
    assert math.fsum(without) == pytest.approx(1.0, abs=1e-12) and math.fsum(planted) == pytest.approx(1.0, abs=1e-12)
    assert counts @ without == pytest.approx(rate, rel=1e-11, abs=1e-15)
    assert counts @ planted == pytest.approx(1 + rate, rel=1e-11)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("p", [Fraction(1, 1000), Fraction(1, 20), Fraction(1, 3), Fraction(9, 10)])
def test_conditional_gap_is_the_exact_supremum(n, p):
    """All kernels μ in [0, 1]^{n+1}: a linear functional, whose extremes are at 0/1 corners (all 2^{n+1} tried)."""
    pmf = lambda size: [math.comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)]  # noqa: E731
    whole, rest = pmf(n), pmf(n - 1)
    coefficients = []
    for k in range(n + 1):
        conditional = whole[k] / (1 - whole[0]) if k else -Fraction(1)
        coefficients.append(conditional - ((rest[k - 1] if k else 0) - whole[k]))
    assert sum(coefficients) == 0
    values = [
        sum(c for c, on in zip(coefficients, corner, strict=True) if on) for corner in product((0, 1), repeat=n + 1)
    ]
    assert max(values) == -min(values)
    assert games.conditional_gap(n, float(p)) == pytest.approx(float(max(values)), rel=1e-12)


def test_conditional_gap_obeys_the_proposition_and_tends_to_three_halves():
    """Proposition A.2: at most 4np; the chain of the proof has constant 5/2, and the sharp one is 3/2 (− 1/(2n))."""
    for n in (1, 2, 5, 30, 1000, 100_000):
        for load in (1e-9, 1e-4, 0.01, 0.1, 0.3, 0.5):
            gap = games.conditional_gap(n, load / n)
            assert gap <= 1.5 * load * (1 + 1e-12) < 4 * load
            conditional, _ = games.copy_count_laws(n, load / n, "population-conditional")
            planted, whole = games.copy_count_laws(n, load / n)
            t1, t2 = math.fsum(conditional[2:]), math.fsum(planted[2:])
            first, second = games.total_variation(conditional, planted), math.fsum(whole[1:])
            assert first <= t1 + t2 + 1e-15 and t1 + t2 <= (1 + math.e / 2) * (n - 1) * load / n * (1 + 1e-9)
            assert gap <= (first + second) * (1 + 1e-7)
    for n in (2, 10, 100_000):
        assert games.conditional_gap(n, 1e-9 / n) / 1e-9 == pytest.approx(1.5 - 0.5 / n, rel=1e-7)
    assert games.conditional_gap(10**5, 1e-9) / 1e-4 == pytest.approx(1.5, abs=1e-3)
    assert (t := games.copy_count_laws(10**5, 1e-9, "population-conditional")[0][2:].sum()) > 0
    chain = t + games.copy_count_laws(10**5, 1e-9)[0][2:].sum() + games.copy_count_laws(10**5, 1e-9)[1][1:].sum()
    assert chain / 1e-4 == pytest.approx(2.5, abs=1e-2)


def test_the_three_halves_kernel():
    """ERRATA 8's kernel, 1 on a single copy and 0 elsewhere, gives np/2 + np."""
    n, load = 10**4, 1e-6
    kernel = np.eye(1, n + 1, 1)[0]
    conditional = games.exact_memorization(*games.copy_count_laws(n, load / n, "population-conditional"), kernel)
    replaced = games.exact_memorization(*games.copy_count_laws(n, load / n), kernel)
    assert (conditional - replaced) / load == pytest.approx(1.5, abs=1e-3)


@given(st.integers(2, 8), st.integers(0, 2**32))
def test_total_variation_bounds_every_mean(size, seed):
    """Appendix A, (1): Σ g (p − q) ≤ TV, with equality for the best g."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(size, 0.4), size=2)
    distance = games.total_variation(p, q)
    assert games.exact_memorization(p, q, rng.random(size)) <= distance + 1e-12
    assert games.exact_memorization(p, q, (p > q).astype(float)) == pytest.approx(distance, abs=1e-12)
    assert distance == games.total_variation(q, p) <= 1.0 + 1e-12 and games.total_variation(p, p) == 0.0


# --- Extraction ----------------------------------------------------------------------------------------------------


def released(releases, rng):
    return releases


@pytest.mark.parametrize(
    "f", [PureDP(1.0), ApproxDP(0.5, 0.1), GaussianDP(1.0)], ids=["pure", "approximate", "Gaussian"]
)
def test_gadget_sits_on_the_boundary(f):
    N, m = 12, 3
    gadget = mechanisms.subset_release(f, N, m)
    play = lambda seed: games.extraction_game(  # noqa: E731
        np.full(N, 1 / N), gadget.sample, released, m, trials=50_000, rng=np.random.default_rng(seed), confidence=SURE
    )
    estimate = play(0)
    assert estimate.low <= float(f.power(m / N)) <= estimate.high and estimate.low > m / N
    assert play(0) == estimate and play(1) != estimate


def test_posterior_ranking_on_noisy_counts():
    """Section 8.1: the top-4 list on geometric counts against its exact success, played in small batches.

    With independent noise per count, z is listed unless four others beat it; ties split evenly by the random keys.
    """
    N, m, mechanism = 16, 4, mechanisms.geometric_counts(1.0)

    def release(secrets, rng):
        return mechanism.sample((np.arange(N) == secrets).astype(int), rng)

    def protocol(counts, rng):
        return np.argsort(-(counts + rng.random(counts.shape)), axis=1)[:, :m]

    values = np.arange(-60, 61)
    pmf, cdf, planted = mechanism.pmf(values), mechanism.cdf(values), mechanism.pmf(values, 1)
    exact = 0.0
    for above, equal, weight in zip(1.0 - cdf, pmf, planted, strict=True):
        keys, nodes = np.polynomial.legendre.leggauss(20)  # the key of z, integrated out
        beaten = above + equal * (1.0 - (keys + 1.0) / 2.0)
        listed = sum(math.comb(N - 1, j) * beaten**j * (1.0 - beaten) ** (N - 1 - j) for j in range(m))
        exact += weight * float(nodes @ listed) / 2.0
    assert exact == pytest.approx(0.599, abs=1e-3) and exact < PureDP(1.0).power(m / N) - 0.05  # ERRATA 5: 4 bits
    play = lambda: games.extraction_game(  # noqa: E731
        np.full(N, 1 / N),
        release,
        protocol,
        m,
        trials=40_001,
        rng=np.random.default_rng(3),
        confidence=SURE,
        batch=3000,
    )
    assert play().low <= exact <= play().high and play().trials == 40_001 and play() == play()


def test_copies_and_non_uniform_priors_are_the_release_s_business():
    f, prior = PureDP(0.8), np.array([0.5, 0.3, 0.1, 0.06, 0.04])
    release = mechanisms.frontier_release(f, [0.9, 0.7, 0.2, 0.1, 0.1], copies=3)
    for copies in (1, 3):
        estimate = games.extraction_game(
            prior, lambda z, rng, c=copies: release.sample(np.repeat(z, c, axis=1), rng), released, 2,
            trials=50_000, rng=np.random.default_rng(copies), confidence=SURE,
        )  # fmt: skip
        assert estimate.low <= release.extraction(prior, copies) <= estimate.high


def test_list_budget_is_enforced_on_distinct_candidates():
    prior, rng = np.full(6, 1 / 6), np.random.default_rng(0)
    play = lambda lists, m: games.extraction_game(  # noqa: E731
        prior, lambda z, rng: z, lambda releases, rng: np.tile(lists, (len(releases), 1)), m, trials=300, rng=rng
    )
    with pytest.raises(ValueError, match="at most m = 2 distinct candidates, got 3"):
        play([0, 1, 2], 2)
    with pytest.raises(ValueError, match="at most m = 1 distinct candidates, got 2"):
        play([0, -1, 5, 5], 1)
    assert 0 < play([4, 4, -1, 4, -7], 1).value < 1  # repetitions and blanks are free
    assert play([0, 1, 2, 3, 4, 5], 6).value == 1.0
    with pytest.raises(ValueError, match="protocol must return whole numbers"):
        games.extraction_game(prior, lambda z, rng: z, lambda r, rng: r[:, 0], 1, trials=5, rng=rng)


def test_protocol_never_sees_the_secret():
    """A release that ignores its data leaves the oblivious baseline, whatever the protocol does."""
    prior = np.array([0.55, 0.25, 0.1, 0.1])
    estimate = games.extraction_game(
        prior, lambda z, rng: np.zeros((len(z), 1), int), lambda r, rng: np.tile([0, 1], (len(r), 1)), 2,
        trials=50_000, rng=np.random.default_rng(0), confidence=SURE,
    )  # fmt: skip
    assert estimate.low <= 0.8 <= estimate.high


@given(st.floats(0.05, 3.0), st.integers(2, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_best_protocol_obeys_theorem_5_1(epsilon, N, m, seed):
    """Random ε-DP channels (every P_z against one Q) and priors; the bound needs only that order."""
    rng = np.random.default_rng(seed)
    prior, null = rng.dirichlet(np.ones(N)), rng.dirichlet(np.ones(rng.integers(2, 7)))
    laws = []
    for _ in range(N):  # a random vertex of the ε-DP neighbors of the null law: raise outcomes, one after another
        law, room = math.exp(-epsilon) * null, 2 * math.sinh(epsilon) * null
        for outcome in rng.permutation(null.size):
            law[outcome] += min(room[outcome], 1.0 - law.sum())
        laws.append(law)
    kappa = min(1.0, np.sort(prior)[::-1][:m].sum())
    assert games.exact_extraction(prior, laws, m) <= PureDP(epsilon).power(kappa) + 1e-9


def test_best_protocol_by_brute_force():
    """Every assignment of one candidate to each of three outputs."""
    prior, laws = np.array([0.5, 0.3, 0.2]), np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.1, 0.1, 0.8]])
    best = max(sum(prior[z] * laws[z, o] for o, z in enumerate(choice)) for choice in product(range(3), repeat=3))
    assert games.exact_extraction(prior, laws, 1) == pytest.approx(best, abs=1e-15)
    assert games.exact_extraction(prior, laws, 3) == pytest.approx(1.0) == games.exact_extraction(prior, laws, 9)
    gadget = mechanisms.subset_release(PureDP(1.0), 6, 2)
    table = [gadget.law(z) for z in range(6)]
    assert games.exact_extraction(np.full(6, 1 / 6), table, 2) == pytest.approx(gadget.extraction(), abs=1e-12)


# --- Membership ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 7))
def test_measured_membership_advantage_of_noisy_counts(k):
    """Figure 6, left: the held-out best threshold agrees with η*_k, and is below tanh(kε/2) from k = 2 on."""
    mechanism, trials, rng = mechanisms.geometric_counts(1.0), 100_000, np.random.default_rng(k)
    planted = mechanism.sample(np.full(trials, k), rng)
    absent = mechanism.sample(np.zeros(trials, dtype=int), rng)
    estimate = games.membership_advantage(planted, absent, confidence=SURE)
    exact = mechanism.advantage(k)
    assert estimate.low <= exact and abs(estimate.value - exact) <= 5.5 * estimate.standard_error
    assert k == 1 or estimate.high < math.tanh(k / 2) or k == 6
    assert games.membership_advantage(planted, absent, confidence=SURE) == estimate
    flipped = games.membership_advantage(absent, planted, confidence=SURE)  # "present" may also mean small
    assert abs(flipped.value - exact) <= 5.5 * flipped.standard_error


def test_membership_interval_is_two_clopper_pearson_intervals():
    """Perfect separation on 50 held-out scores a side: both rates have the end (failure/4)^{1/50} of their interval."""
    estimate = games.membership_advantage(np.ones(100), np.zeros(100), confidence=0.9)
    assert estimate.value == estimate.high == 1.0 and estimate.trials == 50
    assert estimate.low == pytest.approx(2 * (0.1 / 4) ** (1 / 50) - 1, rel=1e-12)


def test_splitting_removes_the_selection_bias():
    """Two equal laws: the best threshold always looks good on its own sample, never on a fresh one."""
    rng, same, fresh = np.random.default_rng(2), [], []
    for _ in range(300):
        planted, absent = rng.normal(size=(2, 100))
        threshold, above = games.best_threshold(planted, absent)
        same.append(np.mean((planted >= threshold) == above) - np.mean((absent >= threshold) == above))
        fresh.append(games.membership_advantage(planted, absent).value)
    assert min(same) > 0 and np.mean(same) > 0.08
    assert abs(np.mean(fresh)) <= 5.5 * np.std(fresh) / math.sqrt(300) < 0.04


@given(
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=9),
    st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=9),
)
def test_best_threshold_by_trying_all(planted, absent):
    """Ties included: no threshold and direction does better on this sample."""
    threshold, above = games.best_threshold(planted, absent)
    gap = lambda t, a: np.mean((np.array(planted) >= t) == a) - np.mean((np.array(absent) >= t) == a)  # noqa: E731
    best = max(gap(t, a) for t in (-2.0, -1.0, 0.0, 0.5, 2.0, 3.0) for a in (True, False))
    assert gap(threshold, above) == pytest.approx(best, abs=1e-12)


def test_per_instance_calibration():
    """Remark 4.5, Figure 8: randomized response on tanh(ε_x/2), its BSC(0.15) copy on 0.7 of it, none above."""
    rng, trials = np.random.default_rng(6), 4000
    epsilons = np.exp(rng.uniform(math.log(0.05), math.log(4.0), 60))
    for gamma in (0.0, 0.15):
        for epsilon in epsilons:
            response = mechanisms.randomized_response(epsilon).then(mechanisms.binary_symmetric(gamma))
            estimate = games.counterfactual_memorization(
                on_count(response), read, lambda shape, rng: np.ones(shape, dtype=int), 0, 3,
                trials=trials, rng=rng, confidence=1 - 1e-8,
            )  # fmt: skip
            predicted = (1 - 2 * gamma) * math.tanh(epsilon / 2)
            assert estimate.low <= predicted <= estimate.high
            assert abs(estimate.value - predicted) <= 6 * estimate.standard_error


def test_bad_input_is_named():
    rng, half = np.random.default_rng(0), [0.5, 0.5]
    play = lambda **keywords: games.counterfactual_memorization(  # noqa: E731
        on_count(mechanisms.randomized_response(1.0)), read, uniform_documents(2), 0,
        **({"n": 2, "trials": 10, "rng": rng} | keywords),
    )  # fmt: skip
    for match, call in [
        ("functional must be one of", lambda: play(functional="ro")),
        ("n must be", lambda: play(n=0)),
        ("trials must be", lambda: play(trials=1)),
        ("confidence must lie", lambda: play(confidence=1.0)),
        ("score_range must lie", lambda: play(score_range=(1.0, 0.0))),
        ("prior must sum", lambda: games.extraction_game([0.5, 0.6], None, None, 1, trials=1, rng=rng)),
        ("m must be", lambda: games.extraction_game(half, None, None, 0, trials=1, rng=rng)),
        ("planted must be a vector", lambda: games.membership_advantage([1.0], [1.0, 2.0])),
        ("absent must lie", lambda: games.membership_advantage([1.0, 2.0], [1.0, math.nan])),
        ("q must have as many", lambda: games.total_variation([1.0], half)),
        ("score must have one value", lambda: games.exact_memorization(half, half, [1.0])),
        ("laws must have one row", lambda: games.exact_extraction(half, [half], 1)),
        (r"laws\[1\] must sum", lambda: games.exact_extraction(half, [half, [0.5, 0.4]], 1)),
        ("mass must lie", lambda: games.copy_count_laws(3, 1.5)),
        ("n must be", lambda: games.copy_count_laws(0, 0.5)),
        ("rate must lie", lambda: games.poisson_copy_count_laws(-1.0)),
        ("rate must lie", lambda: games.poisson_copy_count_laws(0.0, "population-conditional")),
        ("functional must be one of", lambda: games.copy_count_laws(3, 0.5, "conditional")),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
