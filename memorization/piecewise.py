"""Trade-off functions made of line segments, kept to full relative accuracy at both ends.

A trade-off function f(α) bounds the least type-II error of any test at level α. Everything here works on pairs: a level
beside its complement, f beside the power F = 1 − f, because 1 − 10⁻³⁰ is not a float and both 10⁻³⁰ are needed. The
abstract `TradeOff` states what every curve can do; `PiecewiseLinear` does it exactly for finitely many knots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks

Array = NDArray[np.float64]
ROUNDING = 1e-12  # how far knots given as floats may miss convexity, monotonicity or symmetry


def _like(result: Array) -> float | Array:
    """A Python float for a scalar, the array otherwise."""
    return float(result) if np.ndim(result) == 0 else result


class Twin(NamedTuple):
    """Numbers in [0, 1] beside their complements, each the unevaluated sum of a float and a small correction."""

    value: Array
    value_low: Array
    rest: Array
    rest_low: Array

    @classmethod
    def of_floats(cls, value: ArrayLike) -> Twin:
        """Exact twins of floats: the rounding error of 1 − v is kept."""
        value = np.asarray(value, dtype=np.float64)
        rest = 1.0 - value
        return cls(value, np.zeros_like(value), rest, (1.0 - rest) - value)

    @classmethod
    def of_decimals(cls, values: Sequence[Decimal], rests: Sequence[Decimal]) -> Twin:
        """Twins of high-precision decimals and of their complements."""
        parts: list[Array] = []
        for column in (values, rests):
            high = [float(v) for v in column]
            parts += [np.array(high), np.array([float(v - Decimal(h)) for v, h in zip(column, high, strict=True)])]
        return cls(*parts)

    @classmethod
    def of_masses(cls, masses: Array, before: float = 0.0) -> Twin:
        """Running sums `before`, `before` + m₀, … of a distribution, summed from the top and again from the bottom."""
        value, value_low = _running_sum(np.concatenate([[before], masses]))
        rest, rest_low = _running_sum(np.concatenate([[0.0], masses[::-1]]))
        return cls(value, value_low, rest[::-1], rest_low[::-1])

    def take(self, index: NDArray[np.intp]) -> Twin:
        """The entries at `index`."""
        return Twin(*(part[index] for part in self))

    def flip(self) -> Twin:
        """The complements."""
        return Twin(self.rest, self.rest_low, self.value, self.value_low)


def _running_sum(terms: Array) -> tuple[Array, Array]:
    """Cumulative sums as float plus correction: the rounding error of every addition is recovered exactly (Knuth)."""
    total = np.cumsum(terms)
    before = np.concatenate([[0.0], total[:-1]])
    added = total - before
    low = np.cumsum((before - (total - added)) + (terms - added))
    high = total + low
    return high, low - (high - total)


def _minus(a: Twin, b: Twin) -> Array:
    """a − b from whichever of the two representations is the finer one there."""
    from_values = (a.value - b.value) + (a.value_low - b.value_low)
    from_rests = (b.rest - a.rest) + (b.rest_low - a.rest_low)
    return np.where(a.value + b.value <= 1.0, from_values, from_rests)


class TradeOff(ABC):
    """A trade-off function f: [0, 1] → [0, 1], convex, continuous, nonincreasing, f(α) ≤ 1 − α.

    An algorithm is f-DP if every test that tells apart its outputs on two neighboring datasets and errs with
    probability at most α under the first errs with probability at least f(α) under the second.

    Attributes:
        symmetric: whether f equals its inverse f⁻¹(y) = inf{x : f(x) ≤ y}; bounds for both orders of a pair of
            neighbors need it (`symmetrize` otherwise).
        error: how far, at most, f lies below the curve it stands for, over all α. 0.0 for exact curves. Approximations
            are *certified, never optimistic*: they lie at or below the truth, so a guarantee read off them holds.
    """

    symmetric: bool = True
    error: float = 0.0

    @abstractmethod
    def _pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        """(F(x), f(x)) from x and y = 1 − x, all four accurate relative to themselves."""

    def __call__(self, alpha: ArrayLike) -> float | Array:
        """f(α), the least type-II error at level `alpha` in [0, 1] (`ValueError` outside)."""
        alpha = _checks.probabilities("alpha", alpha)
        return _like(self._pair(alpha, 1.0 - alpha)[1])

    def power(self, x: ArrayLike) -> float | Array:
        """F(x) = 1 − f(x), the greatest power at level `x` in [0, 1]; no cancellation, F(1e-100) is accurate."""
        x = _checks.probabilities("x", x)
        return _like(self._pair(x, 1.0 - x)[0])

    @abstractmethod
    def advantage(self) -> float:
        """η(f) = max over α of 1 − α − f(α): the total variation distance that f allows."""

    @abstractmethod
    def advantage_level(self) -> float:
        """α†, a level that attains the advantage.

        For symmetric f it is the fixed point f(α†) = α† = (1 − η)/2, the middle one where several levels attain η;
        otherwise the smallest knot that does.
        """

    @abstractmethod
    def inverse(self) -> TradeOff:
        """f⁻¹, the trade-off function of the same pair in the other order."""

    def threshold(self, tau: ArrayLike) -> float | Array:
        """α*(τ) = sup{α : F(α) ≤ τ}, the largest level whose power stays at or below `tau` (Theorem 5.1).

        F(α) ≤ τ means f(α) ≥ 1 − τ. Where it is positive, f is strictly decreasing, so for F(0) ≤ τ < 1 the supremum
        is the one α with f(α) = 1 − τ, that is f⁻¹(1 − τ), and f(1 − τ) when f is symmetric. At τ = 1 every α
        qualifies.

        Raises:
            ValueError: if `tau` is outside [0, 1] or below F(0), where no level is safe.
        """
        tau = _checks.probabilities("tau", tau)
        least = float(self.power(0.0))
        if np.any(tau < least):
            raise ValueError(f"tau must be at least F(0) = {least!r} (no level is safe below it), got {tau.min()!r}")
        found = self.inverse()._pair(1.0 - tau, tau)[1]
        return _like(np.where(tau == 1.0, 1.0, found))

    @abstractmethod
    def group(self, k: int) -> TradeOff:
        """f^{(k)} = 1 − F∘…∘F (k times): what f-DP promises for datasets `k` steps apart (k ≥ 1)."""

    @abstractmethod
    def _finite(self) -> PiecewiseLinear:
        """The curve itself if it is piecewise linear, otherwise a piecewise-linear curve below it."""

    def symmetrize(self) -> TradeOff:
        """The largest symmetric trade-off function below f: the convex envelope of min(f, f⁻¹)."""
        if self.symmetric:
            return self
        raise NotImplementedError


class PiecewiseLinear(TradeOff):
    """The trade-off function through the knots (`alpha`, `beta`), straight in between.

    Args:
        alpha: levels, strictly increasing from 0 to 1, shape (n,). A knot given twice counts once.
        beta: f at those levels, nonincreasing, convex, at most 1 − alpha, 0 at the end, shape (n,).

    Raises:
        ValueError: if the knots are not those of a trade-off function (beyond rounding), or not finite.
    """

    def __init__(self, alpha: ArrayLike, beta: ArrayLike) -> None:
        alpha, beta = _checked_knots(alpha, beta)
        self._set(Twin.of_floats(alpha), Twin.of_floats(beta))

    def _set(
        self, alpha: Twin, beta: Twin, *, slope: Array | None = None, symmetric: bool | None = None, error: float = 0.0
    ) -> None:
        """Fill in a curve whose knots are known to be sound; the symmetry is looked up if not given."""
        self._alpha, self._beta = alpha, beta
        if slope is None:
            slope = _slopes(alpha, beta)
        self._slope = slope
        self.error = error
        self.symmetric = self._looks_symmetric() if symmetric is None else symmetric

    @classmethod
    def _of(cls, alpha: Twin, beta: Twin, **known: object) -> PiecewiseLinear:
        curve = PiecewiseLinear.__new__(PiecewiseLinear)
        curve._set(alpha, beta, **known)  # type: ignore[arg-type]
        return curve

    @property
    def alpha(self) -> Array:
        """Levels of the knots, shape (n,), increasing from 0 to 1."""
        return self._alpha.value

    @property
    def beta(self) -> Array:
        """f at the knots, shape (n,), nonincreasing to 0."""
        return self._beta.value

    def __repr__(self) -> str:
        kind = "symmetric" if self.symmetric else "not symmetric"
        error = f", error at most {self.error:.2g}" if self.error else ""
        return f"PiecewiseLinear({self.alpha.size} knots, advantage {self.advantage():.6g}, {kind}{error})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PiecewiseLinear):
            return NotImplemented
        return self.error == other.error and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self._alpha + self._beta, other._alpha + other._beta, strict=True)
        )

    def __hash__(self) -> int:
        return hash((self.alpha.tobytes(), self.beta.tobytes(), self.error))

    def _pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        point = Twin(x, np.zeros_like(x), y, np.zeros_like(y))
        knots = self._alpha
        by_value = np.searchsorted(knots.value, x, side="right")
        by_rest = np.searchsorted(-knots.rest, -y, side="right")
        left = np.clip(np.where(x <= y, by_value, by_rest) - 1, 0, knots.value.size - 2)
        # A knot's correction may put it just above the point that equals its leading float.
        left = np.maximum(left - (_minus(point, knots.take(left)) < 0.0), 0)
        right = left + 1
        run_up = np.maximum(_minus(point, knots.take(left)), 0.0)
        run_down = np.maximum(_minus(knots.take(right), point), 0.0)
        slope, beta = self._slope[left], self._beta
        # Sums of nonnegative terms, so each side is accurate relative to itself.
        power = np.minimum(beta.rest[left] + slope * run_up, beta.rest[right])
        value = np.minimum(beta.value[right] + slope * run_down, beta.value[left])
        return power, value

    def _looks_symmetric(self) -> bool:
        """Whether f = f⁻¹ up to rounding: by convexity it is enough that f agrees with f⁻¹ at the knots of f⁻¹."""
        last = int(np.argmax(self.beta == 0.0)) + 1
        beta = self._beta.take(np.arange(last))
        return bool(np.all(np.abs(self._pair(beta.value, beta.rest)[1] - self.alpha[:last]) <= ROUNDING))

    def advantage(self) -> float:
        """η(f), the largest of F − α over the knots."""
        return float(max(0.0, np.max(_minus(self._beta.flip(), self._alpha))))

    def advantage_level(self) -> float:
        """α†: the fixed point of a symmetric f, else the smallest knot that attains the advantage."""
        if not self.symmetric:
            gap = _minus(self._beta.flip(), self._alpha)
            return float(self.alpha[np.argmax(gap)])
        right = max(1, int(np.argmax(self.beta <= self.alpha)))
        slope = self._slope[right - 1]
        return float((self.beta[right] + slope * self.alpha[right]) / (1.0 + slope))

    def inverse(self) -> PiecewiseLinear:
        """f⁻¹: the knots mirrored in the diagonal."""
        if self.symmetric:
            return self
        raise NotImplementedError

    def group(self, k: int) -> PiecewiseLinear:
        """f^{(k)}."""
        if _checks.integer("k", k, 1) == 1:
            return self
        raise NotImplementedError

    def _finite(self) -> PiecewiseLinear:
        return self


def _slopes(alpha: Twin, beta: Twin) -> Array:
    """−Δβ/Δα of every segment."""
    left, right = np.arange(alpha.value.size - 1), np.arange(1, alpha.value.size)
    return _minus(beta.take(left), beta.take(right)) / _minus(alpha.take(right), alpha.take(left))


def _checked_knots(alpha: ArrayLike, beta: ArrayLike) -> tuple[Array, Array]:
    """The knots as arrays without repetitions; `ValueError` if they are not those of a trade-off function."""
    alpha, beta = _checks.probabilities("alpha", alpha), _checks.probabilities("beta", beta)
    if alpha.ndim != 1 or alpha.shape != beta.shape or alpha.size < 2:
        raise ValueError(
            f"alpha and beta must be vectors of one length, at least 2; got shapes {alpha.shape} and {beta.shape}"
        )
    if alpha[0] != 0.0 or alpha[-1] != 1.0:
        raise ValueError(f"alpha must run from 0 to 1, got {alpha[0]!r} to {alpha[-1]!r}")
    if beta[-1] != 0.0:
        raise ValueError(f"beta must end at 0, got {beta[-1]!r}")
    fresh = np.concatenate([[True], (np.diff(alpha) != 0.0) | (np.diff(beta) != 0.0)])
    alpha, beta = alpha[fresh], beta[fresh]
    if np.any(np.diff(alpha) <= 0.0):
        where = int(np.argmax(np.diff(alpha) <= 0.0))
        raise ValueError(f"alpha must be strictly increasing, got {alpha[where]!r} before {alpha[where + 1]!r}")
    if np.any(np.diff(beta) > 0.0):
        where = int(np.argmax(np.diff(beta) > 0.0))
        raise ValueError(f"beta must be nonincreasing, got {beta[where]!r} before {beta[where + 1]!r}")
    if np.any(beta > 1.0 - alpha + ROUNDING):
        where = int(np.argmax(beta - (1.0 - alpha)))
        raise ValueError(f"beta must be at most 1 - alpha, got {beta[where]!r} at alpha = {alpha[where]!r}")
    share = (alpha[1:-1] - alpha[:-2]) / (alpha[2:] - alpha[:-2])
    bump = beta[1:-1] - ((1.0 - share) * beta[:-2] + share * beta[2:])
    if np.any(bump > ROUNDING):
        where = int(np.argmax(bump)) + 1
        raise ValueError(
            f"beta must be convex in alpha, got {beta[where]!r} above its neighbors at alpha = {alpha[where]!r}"
        )
    return alpha, beta
