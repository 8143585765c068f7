"""The referee: plays the games of Section 3 on a mechanism, and says how sure it is.

- Counterfactual memorization in its three forms (Definition 3.2 and Appendix A): replace-one, leave-one-out and
  population-conditional.
- The extraction game with a list budget (Definition 3.3).
- Membership: the best threshold between two release laws.

A mechanism is a function `release(datasets, rng)` from integer arrays (trials, n), one dataset a row, to an array with
one release a row; every draw comes from the generator given. Intervals are valid at every number of trials: none
leans on a central limit theorem. Where laws are finite, the second half of this module has the exact values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks, stats

FUNCTIONALS = ("replace-one", "leave-one-out", "population-conditional")
BATCH = 4_000_000  # documents held in memory at once
LARGEST_REJECTION = 2_000  # datasets drawn for each one kept, before giving up

Release = Callable[[NDArray, np.random.Generator], NDArray]


@dataclass(frozen=True)
class Estimate:
    """A Monte-Carlo estimate.

    Attributes:
        value: the estimate.
        low: lower end of an interval that covers the truth with probability at least `confidence`.
        high: its upper end.
        standard_error: estimated standard deviation of `value`.
        trials: independent runs behind it (for a difference of two groups: the size of the smaller).
        confidence: two-sided coverage.
    """

    value: float
    low: float
    high: float
    standard_error: float
    trials: int
    confidence: float


# --- Playing -------------------------------------------------------------------------------------------------------


def _bernstein(sample: NDArray, width: float, failure: float) -> float:
    """Half-width of the two-sided empirical Bernstein interval for values in a range of the given width.

    Maurer and Pontil (2009), Theorem 4, each side failing with probability at most `failure`/2.
    """
    log = math.log(4.0 / failure)
    return math.sqrt(2.0 * sample.var(ddof=1) * log / sample.size) + 7.0 * width * log / (3.0 * (sample.size - 1))


def _estimate(groups: list[NDArray], width: float, limits: tuple[float, float], confidence: float) -> Estimate:
    """The mean of the first group minus that of the second (if any), independent of one another."""
    value = float(groups[0].mean() - (groups[1].mean() if len(groups) == 2 else 0.0))
    half = sum(_bernstein(group, width, (1.0 - confidence) / len(groups)) for group in groups)
    error = math.sqrt(sum(group.var(ddof=1) / group.size for group in groups))
    low, high = max(limits[0], value - half), min(limits[1], value + half)
    return Estimate(value, low, high, error, min(group.size for group in groups), confidence)


def counterfactual_memorization(
    release: Release,
    score: Callable[[NDArray, int], NDArray],
    draw: Callable[[tuple[int, int], np.random.Generator], NDArray],
    x: int,
    n: int,
    *,
    functional: str = "replace-one",
    trials: int,
    rng: np.random.Generator,
    confidence: float = 0.99,
    score_range: tuple[float, float] = (0.0, 1.0),
) -> Estimate:
    """Estimate mem_h(A, D, n; x): how much higher the score of x is when the training data holds x.

    Args:
        release: the training algorithm A, `release(datasets, rng)`, with datasets (trials, n), or n − 1 documents
            for the leave-one-out baseline.
        score: the score h, `score(releases, x)` -> (trials,).
        draw: `draw(shape, rng)` fills an integer array with independent documents from D.
        x: the target document.
        n: number of documents in a dataset.
        functional: "replace-one" (Definition 3.2) compares x in a random slot with a fresh draw in that slot;
            "leave-one-out" with that slot removed; "population-conditional" compares datasets from D^n that happen
            to hold x with those that happen not to (Appendix A), by rejection.
        trials: datasets on each side, at least 2.
        rng: source of all randomness.
        confidence: coverage of the interval (empirical Bernstein, valid at any number of trials).
        score_range: the interval that h stays in; Theorem 4.1 needs one.

    Raises:
        ValueError: a score leaves its range, or rejection finds x present (or absent) too rarely.
    """
    _checks.choice("functional", functional, FUNCTIONALS)
    n, trials = _checks.integer("n", n, 1), _checks.integer("trials", trials, 2)
    confidence = _checks.real("confidence", confidence, 0.0, 1.0, low_open=True, high_open=True)
    width = _checks.finite("score_range", score_range[1] - score_range[0], 0.0, low_open=True)

    def scored(datasets: NDArray) -> NDArray:
        values = _checks.real_array("score", score(release(datasets, rng), x), *score_range)
        if values.shape != (len(datasets),):
            raise ValueError(f"score must have one value a dataset, {(len(datasets),)}, got shape {values.shape}")
        return values

    if functional == "population-conditional":
        groups = [_scores_given(scored, draw, x, n, present, trials, rng) for present in (True, False)]
        return _estimate(groups, width, (-width, width), confidence)

    differences = []
    for start in range(0, trials, _rows(n)):
        without = np.asarray(draw((min(_rows(n), trials - start), n), rng))
        rows, slot = np.arange(len(without)), rng.integers(n, size=len(without))
        planted = without.copy()
        planted[rows, slot] = x
        if functional == "leave-one-out":
            without = without[np.arange(n) != slot[:, None]].reshape(len(rows), n - 1)
        differences.append(scored(planted) - scored(without))
    return _estimate([np.concatenate(differences)], 2.0 * width, (-width, width), confidence)


def _rows(n: int) -> int:
    """How many datasets of n documents are played at once."""
    return max(1, BATCH // n)


def _scores_given(scored, draw, x: int, n: int, present: bool, trials: int, rng: np.random.Generator) -> NDArray:
    """Scores of the first `trials` datasets from D^n in which x is present (or absent)."""
    kept: list[NDArray] = []
    missing, drawn = trials, 0
    while missing > 0:
        if drawn > LARGEST_REJECTION * trials:
            found = f"{trials - missing} of {drawn} datasets"
            raise ValueError(f"x must be {'present' if present else 'absent'} more often, got {x!r} so in {found}")
        datasets = np.asarray(draw((min(_rows(n), max(trials, 1000)), n), rng))
        drawn += len(datasets)
        datasets = datasets[(datasets == x).any(axis=1) == present][:missing]
        if len(datasets):
            kept.append(scored(datasets))
            missing -= len(datasets)
    return np.concatenate(kept)


def _rate(successes: int, trials: int, confidence: float) -> Estimate:
    rate = successes / trials
    low, high = stats.clopper_pearson(successes, trials, confidence, side="two-sided")
    return Estimate(rate, float(low), float(high), math.sqrt(rate * (1.0 - rate) / trials), trials, confidence)


def extraction_game(
    prior: ArrayLike,
    release: Release,
    protocol: Callable[[NDArray, np.random.Generator], NDArray],
    m: int,
    *,
    trials: int,
    rng: np.random.Generator,
    confidence: float = 0.99,
    batch: int = 100_000,
) -> Estimate:
    """Play the extraction game (Definition 3.3) and report the success rate with its Clopper–Pearson interval.

    The protocol is secret-oblivious by construction: it is handed releases and randomness, never the secrets.

    Args:
        prior: (N,) law π of the secret, a number in 0, …, N − 1.
        release: `release(datasets, rng)`, where each dataset (a row of length 1) is the planted secret; copies and
            other documents are the release's own business.
        protocol: `protocol(releases, rng)` -> (trials, width) candidate secrets; negative entries are blanks.
        m: list budget.
        trials: independent runs, a fresh secret and a fresh model each.
        rng: source of all randomness.
        confidence: coverage of the interval.
        batch: runs played at once, fewer where a release is large; part of what fixes the draws.

    Raises:
        ValueError: a list holds more than m distinct candidates.
    """
    prior = _checks.distribution("prior", prior)
    m, trials = _checks.integer("m", m, 1), _checks.integer("trials", trials, 1)
    batch = _checks.integer("batch", batch, 1)
    successes = 0
    for start in range(0, trials, batch):
        secrets = rng.choice(prior.size, min(batch, trials - start), p=prior / prior.sum())
        candidates = np.asarray(protocol(release(secrets[:, None], rng), rng))
        _check_lists(candidates, len(secrets), m)
        successes += int((candidates == secrets[:, None]).any(axis=1).sum())
    return _rate(successes, trials, confidence)


def _check_lists(candidates: NDArray, trials: int, m: int) -> None:
    """`ValueError` unless every row is a list of at most m distinct candidates, blanks aside."""
    found = f"{candidates.dtype} of shape {candidates.shape}"
    if candidates.ndim != 2 or len(candidates) != trials or not np.issubdtype(candidates.dtype, np.integer):
        raise ValueError(f"protocol must return whole numbers of shape ({trials}, width), got {found}")
    if candidates.shape[1] > m:
        ordered = np.sort(candidates, axis=1)
        fresh = np.diff(ordered, axis=1, prepend=-1) != 0  # the first of each run of equal entries
        longest = int((fresh & (ordered >= 0)).sum(axis=1).max())
        if longest > m:
            raise ValueError(f"protocol must list at most m = {m} distinct candidates, got {longest}")


def best_threshold(planted: ArrayLike, absent: ArrayLike) -> tuple[float, bool]:
    """The threshold test with the largest advantage on these scores: (threshold, whether "at least" means present).

    The other direction says "present" below the threshold. Measured on the same scores the advantage is biased
    upward: measure it on fresh ones (`membership_advantage`).
    """
    planted, absent = (np.sort(np.asarray(scores, dtype=np.float64)) for scores in (planted, absent))
    cuts = np.unique(np.concatenate([planted, absent]))
    at_least = [1.0 - np.searchsorted(scores, cuts) / scores.size for scores in (planted, absent)]
    gap = at_least[0] - at_least[1]
    best = int(np.abs(gap).argmax())
    return float(cuts[best]), bool(gap[best] >= 0.0)


def membership_advantage(planted: ArrayLike, absent: ArrayLike, *, confidence: float = 0.99) -> Estimate:
    """True-positive minus false-positive rate of the best threshold, chosen on one half and measured on the other.

    Args:
        planted: (trials,) one real score per independent release with the target.
        absent: (trials',) the same without it.
        confidence: coverage of the interval (Clopper–Pearson on both rates, each at half the failure probability),
            for the advantage of the test chosen. No test's advantage exceeds the total variation, so `low` is a lower
            confidence bound for that as well.
    """
    planted, absent = _checks.real_array("planted", planted), _checks.real_array("absent", absent)
    for name, scores in (("planted", planted), ("absent", absent)):
        if scores.ndim != 1 or scores.size < 2:
            raise ValueError(f"{name} must be a vector of at least two scores, got shape {scores.shape}")
    middle = planted.size // 2, absent.size // 2
    threshold, above = best_threshold(planted[: middle[0]], absent[: middle[1]])
    rates = []
    for scores, half in zip((planted, absent), middle, strict=True):
        positive = (scores[half:] >= threshold) == above
        rates.append(_rate(int(positive.sum()), positive.size, 1.0 - (1.0 - confidence) / 2.0))
    true_positive, false_positive = rates
    return Estimate(
        true_positive.value - false_positive.value,
        true_positive.low - false_positive.high,
        true_positive.high - false_positive.low,
        math.hypot(true_positive.standard_error, false_positive.standard_error),
        min(true_positive.trials, false_positive.trials),
        confidence,
    )


# --- Exact values, where the laws are finite -----------------------------------------------------------------------


def _pair(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p, q = _checks.distribution("p", p), _checks.distribution("q", q)
    if p.shape != q.shape:
        raise ValueError(f"q must have as many entries as p, {p.size}, got {q.size}")
    return p, q


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """TV(p, q) of two laws on the same outcomes: the exact membership advantage of the best test."""
    p, q = _pair(p, q)
    return math.fsum(np.abs(p - q)) / 2.0


def exact_memorization(law_with: ArrayLike, law_without: ArrayLike, score: ArrayLike) -> float:
    """E[h] under `law_with` minus E[h] under `law_without`; `score` lists h on the same outcomes."""
    p, q = _pair(law_with, law_without)
    score = _checks.real_array("score", score, low_open=True, high_open=True)
    if score.shape != p.shape:
        raise ValueError(f"score must have one value an outcome, {p.size}, got shape {score.shape}")
    return math.fsum((p - q) * score)


def exact_extraction(prior: ArrayLike, laws: ArrayLike, m: int) -> float:
    """Success of the best protocol with list budget m: on each release, the m secrets of largest posterior.

    Args:
        prior: (N,) law of the secret.
        laws: (N, J) row z is the law of the release when z is planted.
        m: list budget.
    """
    prior, laws, m = _checks.distribution("prior", prior), np.asarray(laws), _checks.integer("m", m, 1)
    if laws.ndim != 2 or len(laws) != prior.size:
        raise ValueError(f"laws must have one row a secret, {prior.size}, got shape {laws.shape}")
    joint = prior[:, None] * [_checks.distribution(f"laws[{z}]", law) for z, law in enumerate(laws)]
    return math.fsum(np.sort(joint, axis=0)[-m:].ravel())


def _from_ratios(log_ratios: NDArray, mode: int) -> NDArray[np.float64]:
    """Normalize a law on 0, 1, … from log p(k)/p(k−1), summing outward from the mode so that rounding stays small."""
    up, down = np.cumsum(log_ratios[mode:]), -np.cumsum(log_ratios[:mode][::-1])[::-1]
    weight = np.exp(np.concatenate([down, [0.0], up]))
    return weight / math.fsum(weight)


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    if p in (0.0, 1.0):
        return np.eye(1, n + 1, n if p == 1.0 else 0)[0]
    k = np.arange(1, n + 1)
    return _from_ratios(np.log((n - k + 1) / k) + math.log(p) - math.log1p(-p), min(int((n + 1) * p), n))


def _poisson(rate: float) -> NDArray[np.float64]:
    if rate == 0.0:
        return np.array([1.0, 0.0])
    k = np.arange(1, int(rate + 12.0 * math.sqrt(rate) + 60.0))  # what lies beyond is below 1e-20
    return _from_ratios(math.log(rate) - np.log(k), int(rate))


def _count_laws(whole: NDArray, rest: NDArray, functional: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Copy-count laws with and without x, from the law of the count among n and among n − 1 draws."""
    planted = np.concatenate([[0.0], rest])[: whole.size]
    if functional == "population-conditional":
        absent = np.eye(1, whole.size)[0]
        occupied = np.concatenate([[0.0], whole[1:]])
        return occupied / math.fsum(occupied), absent
    without = whole if functional == "replace-one" else np.concatenate([rest, np.zeros(whole.size - rest.size)])
    return planted, without


def copy_count_laws(n: int, mass: float, functional: str = "replace-one") -> tuple[NDArray, NDArray]:
    """Laws (n+1,) of the number of copies of x that the two sides of a counterfactual functional train on.

    With D({x}) = `mass`: replace-one compares 1 + Binom(n−1, mass) with Binom(n, mass); leave-one-out with
    Binom(n−1, mass); population-conditional compares Binom(n, mass) given at least 1 with 0 (Appendix A).
    For a mechanism that reads the count alone, memorization is
    `exact_memorization(*copy_count_laws(n, mass, functional), mechanism.mean(np.arange(n + 1)))`.
    """
    by_chance = _checks.choice("functional", functional, FUNCTIONALS) == "population-conditional"
    n, mass = _checks.integer("n", n, 1), _checks.real("mass", mass, 0.0, 1.0, low_open=by_chance, high_open=by_chance)
    return _count_laws(_binomial(n, mass), _binomial(n - 1, mass), functional)


def poisson_copy_count_laws(rate: float, functional: str = "replace-one") -> tuple[NDArray, NDArray]:
    """The limit of `copy_count_laws` as n grows with n·mass = `rate` held fixed (Remark A.3).

    At rate 1, a single copy has mass 0.582 given presence, and 0.368 when planted.
    """
    by_chance = _checks.choice("functional", functional, FUNCTIONALS) == "population-conditional"
    law = _poisson(_checks.finite("rate", rate, 0.0, low_open=by_chance))
    return _count_laws(law, law[:-1], functional)


def conditional_gap(n: int, mass: float) -> float:
    """Largest |mem_COND − mem_RO| over all mechanisms and scores in [0, 1], exactly (Proposition A.2).

    Permutation-invariant mechanisms enter only through μ_k, the mean score given k copies, and any μ in [0, 1]^{n+1}
    can occur. The difference is linear in μ with coefficients c that sum to zero, so its largest and smallest values
    are ± the sum of the negative parts of c. At most 4·n·mass for n·mass ≤ 1/2, and (3/2)·n·mass as that vanishes.
    """
    occupied, _ = copy_count_laws(n, mass, "population-conditional")
    planted, whole = copy_count_laws(n, mass, "replace-one")
    coefficients = occupied - planted + whole
    coefficients[0] = -math.fsum(whole[1:])  # Pr[no copy] − 1; c_1 is never negative, and the only one that cancels
    return math.fsum(np.maximum(-np.delete(coefficients, 1), 0.0))
