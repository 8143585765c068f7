"""Trade-off functions out of privacy-loss distributions, with the accountant's discretization paid for.

dp-accounting keeps, for each order of a pair of neighbors, the law of the privacy loss ln(upper/lower) under `upper` on
a grid, rounded so that δ(ε) is never too small. Here such laws become curves that are never too high, and the distance
to the algorithm's own curve is bounded. dp-accounting itself is imported only to build a distribution.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _checks, _knots
from ._knots import Array, Index, Knots, Twin
from .piecewise import MAX_KNOTS, PiecewiseLinear

_CUT = 1e-15  # dp-accounting's default truncation of each composition


def from_privacy_loss(
    pld: Any, *, compositions: int = 1, step: Any | None = None, optimistic: Any | None = None
) -> PiecewiseLinear:
    """The symmetric f of a dp-accounting `PrivacyLossDistribution`, both orders, never optimistic.

    The accountant's δ(ε), the larger of its two orders, makes the algorithm (ε, δ(ε))-DP for every ε ≥ 0 at once, so

        f(α) = sup over ε ≥ 0 of max(0, 1 − δ(ε) − e^ε α, e^{−ε}(1 − δ(ε) − α)).

    δ is convex and piecewise linear in e^ε with bends at the losses of the grid (and where the orders cross), hence
    lines at the bends are enough and f is piecewise linear: in each order the outcomes of positive loss ℓ and mass p
    are a segment of width p e^{−ℓ} and steepness e^ℓ, mirrored in the diagonal; of the two orders' curves the convex
    envelope of the minimum is taken. Entries that the accountant's Fourier transforms left below zero are set to zero,
    and the largest of them times the number of entries, a bound on that noise, joins the mass at infinity. A curve of
    more than `piecewise.MAX_KNOTS` knots is thinned, never upwards.

    `error` bounds how far f lies below the algorithm's true curve. dp-accounting rounds each loss up by less than the
    grid's interval h, connect-the-dots too, hence n compositions by less than nh, and cuts tails of mass t: the true
    curve is at most f(e^{−nh} α) + t up to its fixed point and e^{nh}(f(α) + t) beyond. That always holds but is
    coarse. Sharper, if given:

    - `step`, one of `compositions` equal steps that make up `pld`, discretized by connect-the-dots. Its δ is exact at
      the grid and a chord in between, which the neighboring chords bound from below; such errors add up over steps.
    - `optimistic`, the same algorithm's distribution with `pessimistic_estimate=False`: the truth is in between.

    Args:
        pld: a `dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution`, with pessimistic rounding.
        compositions: how many discretized steps it is composed of.
        step: see above.
        optimistic: see above.

    Raises:
        ValueError: if `pld` (or `step`) was rounded optimistically or is no privacy-loss distribution.
    """
    compositions = _checks.integer("compositions", compositions, 1)
    curve, doubt = _curve("pld", pld, pessimistic=True)
    doubt += _CUT * compositions + curve.error
    bounds = [_shift_error(curve, compositions * _orders("pld", pld)[0], doubt)]
    if step is not None:
        bounds.append(compositions * chord_error(step) + doubt)
    if optimistic is not None:
        above, noise = _curve("optimistic", optimistic, pessimistic=False)
        bounds.append(_distance(above._knots, curve._knots) + above.error + noise)
    return PiecewiseLinear._of(curve._knots, True, min(bounds))


def _orders(name: str, pld: Any, pessimistic: bool = True) -> tuple[float, list[tuple[Index, Array, float]]]:
    """The grid's interval and, for the remove and the add order, (grid indices, masses, mass at infinity)."""
    orders = []
    for attribute in ("_pmf_remove", "_pmf_add"):
        pmf = getattr(pld, attribute, None)
        if not hasattr(pmf, "_infinity_mass"):
            raise ValueError(f"{name} must be a dp-accounting PrivacyLossDistribution, got {pld!r}")
        if pmf._pessimistic_estimate != pessimistic:
            wanted = "pessimistically (never optimistic)" if pessimistic else "optimistically"
            raise ValueError(f"{name} must be rounded {wanted}, got pessimistic_estimate={pmf._pessimistic_estimate}")
        if hasattr(pmf, "_loss_probs"):
            index = np.array(sorted(pmf._loss_probs), dtype=np.intp)
            masses = np.array([pmf._loss_probs[i] for i in index.tolist()], dtype=np.float64)
        else:
            masses = np.asarray(pmf._probs, dtype=np.float64)
            index = pmf._lower_loss + np.arange(masses.size)
        orders.append((index, masses, float(pmf._infinity_mass)))
    return float(pmf._discretization), orders if not pld._symmetric else orders[:1]


def _curve(name: str, pld: Any, pessimistic: bool) -> tuple[PiecewiseLinear, float]:
    """The symmetric curve of a distribution, its error the loss by thinning, and the mass that may be misplaced."""
    interval, orders = _orders(name, pld, pessimistic)
    knots, thinned, doubt = None, 0.0, 0.0
    for index, masses, infinite in orders:
        noise = max(0.0, -float(np.min(masses, initial=0.0))) * masses.size
        doubt = max(doubt, 2.0 * (infinite + noise if pessimistic else noise))
        if pessimistic:
            infinite += noise
        half = _of_positive_losses(index * interval, np.maximum(masses, 0.0), infinite)
        half, loss = _knots.coarsen(half, MAX_KNOTS, True)
        knots, thinned = half if knots is None else _knots.hull(knots, half), max(thinned, loss)
    knots, loss = _knots.coarsen(knots, MAX_KNOTS, True)
    return PiecewiseLinear._of(knots, True, thinned + loss), doubt


def _of_positive_losses(loss: Array, masses: Array, infinite: float) -> Knots:
    """The symmetric curve whose part above the diagonal has the segments of the positive losses (increasing)."""
    lower = masses * np.exp(-np.maximum(loss, 0.0))
    used = (loss > 0.0) & (lower > 0.0)
    infinite += float(np.sum(masses[(loss > 0.0) & (lower == 0.0)]))
    if infinite >= 1.0:
        return _knots.through(Twin.of_floats([0.0, 1.0]), Twin.of_floats([0.0, 0.0]))
    steep = np.append(np.exp(loss[used][::-1]), 1.0)
    alpha = Twin.of_sums(lower[used][::-1])
    power = Twin.of_sums(masses[used][::-1], infinite)
    # The steepest segments until the diagonal, which the next one crosses; beyond all losses the steepness is 1.
    until = int(np.argmax(np.append(alpha.value + power.value >= 1.0, True)))
    last = max(until - 1, 0)
    level = (power.rest[last] + steep[last] * alpha.value[last]) / (1.0 + steep[last])
    middle = Twin.of_floats([level])
    above = slice(last + 1)
    return _knots.reflect(
        _knots.joined(alpha.take(above), middle), _knots.joined(power.flip().take(above), middle), steep[above]
    )


def _shift_error(curve: PiecewiseLinear, shift: float, doubt: float) -> float:
    """Bound on the distance to the truth if losses were rounded up by at most `shift` and masses `doubt` moved.

    Then δ(ε) ≤ δ_true(ε − shift) + doubt for every ε ≥ 0.
    """
    alpha = curve._knots.alpha.value
    alpha = np.concatenate([alpha, np.minimum(1.0, alpha * math.exp(min(shift, 700.0)))])
    above = curve(alpha * math.exp(-shift)) - curve(alpha) + doubt
    below = math.expm1(min(shift, 700.0)) * curve.advantage_level() + math.exp(min(shift, 700.0)) * doubt
    return min(1.0, max(float(np.max(above)), below))


def chord_error(step: Any) -> float:
    """How far one step discretized by connect-the-dots lies below its true curve, in sup norm, at most.

    δ, convex in E = e^ε, is exact at the grid. Between two grid points it lies below their chord and above the
    neighboring chords, whose slopes differ by the masses a, b of the lower law at the two points: the triangle's
    height is ΔE·ab/(a + b). Beyond the grid's ends a chord from (0, 1) and the mass at infinity do the same.
    """
    interval, orders = _orders("step", step)
    worst = 0.0
    for index, masses, infinite in orders:
        gap = np.diff(index) * interval
        here, there = np.maximum(masses[:-1], 0.0), np.maximum(masses[1:], 0.0)
        height = np.expm1(gap) * here * there / np.maximum(np.exp(gap) * here + there, _knots.TINY)
        lower = masses * np.exp(np.minimum(-index * interval, 700.0))
        unreached = max(0.0, 1.0 - float(np.sum(lower)))
        excess = max(0.0, float(np.sum(masses)) + infinite - 1.0)
        first = min(unreached * math.exp(min(index[0] * interval, 700.0)), float(masses[0]))
        ends = first + infinite + excess
        worst = max(worst, float(np.max(height, initial=0.0)) + ends)
    return worst


def _distance(upper: Knots, lower: Knots) -> float:
    """Largest excess of one curve over another."""
    value, rest = (np.concatenate([getattr(k.alpha, part) for k in (upper, lower)]) for part in ("value", "rest"))
    return max(0.0, float(np.max(_knots.evaluate(upper, value, rest)[1] - _knots.evaluate(lower, value, rest)[1])))


def gaussian_step(sigma: float, rate: float, interval: float) -> Any:
    """One step of the Poisson-sampled Gaussian mechanism by connect-the-dots, as a `PrivacyLossDistribution`; rate < 1.

    dp-accounting takes the masses from second differences of δ, which cancel at negative losses, where δ is near 1: the
    add order gains 1e-8 to 1e-5 of mass per step. But one order's negative losses are the other's positive ones, seen
    from the other law, so both are put together from the two accurate halves, and what is missing has loss 0.
    """
    pld_pmf, distribution = _dp_accounting()
    raw = distribution.from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=interval)
    halves, infinite = [], []
    for index, masses, at_infinity in _orders("step", raw)[1]:
        half = np.zeros(max(int(index[-1]), 0) + 1)
        half[index[index > 0]] = masses[index > 0]
        halves.append(half)
        infinite.append(at_infinity)
    pmfs, missing = [], 0.0
    for own, other, at_infinity in zip(halves, halves[::-1], infinite, strict=True):
        seen = (other * np.exp(-interval * np.arange(other.size)))[:0:-1]
        pmfs.append(pld_pmf.DensePLDPmf(interval, -seen.size, np.concatenate([seen, own]), at_infinity, True))
        missing = max(missing, 1.0 - math.fsum(pmfs[-1]._probs) - at_infinity)
    for pmf in pmfs:
        pmf._probs[-pmf._lower_loss] = missing
    return distribution.PrivacyLossDistribution(*pmfs)


def cells(step: Any, compositions: int) -> int:
    """Size of the grid that composing a step takes."""
    from dp_accounting.pld import common

    sizes = [0]
    for pmf in (step._pmf_remove, step._pmf_add):
        low, high = common.compute_self_convolve_bounds(pmf._probs, compositions, _CUT)
        sizes += [pmf.size, high - low + 1]
    return max(sizes)


def _dp_accounting() -> tuple[Any, Any]:
    try:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    except ImportError:
        raise ImportError('this needs dp-accounting: pip install "memorization[lm]"') from None
    return pld_pmf, privacy_loss_distribution
