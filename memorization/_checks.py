"""Argument checks shared by every module: each names the argument, the value and what is allowed."""

from __future__ import annotations

import math
import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

SUM_TOLERANCE = 1e-9  # how far from one the total of a probability vector may lie


def real_array(
    name: str,
    value: ArrayLike,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    low_open: bool = False,
    high_open: bool = False,
) -> NDArray[np.float64]:
    """Return `value` as a float64 array whose entries all lie in the stated interval (no NaN).

    Raises `ValueError` naming the argument, the first offending entry and the interval.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be real numbers, got {value!r}") from None
    below = array <= low if low_open else array < low
    above = array >= high if high_open else array > high
    bad = below | above | np.isnan(array)
    if low_open and low == -math.inf:
        bad = bad | (array == -math.inf)
    if bad.any():
        offender = float(array[bad].flat[0]) if array.ndim else float(array)
        opening, closing = "(" if low_open else "[", ")" if high_open else "]"
        raise ValueError(f"{name} must lie in {opening}{low:g}, {high:g}{closing}, got {offender!r}")
    return array


def real(name: str, value: float, low: float = -math.inf, high: float = math.inf, **ends: bool) -> float:
    """Like `real_array`, for one number."""
    array = real_array(name, value, low, high, **ends)
    if array.ndim:
        raise ValueError(f"{name} must be one number, got an array of shape {array.shape}")
    return float(array)


def finite(name: str, value: float, low: float = -math.inf, *, low_open: bool = False) -> float:
    """One finite number at or above `low` (above it, if `low_open`)."""
    return real(name, value, low, math.inf, low_open=low_open, high_open=True)


def probability(name: str, value: float) -> float:
    """One number in [0, 1]."""
    return real(name, value, 0.0, 1.0)


def probabilities(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """An array of numbers in [0, 1], of any shape."""
    return real_array(name, value, 0.0, 1.0)


def integer(name: str, value: int, low: int = 0, high: int | None = None) -> int:
    """One whole number in [low, high]; booleans and floats are refused."""
    allowed = f"a whole number of at least {low}" + ("" if high is None else f" and at most {high}")
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be {allowed}, got {value!r}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def distribution(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """A one-dimensional probability vector: entries in [0, 1] that sum to one."""
    array = probabilities(name, value)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} must be a non-empty vector of probabilities, got shape {array.shape}")
    total = math.fsum(array)
    if abs(total - 1.0) > SUM_TOLERANCE:
        raise ValueError(f"{name} must sum to 1 (within {SUM_TOLERANCE:g}), got a total of {total!r}")
    return array


def choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """One of the strings in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value
