"""Mechanisms against brute force: rational arithmetic, every small dataset, linear programs, and their own samplers."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, combinations_with_replacement, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.optimize import linprog

from memorization import bounds, mechanisms
from memorization._subsets import UniformSubsets
from memorization.tradeoff import ApproxDP, GaussianDP, PiecewiseLinear, PureDP, from_distributions

settings.register_profile("mechanisms", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("mechanisms")

FAILURE = 1e-6  # chance that a correct sampler fails one test
CURVES = {
    "pure": PureDP(0.7),
    "pure large": PureDP(6.0),
    "approximate": ApproxDP(0.5, 0.1),
    "Gaussian": GaussianDP(1.3),
    "perfect": PureDP(0.0),
    "knots": PiecewiseLinear([0.0, 0.1, 0.25, 0.6, 1.0], [1.0, 0.6, 0.25, 0.05, 0.0]).symmetrize(),
    "failing": ApproxDP(0.3, 1.0),
}
CANONICAL = {"pure": PureDP(1.0), "approximate": ApproxDP(0.5, 0.2), "Gaussian": GaussianDP(0.8)}
canonical = pytest.mark.parametrize("f", CANONICAL.values(), ids=CANONICAL.keys())
curves = pytest.mark.parametrize("f", CURVES.values(), ids=CURVES.keys())


def vertices(p, q):
    """Level and type-II error of every likelihood-ratio test of H0: p against H1: q, by sorting (any number type)."""
    order = sorted(
        (i for i in range(len(p)) if p[i] > 0 or q[i] > 0), key=lambda i: -(q[i] / p[i] if p[i] else math.inf)
    )
    level, error = p[0] * 0, q[0] * 0 + 1
    points = [(level, error)]
    for i in order:
        level, error = level + p[i], error - q[i]
        points.append((level, error))
    return points


def dominates(p, q, f, tolerance=1e-12):
    """T(p, q) ≥ f. Between vertices T is a chord, and f lies below its own chords, so the vertices decide."""
    points = np.array([(float(a), float(b)) for a, b in vertices(p, q)]).clip(0.0, 1.0)
    return bool((points[:, 1] >= f(points[:, 0]) - tolerance).all())


def both_orders(p, q, f, tolerance=1e-12):
    return dominates(p, q, f, tolerance) and dominates(q, p, f, tolerance)


def frequencies_agree(observed, law, trials, failure=FAILURE):
    """Hoeffding with a union bound over the outcomes."""
    radius = math.sqrt(math.log(2 * len(law) / failure) / (2 * trials))
    return bool(np.abs(np.asarray(observed) / trials - law).max() <= radius)


# --- Count mechanisms ----------------------------------------------------------------------------------------------


@given(st.floats(0.0, 50.0))
def test_randomized_response_is_private_and_tight(epsilon):
    channel = mechanisms.randomized_response(epsilon)
    (a, b), (c, d) = channel.laws
    assert a == d and b == c and a + b == pytest.approx(1.0, abs=1e-15)
    assert a / b == pytest.approx(math.exp(epsilon), rel=1e-12)
    assert channel.advantage() == pytest.approx(math.tanh(epsilon / 2), rel=1e-12, abs=1e-16)
    assert channel.mean(7) == channel.mean(1) and channel.mean(True) == channel.mean(1)


@given(st.floats(0.0, 8.0), st.floats(0.0, 1.0))
def test_randomized_response_through_a_binary_symmetric_channel(epsilon, gamma):
    """Remark 4.5 and Figure 8: the predicted curve, by enumerating the two flips."""
    channel = mechanisms.randomized_response(epsilon).then(mechanisms.binary_symmetric(gamma))
    keep = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    one = [sum(w * v for w, u in ((keep, bit), (1 - keep, 1 - bit)) for v, t in ((1 - gamma, u), (gamma, 1 - u)) if t)
           for bit in (0, 1)]  # fmt: skip
    assert channel.mean([0, 1]) == pytest.approx(one, abs=1e-14)
    assert one[1] - one[0] == pytest.approx((1 - 2 * gamma) * math.tanh(epsilon / 2), abs=1e-13)
    assert channel.advantage() <= math.tanh(epsilon / 2) + 1e-15


def test_unbounded_log_loss_has_no_cap_and_truncation_pays_linearly():
    """Appendix B.4: the release p(1 | c) = t or s."""
    epsilon, t = 1.0, 0.9
    response = mechanisms.randomized_response(epsilon)
    for s in (0.1, 1e-10, 1e-300):
        loss = response.then(np.eye(2), outputs=[-math.log(s), -math.log(t)])
        assert loss.mean(0) - loss.mean(1) == pytest.approx(math.tanh(0.5) * (math.log(t) - math.log(s)), rel=1e-12)
    capped = response.then(np.eye(2), outputs=[10.0, 0.0])  # s below e^−10, t = 1, loss truncated at M = 10
    assert capped.mean(0) - capped.mean(1) == pytest.approx(10.0 * math.tanh(0.5), rel=1e-12)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_post_processing_cannot_lower_the_curve(outputs, released, seed):
    """Lemma B.5 on random pairs and kernels."""
    rng = np.random.default_rng(seed)
    pair, kernel = rng.dirichlet(np.ones(outputs), size=2), rng.dirichlet(np.full(released, 0.5), size=outputs)
    channel = mechanisms.CountMechanism(pair, np.arange(outputs, dtype=float))
    after = channel.then(kernel)
    assert dominates(*after.laws, from_distributions(*pair), 1e-10)
    assert after.advantage() <= channel.advantage() + 1e-12


def rational_orbit(e, k):
    """Lemma 4.4's orbit for e^ε = `e` and odd k, or the one through 1/2 for even k, in exact arithmetic."""
    half = Fraction(1, 2) if k % 2 == 0 else Fraction(1) / (e + 1)
    orbit = [half / e ** (k // 2)]
    for _ in range(k):
        orbit.append(min(e * orbit[-1], 1 - (1 - orbit[-1]) / e))
    return orbit


def closed_form(e, k):
    r = 1 / e
    return 1 - r ** (k // 2) if k % 2 == 0 else 1 - 2 * r ** ((k + 1) // 2) / (1 + r)


@pytest.mark.parametrize("e", [Fraction(101, 100), Fraction(2), Fraction(7, 2), Fraction(1000)])
@pytest.mark.parametrize("k", range(1, 10))
def test_staircase_is_the_exact_orbit(e, k):
    """Orbit, privacy on every pair of copy counts, and the constant, all rational."""
    orbit = rational_orbit(e, k)
    assert orbit[-1] - orbit[0] == closed_form(e, k)
    for i, j in permutations(range(k + 1), 2):
        reach = e ** abs(i - j)
        assert orbit[i] <= reach * orbit[j] and 1 - orbit[i] <= reach * (1 - orbit[j])
    staircase = mechanisms.bernoulli_staircase(math.log(e), k)
    exact = np.array([(float(1 - b), float(b)) for b in orbit])
    np.testing.assert_allclose(staircase.laws, exact, rtol=1e-13)
    assert staircase.advantage(k) == pytest.approx(float(closed_form(e, k)), rel=1e-12)
    assert (staircase.law(k + 5) == staircase.law(k)).all()


@given(st.floats(1e-8, 50.0) | st.sampled_from([1e-8, 50.0]), st.integers(1, 27))
def test_staircase_is_private_at_every_scale(epsilon, k):
    """All four ratios; at kε = 1,350 the start e^{−kε/2} is still a float."""
    laws = mechanisms.bernoulli_staircase(epsilon, k).laws
    steps = np.abs(np.diff(np.log(laws), axis=0))
    assert steps.max() <= epsilon * (1 + 1e-9) + 1e-14
    assert (laws > 0).all() and np.abs(laws.sum(axis=1) - 1).max() <= 2e-16


@given(st.floats(1e-8, 50.0), st.integers(1, 30))
def test_staircase_geometric_and_bounds_agree(epsilon, k):
    constant = bounds.k_copy_advantage(epsilon, k)
    assert mechanisms.geometric_counts(epsilon).advantage(k) == pytest.approx(constant, rel=1e-12)
    assert mechanisms.bernoulli_staircase(epsilon, k).advantage(k) == pytest.approx(constant, rel=1e-12, abs=1e-15)
    assert mechanisms.laplace_advantage(epsilon, k) <= constant * (1 + 1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_no_private_chain_climbs_higher(k):
    """A linear program over ε-DP Bernoulli chains of k steps (Corollary 4.3)."""
    e = math.e
    rows = []
    for i in range(k):
        for low, high in ((i, i + 1), (i + 1, i)):
            ones, zeros = np.zeros(k + 1), np.zeros(k + 1)
            ones[high], ones[low] = 1.0, -e  # b_high ≤ e b_low
            zeros[high], zeros[low] = -1.0, e  # 1 − b_high ≤ e (1 − b_low)
            rows += [(ones, 0.0), (zeros, e - 1.0)]
    climb = np.zeros(k + 1)
    climb[0], climb[k] = 1.0, -1.0
    best = -linprog(climb, [row for row, _ in rows], [bound for _, bound in rows], bounds=(0, 1)).fun
    assert mechanisms.bernoulli_staircase(1.0, k).advantage(k) == pytest.approx(best, abs=1e-9)


def test_all_copies_bit_is_not_private():
    """Appendix B.5: one record flips the bit "all k copies are there", which then has the kε curve."""
    epsilon, k = 1.0, 3
    bit = mechanisms.randomized_response(k * epsilon)
    laws = np.array([bit.laws[0]] * k + [bit.laws[1]])
    assert not both_orders(laws[k - 1], laws[k], PureDP(epsilon))
    assert both_orders(laws[k - 1], laws[k], PureDP(k * epsilon))


def test_publishing_the_bias_itself_is_not_private():
    """The released number must be the bit: distinct biases are distinct outputs, and tell counts apart for sure."""
    biases = mechanisms.bernoulli_staircase(1.0, 3).laws[:, 1]
    assert len(set(biases)) == 4
    published = mechanisms.CountMechanism(np.eye(4), biases)
    assert published.advantage(1) == 1.0 > math.tanh(0.5)


@pytest.mark.parametrize("e", [Fraction(3, 2), Fraction(3), Fraction(20)])
@pytest.mark.parametrize("k", range(1, 9))
def test_geometric_shift_in_rational_arithmetic(e, k):
    """Total variation of the law and its shift: finite middle by enumeration, tails as geometric series."""
    r = 1 / e
    pmf = lambda j: (1 - r) / (1 + r) * r ** abs(j)  # noqa: E731
    middle = sum(max(Fraction(0), pmf(j - k) - pmf(j)) for j in range(0, k))
    beyond = (pmf(0) - pmf(k)) / (1 - r)  # Σ_{j ≥ k} pmf(j−k) − pmf(j)
    assert middle + beyond == closed_form(e, k)
    mechanism = mechanisms.geometric_counts(math.log(e))
    assert mechanism.advantage(k) == pytest.approx(float(middle + beyond), rel=1e-13)
    t = mechanism.threshold(k)
    assert pmf(t - k) > pmf(t) and pmf(t - 1 - k) <= pmf(t - 1)  # likelihood ratio crosses one at the threshold
    values = np.arange(-6, 7)
    np.testing.assert_allclose(mechanism.pmf(values, 2), [float(pmf(int(j) - 2)) for j in values], rtol=1e-12)
    tail = [float(pmf(j) / (1 - r) if j <= 0 else 1 - pmf(j + 1) / (1 - r)) for j in range(-6, 7)]
    np.testing.assert_allclose(mechanism.cdf(values), tail, rtol=1e-13)
    assert mechanism.cdf(1.5) == mechanism.cdf(1) and mechanism.cdf(4, 3) == mechanism.cdf(1)


@given(st.floats(1e-8, 50.0), st.integers(-40, 40), st.integers(0, 20))
def test_geometric_is_private_pointwise(epsilon, value, count):
    mechanism = mechanisms.geometric_counts(epsilon)
    here, there = mechanism.pmf(value, count), mechanism.pmf(value, count + 1)
    if here > 1e-290 and there > 1e-290:
        assert abs(math.log(here / there)) <= epsilon * (1 + 1e-12) + 1e-13


def test_laplace_meets_the_constant_at_even_k_only():
    epsilon = 0.8
    x = np.linspace(-60.0, 60.0, 600_001)
    density = lambda shift: epsilon / 2 * np.exp(-epsilon * np.abs(x - shift))  # noqa: E731
    for k in range(1, 7):
        integral = trapezoid(np.abs(density(k) - density(0)), x) / 2
        assert mechanisms.laplace_advantage(epsilon, k) == pytest.approx(integral, abs=1e-6)
        gap = bounds.k_copy_advantage(epsilon, k) - mechanisms.laplace_advantage(epsilon, k)
        assert (gap > 1e-3) if k % 2 else (abs(gap) < 1e-14)


@curves
def test_tight_canary_attains_the_advantage_of_any_curve(f):
    canary = mechanisms.tight_canary(f)
    assert both_orders(*canary.laws, f)
    assert canary.advantage() == pytest.approx(f.advantage(), abs=1e-12)
    assert canary.mean(1) - canary.mean(0) == pytest.approx(f.advantage(), abs=1e-12)


@canonical
@pytest.mark.parametrize("k", [2, 3, 4])
def test_tight_canary_climbs_the_group_curve(f, k):
    canary = mechanisms.tight_canary(f, copies=k)
    for i in range(k):
        assert both_orders(canary.laws[i], canary.laws[i + 1], f)
    grid = np.linspace(0.0, 1.0, 20_001)
    climbed = grid
    for _ in range(k):
        climbed = f.power(climbed)
    assert canary.advantage(k) == pytest.approx(f.group(k).advantage(), abs=1e-9)
    assert (climbed - grid).max() - 1e-9 <= canary.advantage(k) <= (climbed - grid).max() + 1e-4


@curves
def test_attaining_draw(f):
    """Lemma B.4: members follow F, non-members the uniform law (Dvoretzky–Kiefer–Wolfowitz)."""
    trials, rng = 100_000, np.random.default_rng(4)
    member = np.arange(2 * trials) < trials
    w = mechanisms.attaining_draw(f, member, rng)
    radius = math.sqrt(math.log(2 / (FAILURE / 2)) / (2 * trials))
    levels = np.linspace(0.0, 1.0, 401)
    for draws, cdf in ((w[member], f.power(levels)), (w[~member], levels)):
        assert np.abs(np.searchsorted(np.sort(draws), levels, side="right") / trials - cdf).max() <= radius


def test_count_samplers_follow_their_laws_and_their_seed():
    trials = 200_000
    for mechanism in (
        mechanisms.randomized_response(0.5),
        mechanisms.bernoulli_staircase(1.0, 3),
        mechanisms.CountMechanism(np.array([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]]), np.array([-1.0, 0.5, 4.0])),
    ):
        for count in range(3):
            drawn = mechanism.sample(np.full(trials, count), np.random.default_rng(count))
            assert (drawn == mechanism.sample(np.full(trials, count), np.random.default_rng(count))).all()
            observed = [(drawn == output).sum() for output in mechanism.outputs]
            assert sum(observed) == trials and frequencies_agree(observed, mechanism.law(count), trials)
    geometric = mechanisms.geometric_counts(0.6)
    drawn = geometric.sample(np.full((2, trials // 2), 3), np.random.default_rng(1)).ravel()
    assert (drawn.reshape(2, -1) == geometric.sample(np.full((2, trials // 2), 3), np.random.default_rng(1))).all()
    values = np.arange(-30, 37)
    assert frequencies_agree([(drawn == v).sum() for v in values], geometric.pmf(values, 3), trials)
    assert geometric.sample(5, np.random.default_rng(0)).shape == ()


# --- Subset mechanisms ---------------------------------------------------------------------------------------------


def rational_gadget(e, N, m, a):
    """Lemma 5.2 word for word: all subsets, U, the laws U given z, and P_z = a U_{∋z} + (1 − a) U."""
    subsets = list(combinations(range(N), m))
    uniform = [Fraction(1, len(subsets))] * len(subsets)
    holding = [[Fraction(z in c, math.comb(N - 1, m - 1)) for c in subsets] for z in range(N)]
    return subsets, uniform, [[a * h + (1 - a) * u for h, u in zip(row, uniform, strict=True)] for row in holding]


@pytest.mark.parametrize("e", [Fraction(1), Fraction(2), Fraction(50)])
@pytest.mark.parametrize(("N", "m"), [(2, 1), (3, 2), (5, 2), (6, 1), (6, 5)])
def test_gadget_matches_rational_enumeration(e, N, m):
    """Mixing weight, the two likelihood ratios, both vertices, and Ext = F(κ), for pure DP with e^ε rational."""
    kappa = Fraction(m, N)
    power = min(e * kappa, 1 - (1 - kappa) / e)
    a = (power - kappa) / (1 - kappa)
    assert 0 <= a <= 1
    subsets, uniform, laws = rational_gadget(e, N, m, a)
    gadget = mechanisms.subset_release(PureDP(math.log(e)), N, m)
    assert [tuple(c) for c in gadget.subsets()] == subsets
    assert gadget.mixing_weight() == pytest.approx(float(a), abs=1e-14)
    assert gadget.extraction() == pytest.approx(float(power), rel=1e-14)
    np.testing.assert_allclose(gadget.law(), [float(u) for u in uniform], rtol=1e-14)
    for z, law in enumerate(laws):
        assert sum(p for p, c in zip(law, subsets, strict=True) if z in c) == power
        assert {p / u for p, u in zip(law, uniform, strict=True)} <= {a / kappa + 1 - a, 1 - a}
        assert (kappa, 1 - power) in vertices(uniform, law)
        assert (1 - power, kappa) in vertices(law, uniform)  # in the power plane (f(κ), 1 − κ)
        np.testing.assert_allclose(gadget.law(z), [float(p) for p in law], rtol=1e-12)


def neighbors(N, most, outside):
    """Every multiset of at most `most` prefix-c documents (secrets in or outside the support), with one more added."""
    documents = [*range(N), *outside]
    for size in range(most):
        for dataset in combinations_with_replacement(documents, size):
            for extra in documents:
                yield [*dataset], [*dataset, extra]


def subset_mechanisms(f):
    yield mechanisms.subset_release(f, 3, 1)
    yield mechanisms.subset_release(f, 3, 2)
    yield mechanisms.subset_release(f, 3, 1, copies=1)
    yield mechanisms.subset_release(f, 3, 2, copies=3)
    yield mechanisms.frontier_release(f, [0.7, 0.25, 0.05])
    yield mechanisms.frontier_release(f, [1.0, 0.6, 0.4])
    yield mechanisms.frontier_release(f, [1.0, 0.0, 0.0])
    yield mechanisms.frontier_release(f, [0.9, 0.1, 0.0], copies=2)


@curves
def test_subset_mechanisms_are_private_on_every_pair_of_datasets(f):
    """f-DP under add/remove, both orders, on all datasets of up to four prefix-c documents, strangers included."""
    seen = set()
    for mechanism in subset_mechanisms(f):
        for smaller, larger in neighbors(3, 4, outside=(3, 8)):
            pair = mechanism.law_given(smaller), mechanism.law_given(larger)
            key = pair[0].tobytes() + pair[1].tobytes()
            if key in seen or np.array_equal(*pair):
                continue
            seen.add(key)
            assert both_orders(*pair, f), (mechanism.rule, smaller, larger)
    assert len(seen) >= 30 or f.advantage() == 0.0


def test_private_pairs_by_the_exact_curve_of_the_package():
    """The same through `from_distributions`, at all of its knots and at f's own breakpoint."""
    f = PureDP(0.7)
    for mechanism in subset_mechanisms(f):
        for smaller, larger in neighbors(3, 2, outside=(3,)):
            p, q = mechanism.law_given(smaller), mechanism.law_given(larger)
            for curve in (from_distributions(p, q), from_distributions(q, p)):
                levels = np.concatenate([curve.alpha, [f.advantage_level()]])
                assert (curve(levels) >= f(levels) - 1e-12).all()


def test_the_paper_rule_would_fail_without_passing_through_the_uniform_law():
    """Why one document alone may drive: two secrets facing each other are not f-DP, only f^{(2)}-DP."""
    gadget = mechanisms.subset_release(PureDP(1.0), 4, 2)
    assert not both_orders(gadget.law(0), gadget.law(1), PureDP(1.0))
    assert both_orders(gadget.law(0), gadget.law(1), PureDP(1.0).group(2))


def reference_driver(dataset, N, levels, rule):
    documents = [s for s in dataset if s >= 0]
    if rule == "single":
        driving = documents if len(documents) == 1 and documents[0] < N else []
        return (driving[0], 1) if driving else (0, 0)
    for secret, count in Counter(documents).items():
        margin = count - (len(documents) - count)
        if margin > 0 and secret < N:
            return secret, min(margin, levels)
    return 0, 0


@given(st.lists(st.lists(st.integers(-2, 5), min_size=5, max_size=5), min_size=1, max_size=6), st.integers(1, 3))
def test_driver_by_counting(datasets, copies):
    """In any order, with blanks, the vectorized rule is the strict-majority rule."""
    for rule, k in (("single", None), ("margin", copies)):
        mechanism = mechanisms.subset_release(PureDP(1.0), 4, 2, copies=k)
        assert mechanism.rule == rule
        driver, level = mechanism.driver(datasets)
        assert list(zip(driver, level, strict=True)) == [reference_driver(d, 4, copies, rule) for d in datasets]


@curves
@pytest.mark.parametrize("k", [1, 2, 4])
def test_margin_gadget_reaches_the_group_bound(f, k):
    """Beyond the paper: k copies planted give F^{∘k}(κ); further copies give no more."""
    gadget = mechanisms.subset_release(f, 7, 2, copies=k)
    expected = 2 / 7
    for _ in range(k):
        expected = float(f.power(expected))
    assert gadget.extraction(copies=k) == pytest.approx(expected, abs=1e-12)
    assert gadget.extraction(copies=k + 3) == gadget.extraction(copies=k)
    assert gadget.extraction(copies=0) == pytest.approx(2 / 7)
    single = mechanisms.subset_release(f, 7, 2)
    assert single.extraction(copies=2) == pytest.approx(2 / 7)  # the paper's rule reads two copies as none


@curves
def test_gadget_value_and_bound_across_supports(f):
    for N, m in ((2, 1), (3, 1), (10, 4), (1000, 3), (10**5, 1)):
        gadget = mechanisms.subset_release(f, N, m)
        assert 0.0 <= gadget.mixing_weight().min() <= gadget.mixing_weight().max() <= 1.0
        assert gadget.extraction() == pytest.approx(bounds.extraction_bound(f, m / N), rel=1e-11)


@given(st.floats(1e-8, 50.0) | st.sampled_from([1e-8, 50.0]), st.integers(2, 8), st.data())
def test_subset_laws_keep_every_ratio_at_every_scale(epsilon, N, data):
    """Pointwise ε-DP of (P_z, Q), nothing lost to rounding, and both likelihood ratios of Appendix C.3."""
    m = data.draw(st.integers(1, N - 1))
    for mechanism in (mechanisms.subset_release(PureDP(epsilon), N, m), mechanisms.subset_selection(epsilon, N, m)):
        planted, null = mechanism.law(N - 1), mechanism.law()
        assert planted.min() > 0.0 and math.fsum(planted) == pytest.approx(1.0, abs=1e-14)
        assert np.abs(np.log(planted / null)).max() <= epsilon * (1 + 1e-7) + 1e-14
        held = (mechanism.subsets() == N - 1).any(axis=1)
        a = mechanism.mixing_weight()[N - 1]
        np.testing.assert_allclose((planted / null)[held], a * N / m + 1 - a, rtol=1e-12)
        np.testing.assert_allclose((planted / null)[~held], mechanism.exclusion[1, 0] * N / (N - m), rtol=1e-12)


def test_degenerate_risk_level_no_entropy_helps():
    """Remark C.6: success tends to F(0) = δ as the support grows."""
    values = [mechanisms.subset_release(ApproxDP(1.0, 0.1), N, 1).extraction() for N in (10, 100, 10_000)]
    assert values[0] > values[1] > values[2] > 0.1 and values[2] == pytest.approx(0.1, abs=3e-4)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1.0, 50.0])
def test_half_budget_gadget_under_replacement(epsilon):
    """Remark C.5: the f_{ε/2} gadget satisfies ε-DP between two secrets, and reaches 1 − f_{ε/2}(κ)."""
    for N in range(2, 7):
        for m in range(1, N):
            gadget = mechanisms.subset_release(PureDP(epsilon / 2), N, m)
            laws = [gadget.law(), *(gadget.law(z) for z in range(N))]
            assert all(np.abs(np.log(p) - np.log(q)).max() <= epsilon * (1 + 1e-12) + 1e-12 for p in laws for q in laws)
            assert gadget.extraction() == pytest.approx(float(PureDP(epsilon / 2).power(m / N)), rel=1e-12)


@pytest.mark.parametrize("e", [Fraction(1), Fraction(3), Fraction(200)])
@pytest.mark.parametrize(("N", "m"), [(2, 1), (4, 2), (5, 4), (6, 2)])
def test_subset_selection_in_rational_arithmetic(e, N, m):
    subsets = list(combinations(range(N), m))
    weights = [[e if z in c else Fraction(1) for c in subsets] for z in range(N)]
    kappa = Fraction(m, N)
    mechanism = mechanisms.subset_selection(math.log(e), N, m)
    uniform = [Fraction(1, len(subsets))] * len(subsets)
    laws = [[w / sum(row) for w in row] for row in weights]
    for z, law in enumerate(laws):
        np.testing.assert_allclose(mechanism.law(z), [float(p) for p in law], rtol=1e-12)
        for other in [*laws, uniform]:  # ε-DP against every other secret, and against the uniform law
            assert all(p <= e * q and q <= e * p for p, q in zip(law, other, strict=True))
    value = e * kappa / (1 - kappa + e * kappa)
    assert mechanism.extraction() == pytest.approx(float(value), rel=1e-13)
    assert bounds.replace_extraction_bound(math.log(e), float(kappa)) == pytest.approx(float(value), rel=1e-12)


def best_extraction(prior, m, epsilon, adjacency):
    """Largest Ext over all ε-DP algorithms, by linear programming over (Q, P_1, …, P_N) on m-subsets."""
    N = len(prior)
    subsets = list(combinations(range(N), m))
    size, laws = len(subsets), N + 1  # law 0 is Q
    if adjacency == "add-remove":
        pairs = [(0, z) for z in range(1, laws)] + [(z, 0) for z in range(1, laws)]
    else:
        pairs = list(permutations(range(1, laws), 2))
    rows, width = [], laws * size
    for first, second in pairs:  # first ≤ e^ε second
        for c in range(size):
            row = np.zeros(width)
            row[first * size + c], row[second * size + c] = 1.0, -math.exp(epsilon)
            rows.append(row)
    objective = np.zeros(width)
    for z in range(N):
        for c, subset in enumerate(subsets):
            objective[(z + 1) * size + c] = -prior[z] * (z in subset)
    total = np.kron(np.eye(laws), np.ones(size))
    return -linprog(objective, np.array(rows), np.zeros(len(rows)), total, np.ones(laws), bounds=(0, 1)).fun


@pytest.mark.parametrize("prior", [[0.25] * 4, [0.6, 0.2, 0.15, 0.05], [0.9, 0.06, 0.04, 0.0], [0.4, 0.3, 0.3, 0.0]])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_frontier_release_attains_the_linear_program(prior, m):
    """Beyond the paper: water-filled marginals plus systematic sampling meet the exact optimum over all algorithms."""
    f = PureDP(0.9)
    q = bounds.extraction_frontier(f, prior, m).inclusion
    mechanism = mechanisms.frontier_release(f, q)
    assert mechanism.extraction(prior) == pytest.approx(best_extraction(prior, m, 0.9, "add-remove"), abs=1e-8)


@pytest.mark.parametrize(("N", "m"), [(3, 1), (4, 2), (5, 2)])
def test_subset_selection_attains_the_linear_program_under_replacement(N, m):
    best = best_extraction([1.0 / N] * N, m, 1.1, "replace-one")
    assert mechanisms.subset_selection(1.1, N, m).extraction() == pytest.approx(best, abs=1e-8)


@st.composite
def marginals(draw):
    """Inclusion probabilities that sum to a whole number, with zeros, ones and tiny entries among them."""
    m = draw(st.integers(1, 5))
    fixed = draw(st.integers(0, m - 1))
    zeros = draw(st.integers(0, 3))
    raw = np.array(draw(st.lists(st.floats(1e-9, 1.0), min_size=m - fixed + 1, max_size=12)))
    free = m - fixed
    low, high = 0.0, 1e12  # scale so that Σ min(1, s·raw) = free, by bisection
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1.0, middle * raw).sum() < free else (low, middle)
    q = np.concatenate([np.ones(fixed), np.zeros(zeros), np.minimum(1.0, high * raw)])
    return q[draw(st.permutations(range(q.size)))], m


@given(marginals())
def test_systematic_sampling_has_the_marginals_asked_for(case):
    q, m = case
    mechanism = mechanisms.frontier_release(ApproxDP(0.5, 0.1), q)
    subsets, law = mechanism.subsets(), mechanism.law()
    assert mechanism.m == m and (np.diff(subsets, axis=1) > 0).all() and law.min() >= 0.0
    assert law.sum() == pytest.approx(1.0, abs=1e-12)
    listed = np.array([law[(subsets == z).any(axis=1)].sum() for z in range(q.size)])
    np.testing.assert_allclose(listed, q, atol=1e-12)
    for z in range(q.size):
        planted = mechanism.law(z)
        assert planted.sum() == pytest.approx(1.0, abs=1e-12)
        held = planted[(subsets == z).any(axis=1)].sum()
        assert held == pytest.approx(float(ApproxDP(0.5, 0.1).power(q[z])), abs=1e-12)
    rng = np.random.default_rng(0)
    for z in np.flatnonzero((q > 1e-6) & (q < 1 - 1e-6)):
        for held in (True, False):
            given = mechanism.base.sample_given(np.full(200, z), held, rng)
            assert ((given == z).any(axis=1) == held).all()
            assert (np.diff(np.sort(given, axis=1), axis=1) > 0).all()


def sampled_mechanisms():
    f = PureDP(0.7)
    yield mechanisms.subset_release(f, 5, 2), [[2], [-1], [9]]
    yield mechanisms.subset_release(f, 5, 4), [[0]]
    yield mechanisms.subset_release(f, 4, 1, copies=2), [[3, 3, 3, 1, -1], [3, 3, 1, 1, 7]]
    yield mechanisms.subset_selection(2.0, 6, 3), [[5]]
    yield mechanisms.frontier_release(ApproxDP(0.5, 0.2), [0.9, 0.6, 0.0, 0.5, 1.0]), [[0], [2], [4], [-3]]


def test_subset_samplers_follow_their_laws_and_their_seed():
    trials = 100_000
    for mechanism, datasets in sampled_mechanisms():
        subsets = [tuple(c) for c in mechanism.subsets()]
        for dataset in datasets:
            secrets = np.tile(dataset, (trials, 1))
            drawn = mechanism.sample(secrets, np.random.default_rng(11))
            assert (drawn == mechanism.sample(secrets, np.random.default_rng(11))).all()
            found, counts = np.unique(drawn, axis=0, return_counts=True)
            observed = dict(zip(map(tuple, found), counts, strict=True))
            assert set(observed) <= set(subsets)
            assert frequencies_agree([observed.get(c, 0) for c in subsets], mechanism.law_given(dataset), trials)


def test_subset_release_samples_large_supports():
    N, m, trials = 2**40, 8, 50_000
    gadget_law = float(PureDP(3.0).power(m / 1000))
    gadget = mechanisms.subset_release(PureDP(3.0), 1000, m)
    rng = np.random.default_rng(5)
    z = rng.integers(1000, size=trials)
    lists = gadget.sample(z[:, None], rng)
    assert (np.diff(lists, axis=1) > 0).all() and lists.min() >= 0 and lists.max() < 1000
    radius = math.sqrt(math.log(2 / FAILURE) / (2 * trials))
    assert abs((lists == z[:, None]).any(axis=1).mean() - gadget_law) <= radius
    huge = UniformSubsets(N, m).sample(1000, rng)
    assert len(np.unique(huge)) > 7990 and huge.max() < N  # about no collisions among 8,000 draws from 2^40


def test_bad_input_is_named():
    f = PureDP(1.0)
    lopsided = PiecewiseLinear([0.0, 0.2, 1.0], [0.9, 0.2, 0.0])
    rng = np.random.default_rng(0)
    for match, call in [
        ("m must lie", lambda: mechanisms.subset_release(f, 4, 4)),
        ("m must lie", lambda: mechanisms.subset_selection(1.0, 3, 5)),
        ("m must be", lambda: mechanisms.subset_release(f, 4, 0)),
        ("N must be", lambda: mechanisms.subset_release(f, 1, 1)),
        ("copies must be", lambda: mechanisms.subset_release(f, 4, 2, copies=0)),
        ("f must be symmetric", lambda: mechanisms.subset_release(lopsided, 4, 2)),
        ("f must be symmetric", lambda: mechanisms.tight_canary(lopsided)),
        ("epsilon must lie", lambda: mechanisms.subset_selection(-1.0, 4, 2)),
        ("epsilon must lie", lambda: mechanisms.geometric_counts(0.0)),
        ("epsilon must lie", lambda: mechanisms.bernoulli_staircase(math.nan, 2)),
        ("epsilon must lie", lambda: mechanisms.randomized_response(math.inf)),
        ("epsilon must be at least 1e-15", lambda: mechanisms.geometric_counts(1e-16).sample(0, rng)),
        ("k must be", lambda: mechanisms.bernoulli_staircase(1.0, 0)),
        ("gamma must lie", lambda: mechanisms.binary_symmetric(1.5)),
        ("kernel must have 2 rows", lambda: mechanisms.randomized_response(1.0).then(np.eye(3))),
        ("kernel must have rows that sum", lambda: mechanisms.randomized_response(1.0).then([[0.5, 0.4], [0, 1]])),
        ("counts must be whole", lambda: mechanisms.randomized_response(1.0).sample([0.5], rng)),
        ("counts must be at least 0", lambda: mechanisms.geometric_counts(1.0).pmf(0, -1)),
        ("inclusion must sum", lambda: mechanisms.frontier_release(f, [0.5, 0.6])),
        ("inclusion must sum", lambda: mechanisms.frontier_release(f, [1.0, 1.0])),
        ("inclusion must lie", lambda: mechanisms.frontier_release(f, [1.5, -0.5])),
        ("inclusion must be a vector", lambda: mechanisms.frontier_release(f, [1.0])),
        ("secrets must be", lambda: mechanisms.subset_release(f, 4, 2).sample([1, 2], rng)),
        ("secrets must be", lambda: mechanisms.subset_release(f, 4, 2).sample([[1.0]], rng)),
        ("secret must be", lambda: mechanisms.subset_release(f, 4, 2).law(4)),
        ("prior must have", lambda: mechanisms.subset_release(f, 4, 2).extraction([0.5, 0.5])),
        ("N must leave", lambda: mechanisms.subset_release(f, 100, 50).law()),
    ]:
        with pytest.raises(ValueError, match=match):
            call()
