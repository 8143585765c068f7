"""Interval estimates and score statistics, against exact sums, brute force, scipy.stats and scikit-learn."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memorization import stats

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)

# Few distinct values, so that ties within and between the samples are the rule; infinities included.
scores = st.lists(st.sampled_from([-math.inf, -2.0, -0.5, 0.0, 0.1, 0.3, 1e9, math.inf]), min_size=1, max_size=12)


def binomial_upper_tail(count, trials, rate):
    """P(X >= count), summed exactly over the rationals."""
    rate = Fraction(rate)
    terms = (math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(count, trials + 1))
    return float(sum(terms))


# --- Clopper-Pearson --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "trials"), [(0, 39), (1, 16), (4, 48), (11, 48), (47, 48), (48, 48), (1, 1)])
@pytest.mark.parametrize("side", stats.SIDES)
def test_clopper_pearson_ends_leave_exactly_the_stated_tail(count, trials, side):
    low, high = stats.clopper_pearson(count, trials, 0.9, side)
    tail = 0.05 if side == "two-sided" else 0.1
    if side == "upper" or count == 0:
        assert low == 0.0
    else:
        assert binomial_upper_tail(count, trials, low) == pytest.approx(tail, rel=1e-9)
    if side == "lower" or count == trials:
        assert high == 1.0
    else:
        assert 1 - binomial_upper_tail(count + 1, trials, high) == pytest.approx(tail, rel=1e-9)


@pytest.mark.parametrize("side", stats.SIDES)
@pytest.mark.parametrize("trials", [1, 7, 24])
def test_clopper_pearson_covers_every_rate(side, trials):
    low, high = stats.clopper_pearson(np.arange(trials + 1), trials, 0.8, side)
    rates = np.concatenate([np.linspace(0, 1, 101), low + 1e-12, high - 1e-12])
    for rate in rates.clip(0, 1):
        law = [math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(trials + 1)]
        assert np.sum(np.array(law)[(low <= rate) & (rate <= high)]) >= 0.8 - 1e-12


def test_clopper_pearson_agrees_with_scipy_at_extremes():
    from scipy.stats import binom

    for count, trials, confidence in [(3, 10**6, 1 - 1e-9), (5 * 10**8, 10**9, 0.95), (0, 10**6, 0.5)]:
        low, high = stats.clopper_pearson(count, trials, confidence, "upper")
        assert (low, binom.cdf(count, trials, high)) == (0.0, pytest.approx(1 - confidence, rel=1e-5))


def test_clopper_pearson_closed_form_without_successes():
    low, high = stats.clopper_pearson(0, [39, 58], side="upper")
    np.testing.assert_allclose(high, 1 - 0.05 ** (1 / np.array([39, 58])), rtol=1e-12)
    np.testing.assert_array_equal(low, [0.0, 0.0])


def test_printed_confidence_limits_and_their_sides():
    """Section 8.2 prints one-sided limits in three places and a two-sided interval in one."""
    assert stats.clopper_pearson(0, 39, side="upper")[1] == pytest.approx(0.074, abs=5e-4)
    assert stats.clopper_pearson(0, 58, side="upper")[1] == pytest.approx(0.050, abs=5e-4)
    np.testing.assert_allclose(stats.clopper_pearson([4, 11], 48, side="upper")[1], [0.18, 0.35], atol=5e-3)
    np.testing.assert_allclose(stats.clopper_pearson(1, 16), [0.002, 0.302], atol=5e-4)
    # The other reading of each is told apart by the printed digits.
    np.testing.assert_allclose(stats.clopper_pearson(0, [39, 58])[1], [0.090, 0.062], atol=5e-4)
    np.testing.assert_allclose(stats.clopper_pearson([4, 11], 48)[1], [0.20, 0.37], atol=5e-3)
    assert stats.clopper_pearson(1, 16, side="upper")[1] < 0.302 - 0.02


def test_clopper_pearson_shapes_and_no_trials():
    assert stats.clopper_pearson(0, 0) == (0.0, 1.0)
    assert all(type(end) is float for end in stats.clopper_pearson(np.int64(1), 3))
    low, high = stats.clopper_pearson([[0], [1]], [1, 2, 3])
    assert low.shape == high.shape == (2, 3)
    assert (low[1, 2], high[1, 2]) == stats.clopper_pearson(1, 3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((3, 2), "successes must be at most trials, got 3 of 2"),
        ((-1, 2), "successes"),
        ((0.5, 2), "successes must be whole numbers"),
        ((1, math.inf), "trials"),
        ((1, math.nan), "trials"),
        ((1, 2, 1.0), "confidence"),
        ((1, 2, 0.0), "confidence"),
        ((1, 2, 0.9, "both"), "side must be one of"),
    ],
)
def test_clopper_pearson_refuses(arguments, named):
    with pytest.raises(ValueError, match=named):
        stats.clopper_pearson(*arguments)


# --- Means ------------------------------------------------------------------------------------------------------


def test_mean_interval_is_students():
    from scipy.stats import t

    values = np.random.default_rng(3).gamma(2.0, size=(3, 7))
    expected = t.interval(0.9, 20, values.mean(), values.std(ddof=1) / math.sqrt(21))
    np.testing.assert_allclose(stats.mean_interval(values, 0.9), expected, rtol=1e-12)
    assert stats.mean_interval(values, 0.95, "upper") == (-math.inf, pytest.approx(expected[1], rel=1e-12))
    assert stats.mean_interval(values, 0.95, "lower") == (pytest.approx(expected[0], rel=1e-12), math.inf)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_mean_interval_refuses(values):
    with pytest.raises(ValueError, match="values"):
        stats.mean_interval(values)


# --- AUC --------------------------------------------------------------------------------------------------------


@PROPERTY
@given(scores, scores)
def test_auc_is_the_chance_of_outscoring(members, nonmembers):
    won = sum(Fraction(a > b) + Fraction(a == b, 2) for a in members for b in nonmembers)
    assert stats.auc(members, nonmembers) == float(won / (len(members) * len(nonmembers)))
    assert stats.auc(members, nonmembers) + stats.auc(nonmembers, members) == pytest.approx(1.0, abs=1e-15)


def test_auc_agrees_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for n, m, digits in [(48, 48, 1), (48, 400, 8), (500, 3, 0)]:
        a, b = rng.normal(0.4, 1, n).round(digits), rng.normal(0, 1, m).round(digits)
        labels = np.repeat([1, 0], [n, m])
        assert stats.auc(a, b) == pytest.approx(metrics.roc_auc_score(labels, np.concatenate([a, b])), abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 2)])
def test_null_standard_error_is_the_exact_permutation_law(n, m):
    values = [
        stats.auc(ranks, sorted(set(range(n + m)) - set(ranks))) for ranks in itertools.combinations(range(n + m), n)
    ]
    assert np.mean(values) == pytest.approx(0.5, abs=1e-12)
    assert stats.auc_standard_error(n, m) == pytest.approx(np.std(values), rel=1e-12)


def test_gated_zlib_excursion_is_1_6_standard_errors():
    error = stats.auc_standard_error(48, 48)
    assert type(error) is float
    assert error == pytest.approx(0.059, abs=5e-4)
    assert (0.596 - 0.5) / error == pytest.approx(1.6, abs=0.05)
    assert stats.auc_standard_error([48, 48], [48, 400]).shape == (2,)


# --- ROC --------------------------------------------------------------------------------------------------------


def reachable(members, nonmembers):
    """Every (FPR, TPR) of a rule "score >= t", as exact fractions: t at each score, and above all of them."""
    points = {(Fraction(0), Fraction(0))}
    for t in members + nonmembers:
        false, true = (Fraction(sum(s >= t for s in sample), len(sample)) for sample in (nonmembers, members))
        points.add((false, true))
    return sorted(points)


@PROPERTY
@given(scores, scores, st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_roc_points_and_the_rate_at_a_false_positive_rate(members, nonmembers, percents):
    points = reachable(members, nonmembers)
    false_rate, true_rate = stats.roc_curve(members, nonmembers)
    assert list(dict.fromkeys(zip(false_rate, true_rate, strict=True))) == [(float(x), float(y)) for x, y in points]
    area = np.sum(np.diff(false_rate) * (true_rate[1:] + true_rate[:-1])) / 2
    assert area == pytest.approx(stats.auc(members, nonmembers), abs=1e-12)
    best = [max(y for x, y in points if x <= Fraction(percent, 100)) for percent in percents]
    # Read as decimals: percent / 100 is the double nearest to the rate that was meant.
    measured = stats.tpr_at_fpr(members, nonmembers, [percent / 100 for percent in percents])
    np.testing.assert_array_equal(measured, np.array(best, dtype=float))
    assert stats.tpr_at_fpr(members, nonmembers, percents[0] / 100) == float(best[0])


@pytest.mark.parametrize("trials", [20, 100, 400, 1000])
def test_a_false_positive_rate_is_the_decimal_it_was_written_as(trials):
    """0.29 * 100 is below 29 in floating point; 29 false positives in 100 are allowed all the same."""
    nonmembers = np.arange(trials)
    for count in range(trials + 1):
        members = [trials - count - 0.5]  # outscored by exactly `count` non-members
        assert stats.tpr_at_fpr(members, nonmembers, float(Fraction(count, trials))) == 1.0
        if count:
            assert stats.tpr_at_fpr(members, nonmembers, float(Fraction(count, trials)) - 1e-9) == 0.0


def test_ties_at_the_threshold_are_not_split():
    members, nonmembers = [1.0] * 10, [1.0] * 2 + [0.0] * 18  # at score 1 the FPR is 0.1
    assert stats.tpr_at_fpr(members, nonmembers, 0.05) == 0.0
    assert stats.tpr_at_fpr(members, nonmembers, 0.1) == 1.0
    assert stats.tpr_at_fpr([math.inf, 0.0], [0.0], 0.0) == 0.5
    assert stats.tpr_at_fpr([-math.inf], [-math.inf], 1.0) == 1.0


def test_dropping_points_under_reports():
    """scikit-learn's roc_curve drops collinear points by default; the point at 5% FPR may be among them."""
    metrics = pytest.importorskip("sklearn.metrics")
    members = nonmembers = np.arange(100)  # the diagonal: every point on the way is collinear with its neighbors
    labels, values = np.repeat([1, 0], 100), np.concatenate([members, nonmembers])
    false_rate, true_rate, _ = metrics.roc_curve(labels, values)
    assert true_rate[false_rate <= 0.05].max() < 0.05
    assert stats.tpr_at_fpr(members, nonmembers) == 0.05
    full_false, full_true, _ = metrics.roc_curve(labels, values, drop_intermediate=False)
    np.testing.assert_allclose(stats.roc_curve(members, nonmembers), (full_false, full_true), atol=1e-15)


@pytest.mark.parametrize("function", [stats.auc, stats.roc_curve, stats.tpr_at_fpr])
@pytest.mark.parametrize(
    ("members", "nonmembers", "named"),
    [([], [1.0], "members"), ([1.0], [], "nonmembers"), ([math.nan], [1.0], "members"), ([1.0], [math.nan], "nonmem")],
)
def test_scores_are_checked(function, members, nonmembers, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        function(members, nonmembers)


@pytest.mark.parametrize("fpr", [-0.1, 1.1, math.nan])
def test_tpr_refuses_a_rate_outside_the_unit_interval(fpr):
    with pytest.raises(ValueError, match="fpr"):
        stats.tpr_at_fpr([1.0], [0.0], fpr)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (2.5, 5), (-1, 3)])
def test_auc_standard_error_refuses(sizes):
    with pytest.raises(ValueError, match="n_"):
        stats.auc_standard_error(*sizes)


def test_import_stays_light():
    code = "import sys, memorization.stats, memorization.priors; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
