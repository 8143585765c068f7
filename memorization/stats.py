"""Estimates with their uncertainty: proportions, means, and the separation of two samples of scores.

Scores follow one convention everywhere: higher means more member-like.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special  # not scipy.stats, which takes longer to import than all the rest

from . import _checks

SIDES = ("two-sided", "lower", "upper")

Interval = tuple[float, float] | tuple[NDArray[np.float64], NDArray[np.float64]]


def clopper_pearson(
    successes: ArrayLike, trials: ArrayLike, confidence: float = 0.95, side: str = "two-sided"
) -> Interval:
    """The exact (Clopper-Pearson) confidence interval for a proportion, from independent trials.

    `side` says which error is controlled at 1 - confidence: "upper" gives (0, high) and "lower" (low, 1), each wrong
    with probability at most 1 - confidence; "two-sided" splits that in halves. A one-sided end is closer to the
    observed rate than the same end of the two-sided interval, so say which one is quoted. No trials give (0, 1).

    Args:
        successes: Whole numbers from 0 to `trials`, any shape that broadcasts with `trials`.
        trials: Whole numbers of at least 0.
        confidence: Strictly between 0 and 1.
        side: "two-sided", "lower" or "upper".

    Returns:
        The pair (low, high): floats for scalars, else arrays.

    Raises:
        ValueError: Counts are not whole or out of range, or `confidence` or `side` is not one of the allowed.
    """
    count, total = np.broadcast_arrays(_counts("successes", successes), _counts("trials", trials))
    if (count > total).any():
        at = np.argmax(count > total)
        raise ValueError(f"successes must be at most trials, got {count.flat[at]:g} of {total.flat[at]:g}")
    miss = _miss(confidence, side)
    low, high = np.zeros(count.shape), np.ones(count.shape)
    if side != "upper":
        some = count > 0  # with none, the lower end is 0 and the beta law below degenerates
        low[some] = special.betaincinv(count[some], total[some] - count[some] + 1, miss)
    if side != "lower":
        short = count < total
        high[short] = special.betainccinv(count[short] + 1, total[short] - count[short], miss)
    return (low, high) if count.ndim else (float(low), float(high))


def mean_interval(values: ArrayLike, confidence: float = 0.95, side: str = "two-sided") -> tuple[float, float]:
    """Student's interval for the mean of independent observations: exact for normal ones, else for large samples.

    Sides are those of `clopper_pearson`, the end that is not asked for being infinite. Equal observations give width
    0, which is the method's known failure and not certainty: for a rate near 0 or 1 use `clopper_pearson`.

    Args:
        values: At least two finite numbers, any shape.
        confidence: Strictly between 0 and 1.
        side: "two-sided", "lower" or "upper".

    Raises:
        ValueError: Fewer than two values, or one that is not finite.
    """
    sample = _checks.real_array("values", values, low_open=True, high_open=True).ravel()
    if sample.size < 2:
        raise ValueError(f"values must hold at least two numbers, got {sample.size}")
    half = -special.stdtrit(sample.size - 1, _miss(confidence, side)) * sample.std(ddof=1) / math.sqrt(sample.size)
    mean = sample.mean()
    return (
        -math.inf if side == "upper" else float(mean - half),
        math.inf if side == "lower" else float(mean + half),
    )


def auc(members: ArrayLike, nonmembers: ArrayLike) -> float:
    """The area under the ROC curve: the chance that a member outscores a non-member, a tie counting one half.

    Args:
        members: Scores of members, any shape; infinities are allowed.
        nonmembers: Scores of non-members.

    Raises:
        ValueError: Either sample is empty or holds a NaN.
    """
    inside, outside = _scores("members", members), np.sort(_scores("nonmembers", nonmembers))
    # Whole-number arithmetic (twice the Mann-Whitney statistic): exact however large the scores are.
    twice = np.searchsorted(outside, inside, side="left") + np.searchsorted(outside, inside, side="right")
    return int(twice.sum()) / (2 * inside.size * outside.size)


def auc_standard_error(n_members: ArrayLike, n_nonmembers: ArrayLike) -> float | NDArray[np.float64]:
    """The standard error of `auc` when members and non-members are scored alike, sqrt((n + m + 1) / (12 n m)).

    This is the Mann-Whitney null law without ties: exact for every continuous score law, and too large with ties.
    Measure a departure from 0.5 in it; it is not the error of an AUC that is far from 0.5.
    """
    inside, outside = _counts("n_members", n_members, 1), _counts("n_nonmembers", n_nonmembers, 1)
    error = np.sqrt((inside + outside + 1) / (12 * inside * outside))
    return error if error.ndim else float(error)


def roc_curve(members: ArrayLike, nonmembers: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every operating point a threshold can reach, (false-positive rates, true-positive rates), both ascending.

    The rule "score >= t" is read at t above all scores, giving (0, 0), then at each distinct score from the largest
    down, ending at (1, 1). No point is dropped: a tie is one step, and points on a straight run are kept.

    Raises:
        ValueError: Either sample is empty or holds a NaN.
    """
    inside, outside = np.sort(_scores("members", members)), np.sort(_scores("nonmembers", nonmembers))
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    # Counts over sizes, so that a rate is the double nearest to the decimal it would be written as.
    rates = [(sample.size - np.searchsorted(sample, thresholds)) / sample.size for sample in (outside, inside)]
    false_rate, true_rate = (np.concatenate([[0.0], rate]) for rate in rates)
    return false_rate, true_rate


def tpr_at_fpr(members: ArrayLike, nonmembers: ArrayLike, fpr: ArrayLike = 0.05) -> float | NDArray[np.float64]:
    """The largest true-positive rate of a threshold whose false-positive rate is at most `fpr`.

    The threshold is chosen on these scores, without interpolation or coin flips at ties. `fpr` is read as the decimal
    it was written as: 29 false positives in 100 do meet 0.29.

    Args:
        members: Scores of members, any shape; infinities are allowed.
        nonmembers: Scores of non-members.
        fpr: Allowed false-positive rate, one or several numbers in [0, 1].

    Raises:
        ValueError: Either sample is empty or holds a NaN, or `fpr` lies outside [0, 1].
    """
    allowed = _checks.probabilities("fpr", fpr)
    false_rate, true_rate = roc_curve(members, nonmembers)
    best = true_rate[np.searchsorted(false_rate, allowed, side="right") - 1]
    return best if allowed.ndim else float(best)


def _miss(confidence: float, side: str) -> float:
    """The error probability allowed at each end that `side` leaves open."""
    confidence = _checks.real("confidence", confidence, 0.0, 1.0, low_open=True, high_open=True)
    return (1.0 - confidence) / (2 if _checks.choice("side", side, SIDES) == "two-sided" else 1)


def _counts(name: str, value: ArrayLike, least: int = 0) -> NDArray[np.float64]:
    counts = _checks.real_array(name, value, least, math.inf, high_open=True)
    if (counts != np.floor(counts)).any():
        raise ValueError(f"{name} must be whole numbers of at least {least}, got {value!r}")
    return counts


def _scores(name: str, value: ArrayLike) -> NDArray[np.float64]:
    scores = _checks.real_array(name, value).ravel()
    if scores.size == 0:
        raise ValueError(f"{name} must hold at least one score, got none")
    return scores
