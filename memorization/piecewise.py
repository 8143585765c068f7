"""What every trade-off function can do, and the exact ones made of line segments.

A trade-off function f(α) bounds from below the type-II error of every test at level α. The abstract `TradeOff` says
what a curve offers; `PiecewiseLinear` offers it exactly for finitely many knots, and `from_distributions` finds the
knots of two finite laws. The named families of differential privacy are in `tradeoff`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike

from . import _checks, _knots
from ._knots import Array, Knots, Twin

ROUNDING = 1e-12  # how far knots given as floats may miss convexity, the diagonal or symmetry
MAX_KNOTS = 2**16  # a computed curve with more knots is thinned, and its error says what that costs
MAX_ATOMS = 2**22  # the product of two finite pairs is formed up to this size


def _like(result: Array) -> float | Array:
    """A Python float for a scalar, the array otherwise."""
    return float(result) if np.ndim(result) == 0 else result


class TradeOff(ABC):
    """A trade-off function f: [0, 1] → [0, 1], convex, continuous, nonincreasing, f(α) ≤ 1 − α.

    An algorithm is f-DP if every test that tells apart its outputs on two neighboring datasets, and errs with
    probability at most α under the first, errs with probability at least f(α) under the second.

    Attributes:
        symmetric: whether f equals its inverse f⁻¹(y) = inf{x : f(x) ≤ y}. A guarantee for both orders of a pair of
            neighbors is symmetric; of one that is not, take `symmetrize()`.
        error: how far f lies below the curve it stands for, at most, over all α; 0.0 for exact curves. Approximations
            are *certified, never optimistic*: up to float rounding (about 1e-15) they lie at or below the truth, so
            what they promise holds.

    Levels are resolved down to the smallest normal float, 2e-308; a curve that falls faster (ε over 708) falls by then.
    """

    symmetric: bool = True
    error: float = 0.0

    @abstractmethod
    def _pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        """(F(x), f(x)) from x and y = 1 − x, all four accurate relative to themselves."""

    def _inverse_pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        """The same for f⁻¹."""
        return self._pair(x, y)

    @abstractmethod
    def _finite(self) -> PiecewiseLinear:
        """The curve itself if it is piecewise linear, otherwise a piecewise-linear one at or below it."""

    def __call__(self, alpha: ArrayLike) -> float | Array:
        """f(α), the least type-II error at level `alpha`.

        Args:
            alpha: levels in [0, 1], a number or an array of any shape.

        Returns:
            f at every level, in the shape of `alpha`; a float for a number.

        Raises:
            ValueError: if a level is outside [0, 1] or NaN.
        """
        alpha = _checks.probabilities("alpha", alpha)
        return _like(self._pair(alpha, 1.0 - alpha)[1])

    def power(self, x: ArrayLike) -> float | Array:
        """F(x) = 1 − f(x), the greatest power at level `x`, accurate relative to itself: F(1e-100) is not 0.

        Args, Returns, Raises: as for calling f.
        """
        x = _checks.probabilities("x", x)
        return _like(self._pair(x, 1.0 - x)[0])

    @abstractmethod
    def advantage(self) -> float:
        """η(f) = max over α of 1 − α − f(α), the largest total variation distance that f allows (Theorem 4.1)."""

    @abstractmethod
    def advantage_level(self) -> float:
        """α†, a level that attains the advantage.

        For symmetric f it is the fixed point f(α†) = α† = (1 − η)/2, the middle one where several levels attain η (as
        for an even number of copies under pure DP); otherwise the smallest knot that attains it.
        """

    @abstractmethod
    def inverse(self) -> TradeOff:
        """f⁻¹, the trade-off function of the same pair of laws in the other order."""

    def threshold(self, tau: ArrayLike) -> float | Array:
        """α*(τ) = sup{α : F(α) ≤ τ}, the largest level whose power does not exceed `tau` (Theorem 5.1(iii)).

        F(α) ≤ τ says f(α) ≥ 1 − τ. A convex f that ends at 0 decreases strictly where it is positive, so for
        F(0) ≤ τ < 1 exactly one level has f(α) = 1 − τ and the supremum is that level, f⁻¹(1 − τ); for symmetric f it
        is f(1 − τ). At τ = 1 every level qualifies.

        Args:
            tau: tolerated powers in [F(0), 1], a number or an array.

        Raises:
            ValueError: if `tau` is outside [0, 1], or below F(0): no level is safe there.
        """
        tau = _checks.probabilities("tau", tau)
        least = float(self.power(0.0))
        if np.any(tau < least):
            raise ValueError(f"tau must lie in [F(0), 1] = [{least!r}, 1] (below, no level is safe), got {tau.min()!r}")
        level = self._inverse_pair(1.0 - tau, tau)[1]
        return _like(np.where(tau == 1.0, 1.0, level))

    @abstractmethod
    def group(self, k: int) -> TradeOff:
        """f^{(k)} = 1 − F∘…∘F, k times: what f-DP promises for datasets `k` steps apart.

        Args:
            k: number of steps, at least 1; `ValueError` otherwise.
        """

    def compose(self, other: TradeOff) -> TradeOff:
        """f ⊗ g: what two releases promise together, one f-DP and one g-DP.

        Exact for two Gaussian curves, and for piecewise-linear ones (pure and approximate DP, finite laws), whose
        product pair is formed outcome by outcome. A Gaussian curve that meets another kind is first replaced by the
        envelope of its tangents, and a product of more than `MAX_ATOMS` outcomes or `MAX_KNOTS` knots by the envelope
        of some of its supporting lines. Both lie below the truth, and `error` of the result bounds the distance: if
        f′ ≤ f ≤ f′ + e then f′ ⊗ g ≤ f ⊗ g ≤ f′ ⊗ g + e, since f ⊗ g is an infimum of averages of f.

        Raises:
            ValueError: if `other` is not a trade-off function.
        """
        if not isinstance(other, TradeOff):
            raise ValueError(f"other must be a trade-off function, got {other!r}")
        if self.advantage() == 0.0 or other.advantage() == 0.0:  # perfect privacy adds nothing
            return other if self.advantage() == 0.0 else self
        return _composed(self._finite(), other._finite())

    def symmetrize(self) -> TradeOff:
        """The largest symmetric trade-off function at or below f: the convex envelope of min(f, f⁻¹)."""
        return self


class PiecewiseLinear(TradeOff):
    """The trade-off function through the knots (`alpha`, `beta`), straight in between.

    Args:
        alpha: levels, strictly increasing from 0 to 1, shape (n,). A knot given twice counts once, and one that
            rounding has put above the line through its neighbors not at all.
        beta: f at those levels, nonincreasing, convex, at most 1 − alpha, 0 at the end, shape (n,).

    Raises:
        ValueError: if these are not the knots of a trade-off function (up to rounding, 1e-12).
    """

    def __init__(self, alpha: ArrayLike, beta: ArrayLike) -> None:
        alpha, beta = _checked(alpha, beta)
        self._set(_knots.convex(_knots.through(Twin.of_floats(alpha), Twin.of_floats(beta))))

    def _set(self, knots: Knots, symmetric: bool | None = None, error: float = 0.0) -> None:
        self._knots = knots
        self.symmetric = _looks_symmetric(knots) if symmetric is None else symmetric
        self.error = error

    @classmethod
    def _of(cls, knots: Knots, symmetric: bool | None = None, error: float = 0.0) -> PiecewiseLinear:
        """A curve of knots that are sound by construction; its symmetry is looked up if not known."""
        curve = PiecewiseLinear.__new__(PiecewiseLinear)
        curve._set(knots, symmetric, min(error, 1.0))
        return curve

    @property
    def alpha(self) -> Array:
        """Levels of the knots, shape (n,), increasing from 0 to 1."""
        return self._knots.alpha.value.copy()

    @property
    def beta(self) -> Array:
        """f at the knots, shape (n,), nonincreasing to 0."""
        return self._knots.beta.value.copy()

    def __repr__(self) -> str:
        kind = "symmetric" if self.symmetric else "not symmetric"
        error = f", error at most {self.error:.2g}" if self.error else ""
        return f"PiecewiseLinear({self._knots.size} knots, advantage {self.advantage():.6g}, {kind}{error})"

    def __eq__(self, other: object) -> bool:
        """Whether both are the same curve with the same knots."""
        if not isinstance(other, PiecewiseLinear):
            return NotImplemented
        mine, theirs = (c._knots.alpha + c._knots.beta for c in (self, other))
        return self.error == other.error and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def __hash__(self) -> int:
        return hash((self._knots.alpha.value.tobytes(), self._knots.beta.value.tobytes(), self.error))

    def _pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        return _knots.evaluate(self._knots, x, y)

    def _inverse_pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        # not through `symmetric`, which is looked up with a tolerance that the smallest levels would not survive
        return _knots.evaluate(_knots.mirror(self._knots), x, y)

    def _finite(self) -> PiecewiseLinear:
        return self

    def advantage(self) -> float:
        """η(f), the largest F − α over the knots."""
        return max(0.0, float(np.max(self._knots.gap)))

    def advantage_level(self) -> float:
        """α†: the fixed point of a symmetric f, otherwise the smallest knot that attains the advantage."""
        if self.symmetric:
            return _knots.diagonal(self._knots)[1]
        return float(self._knots.alpha.value[np.argmax(self._knots.gap)])

    def inverse(self) -> PiecewiseLinear:
        """f⁻¹: the knots mirrored in the diagonal (f itself if symmetric)."""
        if self.symmetric:
            return self
        return PiecewiseLinear._of(_knots.mirror(self._knots), False, self._sideways_error())

    def group(self, k: int) -> PiecewiseLinear:
        """f^{(k)}, exactly, until it has more than `MAX_KNOTS` knots (about k times those of f).

        Its knots are the preimages of f's knots along the orbit of F. Beyond the cap, and for an f with an error, the
        result lies at or below the truth and `error` bounds the distance.
        """
        k = _checks.integer("k", k, 1)
        result = self
        for bit in reversed(range(k.bit_length() - 1)):  # F^k by repeated squaring
            result = result._after(result)
            if k >> bit & 1:
                result = self._after(result)
        return result

    def _after(self, inner: PiecewiseLinear) -> PiecewiseLinear:
        """The curve with power G∘F, G that of self and F that of `inner`.

        Where G is too high by at most d and F by at most e, G∘F is by at most d + G(e) − G(0), G being concave.
        """
        symmetric = self.symmetric and inner.symmetric
        knots, loss = _knots.coarsen(_knots.after(self._knots, inner._knots), MAX_KNOTS, symmetric)
        carried = float(self.power(inner.error)) - float(self.power(0.0)) if inner.error else 0.0
        return PiecewiseLinear._of(knots, symmetric or None, self.error + carried + loss)

    def symmetrize(self) -> PiecewiseLinear:
        """The convex envelope of min(f, f⁻¹), exactly; f itself if symmetric."""
        if self.symmetric:
            return self
        lower = _knots.hull(self._knots, _knots.mirror(self._knots))
        return PiecewiseLinear._of(lower, True, max(self.error, self._sideways_error()))

    def _sideways_error(self) -> float:
        """How far f⁻¹ may lie below its truth: an error e of f moves f⁻¹ by e sideways, most near 0 where it falls."""
        if self.error == 0.0:
            return 0.0
        e = self.error
        start, end = _knots.evaluate(_knots.mirror(self._knots), np.array([0.0, e]), np.array([1.0, 1.0 - e]))[1]
        return float(start - end)


def from_distributions(p: ArrayLike, q: ArrayLike, symmetrize: bool = False) -> PiecewiseLinear:
    """T(P, Q), exactly: the least type-II error of testing H0: P against H1: Q, two laws on the same finite set.

    By the Neyman–Pearson lemma the best test at level α takes outcomes in decreasing order of q/p, so the knots are the
    running sums of p and of 1 − q in that order. Randomized response: `from_distributions([.6, .4], [.4, .6])(0.5)` is
    1/3.

    Args:
        p: probabilities under H0, shape (n,), or any common shape.
        q: probabilities under H1, same shape.
        symmetrize: return the convex envelope of min(f, f⁻¹), which speaks for both orders of the pair.

    Raises:
        ValueError: if either is not a probability vector, or their shapes differ.
    """
    p, q = np.asarray(p), np.asarray(q)
    if p.shape != q.shape:
        raise ValueError(f"p and q must have one shape, got {p.shape} and {q.shape}")
    p, q = _checks.distribution("p", p.ravel()), _checks.distribution("q", q.ravel())
    p, q = p / math.fsum(p), q / math.fsum(q)
    curve = PiecewiseLinear._of(_knots.from_atoms(p, q))
    return curve.symmetrize() if symmetrize else curve


def _composed(f: PiecewiseLinear, g: PiecewiseLinear) -> PiecewiseLinear:
    """f ⊗ g within the caps on size, with the error that they and the factors' own errors add up to."""
    small, large = sorted((f, g), key=lambda curve: curve._knots.size)
    few, loss = _knots.coarsen(small._knots, math.isqrt(MAX_ATOMS), small.symmetric)
    many, further = _knots.coarsen(large._knots, MAX_ATOMS // few.size, large.symmetric)
    symmetric = f.symmetric and g.symmetric
    knots, last = _knots.coarsen(_knots.product(few, many), MAX_KNOTS, symmetric)
    return PiecewiseLinear._of(knots, symmetric or None, f.error + g.error + loss + further + last)


def _looks_symmetric(knots: Knots) -> bool:
    """Whether f = f⁻¹ up to `ROUNDING` at the knots of both, hence everywhere."""
    back = _knots.mirror(knots)
    return all(
        np.all(np.abs(_knots.evaluate(one, other.alpha.value, other.alpha.rest)[1] - other.beta.value) <= ROUNDING)
        for one, other in ((knots, back), (back, knots))
    )


def _checked(alpha: ArrayLike, beta: ArrayLike) -> tuple[Array, Array]:
    """Knots as arrays without repetitions; `ValueError` if they are not those of a trade-off function."""
    alpha, beta = _checks.probabilities("alpha", alpha), _checks.probabilities("beta", beta)
    if alpha.ndim != 1 or alpha.shape != beta.shape or alpha.size < 2:
        raise ValueError(f"alpha and beta must be vectors of one length ≥ 2, got shapes {alpha.shape} and {beta.shape}")
    if alpha[0] != 0.0 or alpha[-1] != 1.0:
        raise ValueError(f"alpha must run from 0 to 1, got {float(alpha[0])!r} to {float(alpha[-1])!r}")
    if beta[-1] != 0.0:
        raise ValueError(f"beta must end at 0, got {float(beta[-1])!r}")
    fresh = np.concatenate([[True], (np.diff(alpha) != 0.0) | (np.diff(beta) != 0.0)])
    alpha, beta = alpha[fresh], beta[fresh]
    share = (alpha[1:-1] - alpha[:-2]) / np.where(alpha[2:] > alpha[:-2], alpha[2:] - alpha[:-2], 1.0)
    bump = beta[1:-1] - ((1.0 - share) * beta[:-2] + share * beta[2:])
    for demand, broken in (
        ("alpha must be strictly increasing", np.append(False, np.diff(alpha) <= 0.0)),
        ("beta must be nonincreasing in alpha", np.append(False, np.diff(beta) > 0.0)),
        ("beta must be at most 1 - alpha", beta > 1.0 - alpha + ROUNDING),
        ("beta must be convex in alpha", np.concatenate([[False], bump > ROUNDING, [False]])),
    ):
        if broken.any():
            at = int(np.argmax(broken))
            raise ValueError(f"{demand}, got the knot ({float(alpha[at])!r}, {float(beta[at])!r}) at position {at}")
    return alpha, beta
