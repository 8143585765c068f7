"""LiRA's statistics: against a slow scipy loop, mpmath, and a simulated attack."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from memorization import lira

FEW = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def audits(draw):
    """Targets and ragged shadow statistics (NaN: does not apply), at least three shadows an example on either side."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    examples, scale = draw(st.integers(1, 5)), draw(st.sampled_from([1e-3, 1.0, 50.0]))
    sides = []
    for shift in (1.0, 0.0):
        values = scale * (rng.normal(size=(examples, draw(st.integers(3, 8)))) + shift)
        gaps = rng.random(values.shape) < 0.4
        gaps[:, :3] = False
        sides.append(np.where(gaps, np.nan, values)[:, rng.permutation(values.shape[1])])
    return scale * rng.normal(size=examples), *sides


def slow_law(rows, i, pooled, ddof):
    own = [x for x in rows[i] if not math.isnan(x)]
    mean = math.fsum(own) / len(own)
    if not pooled:
        return stats.norm(mean, np.std(own, ddof=ddof))
    squares, degrees = [], 0
    for row in rows:
        row = [x for x in row if not math.isnan(x)]
        squares += [(x - math.fsum(row) / len(row)) ** 2 for x in row]
        degrees += len(row) - ddof
    return stats.norm(mean, math.sqrt(math.fsum(squares) / degrees))


@FEW
@given(audits(), st.booleans(), st.sampled_from([0, 1]))
def test_scores_match_a_slow_scipy_loop(audit, pooled, ddof):
    target, inside, outside = audit
    options = {"pooled": pooled, "ddof": ddof}
    online, offline = [], []
    for i, t in enumerate(target):
        law_in, law_out = slow_law(inside, i, pooled, ddof), slow_law(outside, i, pooled, ddof)
        online.append(law_in.logpdf(t) - law_out.logpdf(t))
        offline.append(law_out.cdf(t))
    np.testing.assert_allclose(lira.lira_scores(target, inside, outside, **options), online, rtol=1e-8, atol=1e-9)
    for unread in (None, inside, np.full_like(inside, np.nan)):
        scores = lira.lira_scores(target, unread, outside, mode="offline", **options)
        np.testing.assert_allclose(scores, offline, rtol=1e-9, atol=1e-300)
    if not pooled:
        one = lira.lira_scores(float(target[0]), inside[0], outside[0], **options)
        assert isinstance(one, float) and math.isclose(one, online[0], rel_tol=1e-8, abs_tol=1e-9)


def test_shadows_that_agree_and_single_shadows():
    same = np.full((2, 4), -1.0)
    online = lira.lira_scores([-1.0, -2.0], same, same - 1)
    assert np.isfinite(online).all() and online[0] > 0 > online[1]
    assert lira.lira_scores([-1.0, -2.0], same, same)[0] == 0.0
    np.testing.assert_array_equal(lira.lira_scores([-1.0, -2.0], None, same, mode="offline"), [0.5, 0.0])
    # One shadow has no variance of its own, but a pooled one serves it.
    outside = np.array([[-1.0, np.nan, np.nan], [-3.0, -1.0, np.nan]])
    with pytest.raises(ValueError, match="out_stats must have at least 2 shadow.*pooled=True.*got 1 for example 0"):
        lira.lira_scores([-1.0, -2.0], outside, outside)
    pooled = lira.lira_scores([0.0, 0.0], None, outside, mode="offline", pooled=True)
    deviation = math.sqrt(2 / 3)  # squares 0 + 1 + 1 over three shadows
    np.testing.assert_allclose(pooled, stats.norm.cdf([1 / deviation, 2 / deviation]), rtol=1e-12)


@pytest.mark.parametrize(("mode", "power"), [("online", 0.95), ("offline", 0.95)])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_simulated_attack_ranks_members_higher(mode, power, pooled):
    rng = np.random.default_rng(0)
    n, shadows = 400, 16
    hardness = rng.normal(0, 10, (n, 1))  # differs by example, so that the raw statistic tells little
    member = np.arange(n) % 2 == 0
    target = hardness[:, 0] + 3 * member + rng.normal(size=n)
    inside, outside = (hardness + shift + rng.normal(size=(n, shadows)) for shift in (3.0, 0.0))
    scores = lira.lira_scores(target, inside, outside, mode=mode, pooled=pooled)

    def area(values):
        return stats.mannwhitneyu(values[member], values[~member]).statistic / (n / 2) ** 2

    assert area(target) < 0.7 and area(scores) > power


@FEW
@given(st.one_of(st.floats(-800, 0, exclude_max=True), st.floats(-1e-8, -1e-40)))
def test_logit_statistic_at_sixty_digits(log_p):
    log_p = min(log_p, -1e-45)
    with mpmath.workdps(60):
        exact = float(mpmath.mpf(log_p) - mpmath.log(1 - mpmath.exp(mpmath.mpf(log_p))))
    assert math.isclose(lira.logit_statistic(log_p), exact, rel_tol=1e-13, abs_tol=1e-14)


def test_statistics_at_the_ends():
    logit = lira.logit_statistic
    assert logit(0.0) == math.inf and logit(-math.inf) == -math.inf and logit(-800.0) == -800.0
    assert abs(logit(-math.log(2))) < 1e-15
    assert math.isclose(logit(0.0, resolution=2.0**-24), 24 * math.log(2), rel_tol=1e-15)
    assert logit(-1.0, resolution=2.0**-24) == logit(-1.0)
    grid = logit(np.array([[-1.0, -2.0]]))
    assert grid.shape == (1, 2) and isinstance(logit(-1.0), float)
    assert lira.loss_statistic(-3.5) == -3.5 and set(lira.STATISTICS) == {"logit", "loss"}
    for bad in (0.1, math.nan):
        for statistic in lira.STATISTICS.values():
            with pytest.raises(ValueError, match="log_p"):
                statistic(bad)


TWO = np.array([[0.0, 1.0], [0.0, 1.0]])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0.0, 1.0], TWO, TWO), {"mode": "both"}, "mode must be one of 'online', 'offline'"),
        (([0.0, 1.0], None, TWO), {}, "in_stats must have shape"),
        (([0.0, 1.0], TWO[:1], TWO), {}, r"in_stats must have shape \(2, shadows\)"),
        (([0.0, 1.0], TWO, TWO[0]), {}, "out_stats must have shape"),
        (([0.0, math.inf], TWO, TWO), {}, "target must lie in"),
        (([0.0, math.nan], TWO, TWO), {}, "target must lie in"),
        (([], TWO, TWO), {}, "target"),
        (([0.0, 1.0], TWO, np.where(TWO == 1, -math.inf, TWO)), {}, "out_stats must be finite"),
        (([0.0, 1.0], TWO, TWO), {"ddof": 2}, "at least 3 shadow"),
        (([0.0, 1.0], TWO, TWO), {"ddof": -1}, "ddof"),
        (([0.0, 1.0], TWO, TWO), {"ddof": 2, "pooled": True}, "more shadows"),
        (([0.0, 1.0], TWO[:, :1], TWO), {"pooled": True}, "in_stats must have more shadows"),
        (([0.0, 1.0], np.full((2, 2), np.nan), TWO), {"pooled": True}, "at least 1 shadow"),
    ],
)
def test_bad_input(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        lira.lira_scores(*arguments, **options)
