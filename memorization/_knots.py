"""Arithmetic on the knots of convex piecewise-linear trade-off functions, accurate relative to both ends.

1 − 10⁻³⁰ is not a float, yet 10⁻³⁰ and its complement both matter: a level of 10⁻³⁰ is a secret of 100 bits, and an f
of 10⁻³⁰ is what survives at ε = 69. So every number here is a `Twin`, kept beside its complement. A curve is then its
knots (α, β), and its segments are the outcomes of a pair of finite laws: a segment of width Δα and slope −s is an
outcome of probability Δα under the first law and s·Δα under the second. `tradeoff` and `piecewise` are the public face.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Index = NDArray[np.intp]

TINY = float(np.finfo(np.float64).tiny)  # levels below 2e-308 are not resolved
SAME = 1e-14  # knots and slopes this close, relative to themselves, are one up to rounding


class Twin(NamedTuple):
    """Numbers in [0, 1] beside their complements, each the unevaluated sum of a float and a small correction."""

    value: Array
    value_low: Array
    rest: Array
    rest_low: Array

    @classmethod
    def of_pair(cls, value: Array, rest: Array) -> Twin:
        """Numbers and complements already at hand as floats."""
        return cls(value, np.zeros_like(value), rest, np.zeros_like(rest))

    @classmethod
    def of_floats(cls, value: ArrayLike) -> Twin:
        """Exact twins of floats: the rounding error of 1 − v is kept."""
        value = np.asarray(value, dtype=np.float64)
        rest = 1.0 - value
        return cls(value, np.zeros_like(value), rest, (1.0 - rest) - value)

    @classmethod
    def of_decimals(cls, values: Sequence[Decimal]) -> Twin:
        """Twins of high-precision decimals (in a context that is precise enough for their complements)."""
        parts: list[Array] = []
        for column in (values, [1 - v for v in values]):
            high = [float(v) for v in column]
            parts += [np.array(high), np.array([float(v - Decimal(h)) for v, h in zip(column, high, strict=True)])]
        return cls(*parts)

    @classmethod
    def of_sums(cls, masses: Array, before: float = 0.0) -> Twin:
        """Running sums `before`, `before` + m₀, … with their complements."""
        value, low = _running_sum(np.concatenate([[before], masses]))
        rest = 1.0 - value
        return cls(value, low, rest, ((1.0 - rest) - value) - low)

    @classmethod
    def of_masses(cls, masses: Array, before: float = 0.0) -> Twin:
        """Running sums `before`, `before` + m₀, … of masses totalling 1, added up from the top and from the bottom."""
        value, value_low = _running_sum(np.concatenate([[before], masses]))
        rest, rest_low = (part[::-1] for part in _running_sum(np.concatenate([[0.0], masses[::-1]])))
        for total, low in ((value, value_low), (rest, rest_low)):
            low[total >= 1.0] = 0.0  # sums may end an ulp beyond
            np.minimum(total, 1.0, out=total)
        value[-1], value_low[-1] = 1.0, 0.0
        if before == 0.0:
            rest[0], rest_low[0] = 1.0, 0.0
        return cls(value, value_low, rest, rest_low)

    def take(self, index: Index | slice) -> Twin:
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


def joined(*twins: Twin) -> Twin:
    """Twins one after the other."""
    return Twin(*(np.concatenate(parts) for parts in zip(*twins, strict=True)))


def minus(a: Twin, b: Twin) -> Array:
    """a − b from whichever of the two representations is the finer one there."""
    from_values = (a.value - b.value) + (a.value_low - b.value_low)
    from_rests = (b.rest - a.rest) + (b.rest_low - a.rest_low)
    return np.where(a.value + b.value <= 1.0, from_values, from_rests)


class Knots(NamedTuple):
    """A convex piecewise-linear f: n knots (α, β = f(α)), α from 0 to 1, and the n − 1 steepnesses −Δβ/Δα."""

    alpha: Twin
    beta: Twin
    slope: Array

    @property
    def size(self) -> int:
        """Number of knots."""
        return self.alpha.value.size

    @property
    def width(self) -> Array:
        """Δα of every segment."""
        return minus(self.alpha.take(slice(1, None)), self.alpha.take(slice(-1)))

    @property
    def gap(self) -> Array:
        """F − α at the knots."""
        return minus(self.beta.flip(), self.alpha)


def through(alpha: Twin, beta: Twin, slope: Array | None = None) -> Knots:
    """The curve through knots in order, without those that repeat their successor up to rounding.

    Of two knots at one level the later, lower one stays: never optimistic. `slope` gives the segments' steepness where
    it is known better than from differences.
    """
    knots = Knots(alpha, beta, np.full(alpha.value.size - 1, np.nan) if slope is None else slope)
    while True:
        left, right = knots.alpha.take(slice(-1)), knots.alpha.take(slice(1, None))
        above, below = knots.beta.take(slice(-1)), knots.beta.take(slice(1, None))
        rise, fall = minus(right, left), minus(above, below)
        near_rise = rise <= SAME * np.minimum(right.value, right.rest)
        near_fall = fall <= SAME * np.minimum(above.value, above.rest)
        drop = (near_rise & near_fall) | (rise < TINY)
        if not drop.any():
            break
        knots = _without(knots, np.append(drop, False))
        for part, start in zip(knots.alpha, (0.0, 0.0, 1.0, 0.0), strict=True):
            part[0] = start  # the first knot may have been the one to go
    return knots._replace(slope=np.where(np.isnan(knots.slope), fall / rise, knots.slope))


def convex(knots: Knots) -> Knots:
    """The curve without knots that rounding has put above the line through their neighbors; nowhere higher."""
    while True:
        drop = np.concatenate([[False], knots.slope[1:] > knots.slope[:-1], [False]])
        if not drop.any():
            return knots
        thinned = _without(knots, drop)
        knots = through(thinned.alpha, thinned.beta, thinned.slope)


def _without(knots: Knots, drop: NDArray[np.bool_]) -> Knots:
    """The curve without some knots; the steepness next to them is left open (NaN)."""
    kept = np.flatnonzero(~drop)
    slope = np.where(np.diff(kept) == 1, knots.slope[kept[:-1]], np.nan)
    return Knots(knots.alpha.take(kept), knots.beta.take(kept), slope)


def evaluate(knots: Knots, x: Array, y: Array) -> tuple[Array, Array]:
    """(F(x), f(x)) for x and y = 1 − x: sums of nonnegative terms, so each is accurate relative to itself."""
    point = Twin.of_pair(x, y)
    alpha, beta = knots.alpha, knots.beta
    by_value = np.searchsorted(alpha.value, x, side="right")
    by_rest = np.searchsorted(-alpha.rest, -y, side="right")
    left = np.clip(np.where(x <= y, by_value, by_rest) - 1, 0, knots.size - 2)
    # A knot's correction may put it just above a point that equals its leading float.
    left = np.maximum(left - (minus(point, alpha.take(left)) < 0.0), 0)
    right = left + 1
    run_up = np.maximum(minus(point, alpha.take(left)), 0.0)
    run_down = np.maximum(minus(alpha.take(right), point), 0.0)
    slope = knots.slope[left]
    power = np.minimum(beta.rest[left] + slope * run_up, beta.rest[right])
    return power, np.minimum(beta.value[right] + slope * run_down, beta.value[left])


def mirror(knots: Knots) -> Knots:
    """f⁻¹(y) = inf{x : f(x) ≤ y}: the knots mirrored in the diagonal; where f(0) < 1, f⁻¹ is 0 from there on."""
    first_zero = int(np.argmax(knots.beta.value == 0.0))
    back = np.arange(first_zero, -1, -1)
    alpha, beta = knots.beta.take(back), knots.alpha.take(back)
    slope = 1.0 / np.maximum(knots.slope[:first_zero][::-1], TINY)
    if alpha.value[-1] < 1.0:
        end = Twin.of_floats([1.0])
        alpha, beta, slope = joined(alpha, end), joined(beta, end.flip()), np.append(slope, 0.0)
    return through(alpha, beta, slope)


def from_atoms(p: Array, q: Array) -> Knots:
    """T(P, Q) of finite laws with masses p and q (Neyman–Pearson): outcomes enter the test by decreasing q/p.

    Outcomes of one ratio (up to rounding) are merged; where p = 0 (or no normal float) they make F(0).
    """
    free = p < TINY
    before = float(np.sum(q[free]))
    p, q = p[~free], q[~free]
    ratio = q / p
    order = np.argsort(-ratio, kind="stable")
    p, q, ratio = p[order], q[order], ratio[order]
    starts = np.flatnonzero(np.concatenate([[True], ratio[1:] < ratio[:-1] * (1.0 - SAME)]))
    p, q = np.add.reduceat(p, starts), np.add.reduceat(q, starts)
    return convex(through(Twin.of_masses(p), Twin.of_masses(q, before).flip(), q / p))


def product(f: Knots, g: Knots) -> Knots:
    """f ⊗ g: the trade-off function of the product of the two pairs of laws."""
    (p, q), (r, s) = _atoms(f), _atoms(g)
    return from_atoms(np.outer(p, r).ravel(), np.outer(q, s).ravel())


def _atoms(knots: Knots) -> tuple[Array, Array]:
    """Masses of the finite pair that f is the trade-off function of; the first atom is F(0), which P never draws."""
    width = knots.width
    return np.concatenate([[0.0], width]), np.concatenate([knots.beta.rest[:1], knots.slope * width])


def after(outer: Knots, inner: Knots) -> Knots:
    """1 − G∘F for power curves G (outer) and F (inner): knots of F, and preimages under F of knots of G."""
    lowest = Twin.of_floats([TINY])
    power, level = evaluate(mirror(inner), outer.alpha.rest, outer.alpha.value)
    inside = (outer.alpha.value > inner.beta.rest[0]) & (outer.alpha.rest > 0.0)
    above, lost = inside & (level >= TINY), bool(np.any(inside & (level < TINY)))
    own = joined(inner.alpha, lowest) if lost else inner.alpha
    alpha = joined(own, Twin.of_pair(level, power).take(above))
    reached = evaluate(inner, own.value, own.rest)
    beta = joined(Twin.of_pair(*evaluate(outer, *reached)[::-1]), outer.beta.take(above))
    # Both ways of ordering are needed: levels near 0 differ in their values only, levels near 1 in their complements.
    order = np.lexsort((-beta.value, -alpha.rest, alpha.value))
    return convex(through(alpha.take(order), beta.take(order)))


def diagonal(knots: Knots) -> tuple[int, float]:
    """Where f(α) = α: the segment's index and the level. The fixed point of a symmetric f."""
    left = max(0, int(np.argmax(knots.beta.value <= knots.alpha.value)) - 1)
    slope = knots.slope[left]
    return left, float((knots.beta.value[left] + slope * knots.alpha.value[left]) / (1.0 + slope))


def reflect(alpha: Twin, beta: Twin, slope: Array) -> Knots:
    """The symmetric curve with these knots at or above the diagonal, the last one on it, and `slope` ≥ 1 in between."""
    back = np.arange(alpha.value.size - 2, -1, -1)
    whole = joined(alpha, beta.take(back)), joined(beta, alpha.take(back))
    slope = np.concatenate([slope, 1.0 / slope[::-1]])
    if whole[0].value[-1] < 1.0:
        end = Twin.of_floats([1.0])
        whole, slope = (joined(whole[0], end), joined(whole[1], end.flip())), np.append(slope, 0.0)
    return convex(through(*whole, slope))


def hull(f: Knots, g: Knots) -> Knots:
    """The convex envelope of min(f, g), through supporting lines.

    For steepness s the envelope's supporting line is the lower of the two curves'. Between two neighboring values of s
    neither curve leaves its knot and their distance is linear in s, so a knot is on the envelope exactly if its curve
    is the lower one at an end of that interval.
    """
    steep = [np.minimum.accumulate(curve.slope) for curve in (f, g)]  # monotone despite rounding
    levels = -np.unique(-np.concatenate(steep))
    at = [np.concatenate([[0], np.searchsorted(-s, -levels, side="right")]) for s in steep]
    lift = minus(f.beta.take(at[0]).flip(), g.beta.take(at[1]).flip())
    lead = minus(f.alpha.take(at[0]), g.alpha.take(at[1]))
    right = np.append(lift[:-1] - levels * lead[:-1], 0.0)
    left = np.concatenate([lift[:1], right[:-1]])
    mine, theirs = at[0][(left >= 0.0) | (right >= 0.0)], at[1][(left < 0.0) | (right < 0.0)]
    alpha = joined(f.alpha.take(mine), g.alpha.take(theirs))
    beta = joined(f.beta.take(mine), g.beta.take(theirs))
    order = np.lexsort((-beta.value, -alpha.rest, alpha.value))
    return convex(through(alpha.take(order), beta.take(order)))


def coarsen(knots: Knots, size: int, symmetric: bool) -> tuple[Knots, float]:
    """A curve of at most about `size` knots at or below f, and how far below: the envelope of some of f's own lines.

    Half of the lines are chosen so that each step loses about as much, the other half evenly in log steepness, which
    keeps the far ends accurate relative to themselves. For a symmetric f the part above the diagonal is thinned and
    reflected.
    """
    if knots.size <= size:
        return knots, 0.0
    if symmetric:
        last, level = diagonal(knots)
        middle = Twin.of_floats([level])
        alpha = joined(knots.alpha.take(slice(last + 1)), middle)
        beta = joined(knots.beta.take(slice(last + 1)), middle)
        thin = reflect(*_supporting_lines(alpha, beta, knots.slope[: last + 1], size // 2))
    else:
        thin = convex(through(*_supporting_lines(knots.alpha, knots.beta, knots.slope, size)))
    exact = evaluate(knots, thin.alpha.value, thin.alpha.rest)[1]
    return thin, float(np.max(np.maximum(exact - thin.beta.value, 0.0)))


def _supporting_lines(alpha: Twin, beta: Twin, slope: Array, size: int) -> tuple[Twin, Twin, Array]:
    """Knots and steepness of the envelope of about `size` of the lines through given segments, both end lines included.

    Between kept lines a and b, a dropped segment of width w and steepness s is exchanged for one of steepness a and
    one of steepness b with the same total width and drop.
    """
    width = minus(alpha.take(slice(1, None)), alpha.take(slice(-1)))
    turn = np.append(np.maximum(slope[:-1] - slope[1:], 0.0), 0.0)
    loss = np.cumsum(np.sqrt(width * turn))
    tilt = -np.log(np.maximum(slope, TINY))
    kept = np.unique(
        np.concatenate(
            [np.searchsorted(track, np.linspace(track[0], track[-1], size // 2)).clip(0, slope.size - 1)
             for track in (loss, np.maximum.accumulate(tilt))]
            + [[0, slope.size - 1]]
        )
    )  # fmt: skip
    a, b = kept[:-1], kept[1:]
    gone = np.setdiff1d(np.arange(slope.size), kept, assume_unique=True)
    group = np.searchsorted(kept, gone) - 1
    span = np.where(slope[a] > slope[b], slope[a] - slope[b], 1.0)
    to_a = np.bincount(group, width[gone] * np.maximum(slope[gone] - slope[b][group], 0.0), a.size) / span
    to_b = np.bincount(group, width[gone] * np.maximum(slope[a][group] - slope[gone], 0.0), a.size) / span
    new_alpha = Twin.of_pair(alpha.value[a + 1] + to_a, alpha.rest[b] + to_b)
    new_beta = Twin.of_pair(beta.value[b] + slope[b] * to_b, beta.rest[a + 1] + slope[a] * to_a)
    ends = [0], [slope.size]
    return (
        joined(alpha.take(ends[0]), new_alpha, alpha.take(ends[1])),
        joined(beta.take(ends[0]), new_beta, beta.take(ends[1])),
        slope[kept],
    )
