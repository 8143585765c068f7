"""Trade-off functions against 250-digit arithmetic, exact fractions, linear programs, brute force and dp-accounting."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from memorization import _knots, piecewise
from memorization.tradeoff import (
    ApproxDP,
    GaussianDP,
    PiecewiseLinear,
    PureDP,
    TradeOff,
    dp_sgd,
    from_distributions,
    from_privacy_loss,
)

settings.register_profile("tradeoff", derandomize=True, deadline=None, max_examples=100)
property_test = settings.get_profile("tradeoff")

LEVELS = np.unique(
    np.concatenate([[0.0], 10.0 ** np.arange(-100, 0, 9.0), np.linspace(0, 1, 41), 1 - 10.0 ** np.arange(-15, -1, 2.0)])
)
EPSILONS = (0.0, 1e-8, 1e-3, 0.5, 1.0, 3.0, 10.0, 30.0, 50.0)
DELTAS = (0.0, 1e-12, 1e-5, 0.1, 0.5, 0.999, 1.0)


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(250):  # 1 − 10⁻¹⁰⁰ has to keep its tail
        yield


def relative(measured: float, true: mpmath.mpf) -> float:
    return float(abs(measured - true) / abs(true)) if true else abs(measured)


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_approximate_dp_has_full_relative_accuracy_on_both_sides(epsilon, delta):
    f = PureDP(epsilon) if delta == 0.0 else ApproxDP(epsilon, delta)
    # next to the bend f is as small as e^{-ε} and 1 − e^ε α cancels almost entirely
    bend = f.advantage_level()
    levels = np.concatenate([LEVELS, bend * np.array([1.0, 1 - 2**-53, 1 + 2**-52, 0.999]), [1.0 - delta]])
    grow, rest = mpmath.exp(mpmath.mpf(epsilon)), 1 - mpmath.mpf(delta)
    for alpha, value, power in zip(levels, f(levels), f.power(levels), strict=True):
        exact = max(mpmath.mpf(0), rest - grow * mpmath.mpf(alpha), (rest - mpmath.mpf(alpha)) / grow)
        assert relative(value, exact) < 1e-12
        assert relative(power, 1 - exact) < 1e-12
    eta = mpmath.mpf(delta) + rest * mpmath.tanh(mpmath.mpf(epsilon) / 2)
    assert relative(f.advantage(), eta) < 1e-14
    assert relative(bend, rest / (grow + 1)) < 1e-14


def _mp_quantile(p: float) -> mpmath.mpf:
    """Φ⁻¹(p) for p ≤ 1/2, by Newton steps on log Φ from scipy's value."""
    z = mpmath.mpf(float(special.ndtri(p)))
    for _ in range(4):
        z -= mpmath.log(mpmath.ncdf(z) / mpmath.mpf(p)) * mpmath.ncdf(z) / mpmath.npdf(z)
    return z


@pytest.mark.parametrize("mu", [0.0, 1e-8, 0.1, 1.0, 3.0, 10.0, 30.0])
def test_gaussian_dp_has_full_relative_accuracy_on_both_sides(mu):
    f = GaussianDP(mu)
    with mpmath.workdps(60):
        for alpha in LEVELS[(LEVELS > 0) & (LEVELS < 1)][::2].tolist():
            z = _mp_quantile(alpha) if alpha <= 0.5 else -_mp_quantile(1.0 - alpha)
            assert relative(f.power(alpha), mpmath.ncdf(z + mu)) < 1e-12
            beta = mpmath.ncdf(-z - mu)
            assert relative(f(alpha), beta) < 1e-12 or (beta < 1e-300 and f(alpha) < 1e-300)
        assert relative(f.advantage(), mpmath.erf(mpmath.mpf(mu) / mpmath.sqrt(8))) < 1e-14
        assert relative(f.advantage_level(), mpmath.ncdf(-mpmath.mpf(mu) / 2)) < 1e-13
    assert (f(0.0), f(1.0), f.power(0.0), f.power(1.0)) == (1.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("f", [PureDP(1.3), ApproxDP(0.7, 0.02), GaussianDP(0.8), PureDP(40.0), ApproxDP(3.0, 0.4)])
def test_advantage_is_the_maximum_and_its_level_attains_it(f):
    grid = np.linspace(0, 1, 20001)
    assert np.max(1 - grid - f(grid)) <= f.advantage() + 1e-15
    level = f.advantage_level()
    assert f.power(level) - level == pytest.approx(f.advantage(), rel=1e-13)
    assert f(level) == pytest.approx(level, rel=1e-10)


def test_beyond_the_range_of_floats():
    f = PureDP(1000.0)
    assert (f(0.0), f(1e-300), f.power(0.0), f.power(1e-300)) == (1.0, 0.0, 0.0, 1.0)
    assert f.advantage() == 1.0
    assert ApproxDP(800.0, 0.1).power(0.0) == 0.1
    assert ApproxDP(3.0, 1.0)(0.0) == 0.0


# --- groups ---------------------------------------------------------------------------------------------------------


def _fraction_power(x: Fraction, grow: Fraction, delta: Fraction, k: int) -> Fraction:
    for _ in range(k):
        x = min(Fraction(1), delta + grow * x, 1 - (1 - delta - x) / grow)
    return x


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 64), Fraction(1, 4096)])
def test_group_of_approximate_dp_against_fractions(k, delta):
    f = ApproxDP(math.log(2), float(delta)).group(k)  # e^ε = 2 up to an ulp of ε
    for x in [Fraction(i, 257) for i in range(258)] + [Fraction(1, 2**j) for j in range(8, 60, 7)]:
        exact = _fraction_power(Fraction(float(x)), Fraction(2), delta, k)
        assert f.power(float(x)) == pytest.approx(float(exact), rel=1e-14 * (k + 1))
        assert f(float(x)) == pytest.approx(float(1 - exact), rel=1e-13 * (k + 1), abs=1e-300)


@pytest.mark.parametrize("k", [1, 2, 3, 6, 9])
def test_pure_staircase_against_fractions(k):
    """Lemma 4.4: the maximum of F∘…∘F − x over every bend of the iterate, in exact arithmetic with e^ε = 3/2."""
    grow = Fraction(3, 2)
    bends = {Fraction(0), Fraction(1)}
    for _ in range(k):  # preimages of the bend, found by inverting the two branches
        meet = 1 / (1 + grow)
        bends |= {meet} | {b / grow if b <= grow * meet else 1 - grow * (1 - b) for b in bends}
    best = max(_fraction_power(x, grow, Fraction(0), k) - x for x in bends)
    f = PureDP(math.log(1.5)).group(k)
    assert f.advantage() == pytest.approx(float(best), rel=1e-14)
    level = f.advantage_level()
    attained = _fraction_power(Fraction(level), grow, Fraction(0), k) - Fraction(level)
    assert float(attained) == pytest.approx(float(best), rel=1e-13)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3, 0.5, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("k", [1, 2, 3, 8, 51, 1000])
def test_pure_staircase_closed_form(epsilon, k):
    e, group = mpmath.mpf(epsilon), PureDP(epsilon).group(k)
    if k % 2:
        level = mpmath.exp(-(k - 1) * e / 2) / (mpmath.exp(e) + 1)
        eta = 1 - 2 * level
    else:
        eta, level = 1 - mpmath.exp(-k * e / 2), mpmath.exp(-k * e / 2) / 2
    assert relative(group.advantage(), eta) < 1e-13
    if level > 1e-300:
        assert relative(group.advantage_level(), level) < 1e-13


@pytest.mark.parametrize(
    ("epsilon", "delta", "k"), [(1.0, 0.0, 30), (0.3, 1e-9, 40), (5.0, 1e-30, 7), (0.01, 1e-4, 100)]
)
def test_group_of_approximate_dp_against_many_digits(epsilon, delta, k):
    f, grow, rest = ApproxDP(epsilon, delta).group(k), mpmath.exp(mpmath.mpf(epsilon)), 1 - mpmath.mpf(delta)
    for alpha in LEVELS.tolist():
        x = mpmath.mpf(alpha)
        for _ in range(k):
            x = min(mpmath.mpf(1), delta + grow * x, 1 - (rest - x) / grow)
        assert relative(f.power(alpha), x) < 1e-12
        if 1 - x > 1e-290:
            assert relative(f(alpha), 1 - x) < 1e-12


@pytest.mark.parametrize(("epsilon", "delta", "k"), [(1.0, 0.0, 2), (1.0, 0.0, 3), (0.4, 0.05, 2), (0.4, 0.05, 4)])
def test_group_advantage_is_the_value_of_a_linear_program(epsilon, delta, k):
    """The largest total variation between the ends of a chain of k + 1 laws on three outcomes, (ε, δ)-close each."""
    outcomes, laws = 3, k + 1
    pairs = [pair for i in range(k) for pair in ((i, i + 1), (i + 1, i))]
    size = laws * outcomes + len(pairs) * outcomes

    def law(i: int, o: int) -> int:
        return i * outcomes + o

    upper, limit = [], []
    for n, (i, j) in enumerate(pairs):  # excess ≥ P_i − e^ε P_j, total excess ≤ δ
        total = np.zeros(size)
        for o in range(outcomes):
            row = np.zeros(size)
            row[law(i, o)], row[law(j, o)] = 1.0, -math.exp(epsilon)
            row[laws * outcomes + n * outcomes + o] = -1.0
            total[laws * outcomes + n * outcomes + o] = 1.0
            upper.append(row)
            limit.append(0.0)
        upper.append(total)
        limit.append(delta)
    one = np.zeros((laws, size))
    for i in range(laws):
        one[i, i * outcomes : (i + 1) * outcomes] = 1.0
    best = 0.0
    for event in ((0,), (0, 1)):
        gain = np.zeros(size)
        for o in event:
            gain[law(k, o)], gain[law(0, o)] = -1.0, 1.0
        solved = optimize.linprog(gain, upper, limit, one, np.ones(laws), bounds=(0, 1), method="highs")
        best = max(best, -solved.fun)
    assert ApproxDP(epsilon, delta).group(k).advantage() == pytest.approx(best, abs=1e-8)


def test_gaussian_group_and_composition():
    assert GaussianDP(0.3).group(4) == GaussianDP(1.2)
    assert GaussianDP(3.0).compose(GaussianDP(4.0)) == GaussianDP(5.0)


# --- generated curves -----------------------------------------------------------------------------------------------

mass = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.floats(1e-3, 1.0))


@st.composite
def finite_pairs(draw, most: int = 6):
    n = draw(st.integers(1, most))
    laws = [np.array(draw(st.lists(mass, min_size=n, max_size=n))) for _ in range(2)]
    assume(all(law.sum() > 0 for law in laws))
    return laws[0] / laws[0].sum(), laws[1] / laws[1].sum()


@st.composite
def curves(draw):
    kind = draw(st.sampled_from(["finite", "symmetrized", "approximate", "knots"]))
    if kind == "approximate":
        return ApproxDP(draw(st.floats(0, 5)), draw(st.floats(0, 0.5)))
    f = from_distributions(*draw(finite_pairs()), symmetrize=kind == "symmetrized")
    return PiecewiseLinear(f.alpha, f.beta) if kind == "knots" else f


@property_test
@given(curves())
def test_every_curve_is_a_trade_off_function(f):
    grid = np.linspace(0, 1, 101)
    beta = f(grid)
    assert np.all(beta[1:-1] <= (beta[:-2] + beta[2:]) / 2 + 1e-12)
    assert np.all(np.diff(beta) <= 1e-15)
    assert np.all(beta <= 1 - grid + 1e-12)
    assert beta[-1] == 0.0
    np.testing.assert_allclose(f.power(grid), 1 - beta, atol=1e-15)
    assert f.advantage() == pytest.approx(np.max(1 - f.alpha - f.beta), abs=1e-14)
    level = f.advantage_level()
    assert f.power(level) - level == pytest.approx(f.advantage(), abs=1e-12)


@property_test
@given(curves(), st.floats(0, 1))
def test_inverse_and_symmetric_envelope(f, alpha):
    back = f.inverse()
    # f⁻¹(y) = inf{x : f(x) ≤ y}
    level = back(alpha)
    assert f(level) <= alpha + 1e-9
    if level > 1e-6:
        assert f(level * (1 - 1e-6)) > alpha - 1e-9
    both = f.symmetrize()
    assert both.symmetric
    assert both(alpha) <= min(f(alpha), back(alpha)) + 1e-12
    assert both(both(alpha)) <= alpha + 1e-9  # Lemma C.1
    if alpha < both(0.0):
        assert both(both(alpha)) == pytest.approx(alpha, abs=1e-9)


@property_test
@given(finite_pairs(), st.floats(0, 1))
def test_symmetric_envelope_against_all_chords(pair, alpha):
    f = from_distributions(*pair)
    knots = list(zip(f.alpha.tolist(), f.beta.tolist(), strict=True))
    knots += [(b, a) for a, b in knots] + [(0.0, 1.0), (1.0, 0.0)]
    lowest = min(b for a, b in knots if a == alpha) if any(a == alpha for a, _ in knots) else math.inf
    for (a, b), (c, d) in itertools.permutations(knots, 2):
        if a < alpha < c:
            lowest = min(lowest, b + (d - b) * (alpha - a) / (c - a))
    assert f.symmetrize()(alpha) == pytest.approx(lowest, abs=1e-9)


@property_test
@given(curves(), st.floats(0, 1))
def test_threshold_is_the_largest_level_with_that_power(f, share):
    least = f.power(0.0)
    tau = min(1.0, least + share * (1 - least))
    level = f.threshold(tau)
    assert f.power(level) <= tau + 1e-12
    if level < 1 - 1e-6:
        beyond = level + 1e-6
        assert f.power(beyond) > tau or f.power(beyond) == pytest.approx(tau, abs=1e-9)
        assert tau < 1.0
    assert f.threshold(1.0) == 1.0


def test_threshold_is_precise_at_both_ends():
    f = PureDP(2.0)
    tau = np.array([1e-100, 1e-5, 0.3, 0.88, 0.9, 0.999999])
    grow = np.exp(2.0)
    np.testing.assert_allclose(
        f.threshold(tau), np.where(tau <= grow / (grow + 1), tau / grow, 1 - grow * (1 - tau)), rtol=1e-12
    )
    assert GaussianDP(1.0).power(GaussianDP(1.0).threshold(1e-60)) == pytest.approx(1e-60, rel=1e-11)
    f = ApproxDP(1.0, 0.25)
    assert (f.threshold(0.25), f.threshold(1.0)) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"tau must lie in \[F\(0\), 1\] = \[0.25, 1\]"):
        f.threshold([0.5, 0.2])


@property_test
@given(curves(), st.integers(1, 7), st.floats(0, 1))
def test_group_is_the_iterate(f, k, x):
    point = x
    for _ in range(k):
        point = f.power(point)
    assert f.group(k).power(x) == pytest.approx(point, abs=1e-11)


@property_test
@given(curves(), st.integers(1, 4), st.integers(1, 4))
def test_groups_of_groups(f, a, b):
    grid = np.linspace(0, 1, 64)
    np.testing.assert_allclose(f.group(a).group(b)(grid), f.group(a * b)(grid), atol=1e-11)


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_piecewise_group_keeps_the_far_ends(epsilon):
    named = PureDP(epsilon)
    plain = PiecewiseLinear(named.alpha, named.beta)
    levels = 10.0 ** np.arange(-100, 0, 3.0)
    for k in (3, 40, 1000):
        np.testing.assert_allclose(plain.group(k).power(levels), named.group(k).power(levels), rtol=1e-12)
    assert plain.group(1000).power(0.0) == 0.0


# --- finite pairs ---------------------------------------------------------------------------------------------------


def test_randomized_response():
    f = from_distributions([0.6, 0.4], [0.4, 0.6])
    np.testing.assert_allclose(f([0, 0.05, 0.4, 0.5]), [1, 0.925, 0.4, 1 / 3], rtol=1e-15)
    assert f.symmetric
    bit = 1 / (1 + math.exp(1.7))
    np.testing.assert_allclose(
        from_distributions([1 - bit, bit], [bit, 1 - bit])(LEVELS), PureDP(1.7)(LEVELS), rtol=1e-12
    )


@property_test
@given(finite_pairs(), st.floats(0, 1))
def test_neyman_pearson_against_a_linear_program(pair, alpha):
    p, q = pair
    test = optimize.linprog(-q, [p], [alpha], bounds=(0, 1), method="highs")
    f = from_distributions(p, q)
    assert f(alpha) == pytest.approx(1 + test.fun, abs=1e-9)
    # total variation, by enumerating events
    events = itertools.product([0, 1], repeat=p.size)
    assert f.advantage() == pytest.approx(max(np.dot(q - p, event) for event in events), abs=1e-12)


def test_atoms_that_only_one_law_has():
    f = from_distributions([0.5, 0.5, 0.0], [0.0, 0.75, 0.25])
    np.testing.assert_allclose(f.alpha, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(f.beta, [0.75, 0.0, 0.0])
    assert from_distributions([1, 0], [0, 1]).advantage() == 1.0
    assert from_distributions([[0.25, 0.75]], [[0.25, 0.75]]).advantage() == 0.0


def test_small_differences_and_rare_outcomes_survive():
    p = np.array([1e-80, 1 - 1e-80])
    f = from_distributions(p, np.array([3e-80, 1 - 3e-80]))
    assert f.power(1e-80) == pytest.approx(3e-80, rel=1e-14)
    assert f.advantage() == pytest.approx(2e-80, rel=1e-14)
    n = 1000
    p = np.full(n, 1 / 1024)
    p[-1] = 1 - (n - 1) / 1024
    shift = np.ldexp(np.where(np.arange(n) % 2, 1.0, -1.0), -50)
    assert from_distributions(p, p + shift).advantage() == pytest.approx(n / 2 * 2.0**-50, rel=1e-12)


# --- composition ----------------------------------------------------------------------------------------------------


@property_test
@given(finite_pairs(5), finite_pairs(5))
def test_composition_is_the_product_pair(first, second):
    composed = from_distributions(*first).compose(from_distributions(*second))
    product = from_distributions(np.outer(first[0], second[0]), np.outer(first[1], second[1]))
    grid = np.linspace(0, 1, 101)
    np.testing.assert_allclose(composed(grid), product(grid), atol=1e-12)
    assert composed.error == 0.0


def test_composition_of_pure_dp_by_counting():
    """k-fold randomized response: the likelihood ratio is e^{ε(2j − k)} with a binomial j."""
    epsilon, k = 0.4, 12
    bit = special.expit(epsilon)
    j = np.arange(k + 1)
    p, q = special.binom(k, j) * (1 - bit) ** j * bit ** (k - j), special.binom(k, j) * bit**j * (1 - bit) ** (k - j)
    composed = PureDP(epsilon)
    for _ in range(k - 1):
        composed = composed.compose(PureDP(epsilon))
    assert composed.alpha.size == k + 2  # equal ratios merge
    np.testing.assert_allclose(composed(LEVELS), from_distributions(p, q)(LEVELS), rtol=1e-11)
    np.testing.assert_allclose(composed.power(LEVELS), from_distributions(p, q).power(LEVELS), rtol=1e-11)
    assert composed.symmetric


def test_delta_composes():
    f = ApproxDP(0.0, 0.1).compose(ApproxDP(0.0, 0.2))
    np.testing.assert_allclose(f.power(np.array([0.0, 0.5])), [0.28, 0.78], rtol=1e-14)
    assert PureDP(0.0).compose(GaussianDP(1.0)) == GaussianDP(1.0)
    assert PureDP(1.0).compose(GaussianDP(0.0)) == PureDP(1.0)


@pytest.mark.parametrize(("mu", "epsilon"), [(1.0, 1.0), (0.1, 0.5), (3.0, 2.0), (1e-3, 4.0)])
def test_gaussian_with_pure_is_certified(mu, epsilon):
    """Against the exact law of the likelihood ratio: a Gaussian shifted by ±ε."""
    f = GaussianDP(mu).compose(PureDP(epsilon))
    assert f.error < 1e-6
    assert f.symmetric
    bit = special.expit(epsilon)
    ratio = np.linspace(-epsilon - 6 * mu, epsilon + 6 * mu, 4001)  # log-likelihood threshold
    z = [(ratio - shift) / mu + mu / 2 for shift in (epsilon, -epsilon)]
    alpha = (1 - bit) * special.ndtr(-z[0]) + bit * special.ndtr(-z[1])
    beta = bit * special.ndtr(z[0] - mu) + (1 - bit) * special.ndtr(z[1] - mu)
    gap = beta - f(alpha)
    assert gap.min() >= -1e-14
    assert gap.max() <= f.error
    assert PureDP(epsilon).compose(GaussianDP(mu)) == f


@pytest.mark.parametrize("mu", [1e-6, 0.03, 1.0, 6.0, 25.0])
def test_tangent_envelope_of_the_gaussian(mu):
    f, exact = GaussianDP(mu)._finite(), GaussianDP(mu)
    levels = np.concatenate([LEVELS, f.alpha, special.ndtr(np.linspace(-30, 30, 3001))])
    gap = exact(levels) - f(levels)
    assert gap.min() >= -1e-14
    assert gap.max() <= f.error < 3e-7 * max(mu, 0.1)
    tail = LEVELS[(LEVELS > 0) & (LEVELS < 1e-3)]
    np.testing.assert_allclose(f.power(tail), exact.power(tail), rtol=max(1e-3, 5e-3 * mu**2))


@pytest.mark.parametrize("symmetric", [True, False])
def test_thinning_never_raises_a_curve_and_says_how_far_it_lowers_it(symmetric):
    rng = np.random.default_rng(5)
    f = from_distributions(rng.dirichlet(np.ones(900)), rng.dirichlet(np.ones(900)), symmetrize=symmetric)
    knots, loss = _knots.coarsen(f._knots, 60, f.symmetric)
    thin = PiecewiseLinear._of(knots)
    assert thin.alpha.size <= 70
    assert thin.symmetric == symmetric
    levels = np.concatenate([f.alpha, thin.alpha, np.linspace(0, 1, 1001)])
    gap = f(levels) - thin(levels)
    assert gap.min() >= -1e-15
    assert loss * 0.999 <= gap.max() <= loss + 1e-15
    assert 0 < loss < 5e-3


def test_caps_on_size_cost_what_the_error_says(monkeypatch):
    rng = np.random.default_rng(6)
    pairs = [[rng.dirichlet(np.ones(80)) for _ in range(2)] for _ in range(2)]
    f, g = (from_distributions(*pair) for pair in pairs)
    exact, group = f.compose(g), f.group(6)
    monkeypatch.setattr(piecewise, "MAX_ATOMS", 2500)
    monkeypatch.setattr(piecewise, "MAX_KNOTS", 64)
    levels = np.linspace(0, 1, 2001)
    for precise, capped in ((exact, f.compose(g)), (group, f.group(6))):
        gap = precise(levels) - capped(levels)
        assert gap.min() >= -1e-15
        assert 0 < gap.max() <= capped.error
    assert f.compose(g).error < 0.05
    assert 0 < f.compose(g).symmetrize().error < 0.5


# --- privacy-loss distributions -------------------------------------------------------------------------------------

accounting = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (10.0, 100), (4.0, 30)])
def test_gaussian_losses_lie_below_the_closed_form_within_the_error(sigma, steps):
    step = accounting.from_gaussian_mechanism(sigma, value_discretization_interval=1e-3)
    rounded_down = accounting.from_gaussian_mechanism(
        sigma, value_discretization_interval=1e-3, pessimistic_estimate=False, use_connect_dots=False
    )
    pld, optimistic = step.self_compose(steps), rounded_down.self_compose(steps)
    exact = GaussianDP(math.sqrt(steps) / sigma)
    errors = []
    for known in ({}, {"step": step}, {"optimistic": optimistic}):
        f = from_privacy_loss(pld, compositions=steps, **known)
        gap = exact(np.linspace(0, 1, 501)) - f(np.linspace(0, 1, 501))
        assert gap.min() >= -1e-14
        assert gap.max() <= f.error
        assert f.symmetric
        errors.append(f.error)
    assert errors[1] < errors[0] / 10
    assert errors[2] < errors[0]


@pytest.mark.parametrize("sampling", [1.0, 0.2])
def test_delta_is_recovered(sampling):
    pld = accounting.from_laplace_mechanism(
        1.2, sampling_prob=sampling, value_discretization_interval=1e-3
    ).self_compose(5)
    f = from_privacy_loss(pld, compositions=5)
    for epsilon in (0.0, 0.1, 0.77, 1.5, 2.5):
        delta = float(np.max(1 - f.beta - math.exp(epsilon) * f.alpha))
        assert delta == pytest.approx(pld.get_delta_for_epsilon(epsilon), abs=1e-9)


def test_laplace():
    f = from_privacy_loss(accounting.from_laplace_mechanism(0.5))
    alpha = np.linspace(1e-3, 0.5, 200)
    edge, grow = math.exp(-2.0), math.exp(2.0)  # T(Lap(0, 1), Lap(2, 1)): both tails, and a hyperbola in between
    exact = np.where(alpha < edge / 2, 1 - grow * alpha, np.where(alpha <= 0.5, edge / (4 * alpha), (1 - alpha) / grow))
    gap = exact - f(alpha)
    assert gap.min() >= -1e-12
    assert gap.max() <= f.error < 1e-3


@pytest.mark.parametrize("compositions", [1, 3])
def test_a_genuine_mass_at_infinity_is_no_error_where_an_optimistic_rounding_is_known(compositions):
    def pld(pessimistic):
        laws = [{0: math.log(0.2), 1: math.log(0.8)}, {1: math.log(0.3), 2: math.log(0.7)}]
        one = accounting.from_two_probability_mass_functions(
            *laws, pessimistic_estimate=pessimistic, value_discretization_interval=1e-5, symmetric=False
        )
        return one if compositions == 1 else one.compose(one).compose(one)

    one = from_distributions([0.2, 0.8, 0.0], [0.0, 0.3, 0.7])
    exact = one if compositions == 1 else one.compose(one).compose(one)
    f = from_privacy_loss(pld(True), compositions=compositions, optimistic=pld(False))
    gap = exact.symmetrize()(LEVELS) - f(LEVELS)
    assert gap.min() >= -1e-12
    assert gap.max() <= f.error < 1e-4
    assert from_privacy_loss(pld(True), compositions=compositions).error > 0.5


@pytest.mark.parametrize("compositions", [1, 3])
def test_sparse_losses(compositions):
    """Two outcomes a step: libraries that fill the grid in between get this curve wrong."""
    noise = 2 / (1 + math.exp(1.0))
    pld = accounting.from_randomized_response(noise, 2, value_discretization_interval=0.1)
    exact = PureDP(1.0)
    for _ in range(compositions - 1):
        exact, pld = (
            exact.compose(PureDP(1.0)),
            pld.compose(accounting.from_randomized_response(noise, 2, value_discretization_interval=0.1)),
        )
    f = from_privacy_loss(pld, compositions=compositions)
    gap = exact(LEVELS) - f(LEVELS)
    assert gap.min() >= -1e-12
    assert gap.max() <= f.error < 0.2 * compositions
    fine = from_privacy_loss(accounting.from_randomized_response(noise, 2, value_discretization_interval=1e-6))
    assert np.max(PureDP(1.0)(LEVELS) - fine(LEVELS)) <= fine.error < 1e-6


def test_approximate_dp_as_losses():
    from dp_accounting.pld import common

    pld = accounting.from_privacy_parameters(common.DifferentialPrivacyParameters(1.0, 0.1), 0.5)
    np.testing.assert_allclose(from_privacy_loss(pld)(LEVELS), ApproxDP(1.0, 0.1)(LEVELS), rtol=1e-12)


def test_two_orders_that_differ():
    """Sparse and not symmetric, so the orders cross between grid points; against the envelope over a fine grid of ε."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.15, 0.7, 0.15])
    logs = [dict(enumerate(np.log(law))) for law in (p, q)]
    pld = accounting.from_two_probability_mass_functions(*logs, value_discretization_interval=1e-5, symmetric=False)
    f, alpha = from_privacy_loss(pld), np.linspace(0, 1, 201)
    np.testing.assert_allclose(f(alpha), from_distributions(p, q, symmetrize=True)(alpha), atol=f.error)
    epsilon = np.linspace(0, 2, 4001)
    delta = pld.get_delta_for_epsilon(epsilon)[:, None]
    grow = np.exp(epsilon)[:, None]
    lines = np.maximum(1 - delta - grow * alpha, (1 - delta - alpha) / grow).max(0)
    assert np.all(f(alpha) >= lines - 1e-12)
    np.testing.assert_allclose(f(alpha), np.maximum(lines, 0), atol=1e-3)


def test_what_is_no_pessimistic_distribution_is_refused():
    with pytest.raises(ValueError, match="pld must be rounded pessimistically"):
        from_privacy_loss(accounting.from_laplace_mechanism(1.0, pessimistic_estimate=False))
    with pytest.raises(ValueError, match="pld must be a dp-accounting PrivacyLossDistribution"):
        from_privacy_loss([0.1, 0.9])
    with pytest.raises(ValueError, match="compositions"):
        from_privacy_loss(accounting.from_laplace_mechanism(1.0), compositions=0)


# --- DP-SGD ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.3), (1.0, 0.01), (3.0, 0.9)])
def test_one_step_of_dp_sgd_against_the_mixture(sigma, rate):
    """One Poisson-sampled step has T = rate·G_{1/σ} + (1 − rate)(1 − α) in one order; both orders are its envelope."""
    f = dp_sgd(sigma, rate, 1)
    z = np.concatenate([[40.0], np.linspace(9, -6, 6001), [-40.0]])
    alpha, beta = special.ndtr(-z), rate * special.ndtr(z - 1 / sigma) + (1 - rate) * special.ndtr(z)
    exact = PiecewiseLinear(alpha, beta).symmetrize()  # chords: above the truth, by less than 1e-6
    gap = exact(np.linspace(0, 1, 501)) - f(np.linspace(0, 1, 501))
    assert gap.min() >= -1e-12
    assert gap.max() <= f.error + 1e-6
    assert f.error <= 1e-4


def test_dp_sgd_is_between_the_accountants_two_roundings():
    sigma, rate, steps = 1.0, 0.02, 200
    f = dp_sgd(sigma, rate, steps, target_error=3e-4)
    assert f.error <= 3e-4
    bounds = {}
    for pessimistic in (True, False):
        step = accounting.from_gaussian_mechanism(
            sigma, sampling_prob=rate, pessimistic_estimate=pessimistic, use_connect_dots=pessimistic
        )
        bounds[pessimistic] = step.self_compose(steps)
    for epsilon in (0.0, 0.2, 0.5, 1.0, 2.0):
        delta = float(np.max(1 - f.beta - math.exp(epsilon) * f.alpha))
        assert bounds[False].get_delta_for_epsilon(epsilon) <= delta
        assert delta == pytest.approx(bounds[True].get_delta_for_epsilon(epsilon), abs=2e-6)
    # the central limit: a μ of rate √(T(e^{1/σ²} − 1))
    assert f.advantage() == pytest.approx(
        GaussianDP(rate * math.sqrt(steps * math.expm1(1 / sigma**2))).advantage(), rel=0.05
    )
    assert f.symmetric
    assert f.group(2).advantage() > 1.5 * f.advantage()


def test_dp_sgd_says_what_a_grid_that_may_not_grow_costs(monkeypatch):
    fine = dp_sgd(0.8, 0.1, 50)
    monkeypatch.setattr("memorization.tradeoff._MAX_CELLS", 2**14)
    coarse = dp_sgd(0.8, 0.1, 50)
    gap = fine(np.linspace(0, 1, 501)) - coarse(np.linspace(0, 1, 501))
    assert fine.error <= 1e-4 < coarse.error
    assert 0 < gap.max() <= coarse.error
    assert gap.min() >= -fine.error


def test_dp_sgd_without_sampling_is_gaussian():
    assert dp_sgd(2.0, 1.0, 16) == GaussianDP(2.0)


# --- bad input and manners ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: PureDP(-0.1), r"epsilon must lie in \[0, inf\).*-0.1"),
        (lambda: PureDP(math.inf), "epsilon"),
        (lambda: PureDP(math.nan), "epsilon"),
        (lambda: ApproxDP(1.0, 1.5), r"delta must lie in \[0, 1\], got 1.5"),
        (lambda: GaussianDP(-1.0), "mu"),
        (lambda: GaussianDP(math.inf), "mu"),
        (lambda: PureDP(1.0)(1.5), r"alpha must lie in \[0, 1\], got 1.5"),
        (lambda: GaussianDP(1.0)([0.1, math.nan]), "alpha"),
        (lambda: PureDP(1.0).power(-1e-9), "x must"),
        (lambda: GaussianDP(1.0).threshold(1.1), "tau"),
        (lambda: PureDP(1.0).group(0), "k must"),
        (lambda: GaussianDP(1.0).group(1.5), "k must"),
        (lambda: PureDP(1.0).compose(0.5), "other must be a trade-off function"),
        (lambda: from_distributions([0.5, 0.6], [0.5, 0.5]), "p must sum to 1"),
        (lambda: from_distributions([0.5, 0.5], [1.0]), "one shape"),
        (lambda: from_distributions([0.5, 0.5], [1.5, -0.5]), "q must"),
        (lambda: PiecewiseLinear([0, 0.5, 1], [1, 0.7, 0]), r"at most 1 - alpha.*\(0.5, 0.7\)"),
        (lambda: PiecewiseLinear([0, 0.2, 0.4, 1], [0.6, 0.55, 0.1, 0]), "convex"),
        (lambda: PiecewiseLinear([0, 0.5, 0.4, 1], [1, 0.3, 0.2, 0]), "strictly increasing"),
        (lambda: PiecewiseLinear([0, 0.5, 0.5, 1], [1, 0.3, 0.2, 0]), "strictly increasing"),
        (lambda: PiecewiseLinear([0, 0.2, 0.4, 1], [0.5, 0.1, 0.2, 0]), "nonincreasing"),
        (lambda: PiecewiseLinear([0.1, 1], [0.5, 0]), "from 0 to 1"),
        (lambda: PiecewiseLinear([0, 1], [0.5, 0.1]), "end at 0"),
        (lambda: PiecewiseLinear([0, 1], [math.nan, 0]), "beta"),
        (lambda: PiecewiseLinear([0, 0.5, 1], [1, 0]), "shapes"),
        (lambda: dp_sgd(0.0, 0.1, 10), "noise_multiplier"),
        (lambda: dp_sgd(1.0, 0.0, 10), "sample_rate"),
        (lambda: dp_sgd(1.0, 0.1, 0), "steps"),
        (lambda: dp_sgd(1.0, 0.1, 5, target_error=0.0), "target_error"),
    ],
)
def test_bad_input_names_the_argument(make, names):
    with pytest.raises(ValueError, match=names):
        make()


def test_repeated_knots_count_once():
    assert PiecewiseLinear([0, 0.5, 0.5, 1], [1, 0.25, 0.25, 0]) == PiecewiseLinear([0, 0.5, 1], [1, 0.25, 0])


def test_scalars_arrays_equality_and_repr():
    for f in (PureDP(1.0), GaussianDP(1.0), from_distributions([0.5, 0.5], [0.2, 0.8])):
        assert isinstance(f, TradeOff)
        assert type(f(0.5)) is type(f.power(0.5)) is type(f.threshold(0.5)) is type(f.advantage()) is float
        assert type(f.advantage_level()) is float
        assert f(np.full((2, 3), 0.5)).shape == f.threshold(np.full((2, 3), 0.5)).shape == (2, 3)
        assert f.group(1) == f
    assert PureDP(1.0) == PureDP(1.0) == ApproxDP(1.0, 0.0) != PureDP(2.0)
    assert len({PureDP(1.0), PureDP(1.0), GaussianDP(1.0), GaussianDP(1.0)}) == 2
    assert (repr(PureDP(1)), repr(ApproxDP(1, 0.1)), repr(GaussianDP(2))) == (
        "PureDP(epsilon=1.0)",
        "ApproxDP(epsilon=1.0, delta=0.1)",
        "GaussianDP(mu=2.0)",
    )
    assert "not symmetric" in repr(from_distributions([0.5, 0.3, 0.2], [0.2, 0.6, 0.2]))


def test_importing_loads_neither_accountant_nor_torch():
    code = (
        "import sys, memorization.tradeoff\n"
        "print(sorted({'dp_accounting', 'torch', 'scipy.optimize', 'scipy.stats', 'sklearn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
