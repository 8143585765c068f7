"""What was extracted: verbatim matches, extraction strength, and (n, p)-discoverable extraction.

Arithmetic over token ids and log-probabilities, without a model; `extraction` re-exports all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks


def verbatim(predicted: ArrayLike, secrets: Sequence) -> NDArray[np.bool_]:
    """Whether each decoded continuation starts with its secret, token by token.

    Args:
        predicted: (n, length) from `greedy`, or (n, draws, length) from `sample`.
        secrets: n token-id sequences of at most `length` tokens each; lengths may differ.

    Returns:
        (n,) or (n, draws) booleans.

    Raises:
        ValueError: numbers that do not match, an empty secret, or one longer than what was decoded.
    """
    decoded = np.asarray(predicted)
    if decoded.ndim not in (2, 3):
        raise ValueError(f"predicted must have shape (n, length) or (n, draws, length), got {decoded.shape}")
    if len(decoded) != len(secrets):
        raise ValueError(f"secrets must have one entry for each of predicted ({len(decoded)}), got {len(secrets)}")
    matches = np.empty(decoded.shape[:-1], dtype=bool)
    for i, secret in enumerate(secrets):
        tokens = np.asarray(secret)
        if tokens.ndim != 1 or not 1 <= tokens.size <= decoded.shape[-1]:
            raise ValueError(
                f"secrets[{i}] must have 1 to {decoded.shape[-1]} tokens, the length decoded, got shape {tokens.shape}"
            )
        matches[i] = (decoded[i, ..., : tokens.size] == tokens).all(axis=-1)
    return matches


def extraction_strength(predicted: Sequence, target: Sequence) -> float | NDArray[np.float64]:
    """1 − min{k : predicted[k:] equals target[k:]}/length: the share of the target that its own start gives away.

    1 if every token is predicted, 0 if the last one is not. See `forced_predictions` for what to compare.

    Args:
        predicted: Token ids, or a list of such sequences.
        target: Token ids of the same length, or a list of as many sequences.

    Returns:
        A float for one pair, (n,) for lists.

    Raises:
        ValueError: an empty target, or lengths that differ.
    """
    if np.ndim(target[0] if len(target) else 0):
        if len(predicted) != len(target):
            raise ValueError(f"predicted must have one entry for each of target ({len(target)}), got {len(predicted)}")
        return np.array([extraction_strength(p, t) for p, t in zip(predicted, target, strict=True)])
    one, other = np.asarray(predicted), np.asarray(target)
    if other.ndim != 1 or other.size == 0 or one.shape != other.shape:
        raise ValueError(
            f"predicted and target must be equally long and not empty, got shapes {one.shape} and {other.shape}"
        )
    wrong = np.flatnonzero(one != other)
    return 1.0 - (int(wrong[-1]) + 1 if wrong.size else 0) / other.size


def _log_hazard(log_p: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(−log(1 − p)) from log p: −inf at p = 0, +inf at p = 1, and log p itself where p is tiny."""
    hazard = np.empty_like(log_p)
    tiny, likely = log_p < -37.0, log_p > -math.log(2.0)  # below −37: −log(1 − p) = p to the last bit
    middle = ~tiny & ~likely
    hazard[tiny] = log_p[tiny]
    hazard[middle] = np.log(-np.log1p(-np.exp(log_p[middle])))
    with np.errstate(divide="ignore"):
        hazard[likely] = np.log(-np.log(-np.expm1(log_p[likely])))
    return hazard


def discoverable_probability(log_p: ArrayLike, n: ArrayLike, log: bool = False) -> float | NDArray[np.float64]:
    """Chance that n independent draws hold the secret at least once: 1 − (1 − p)ⁿ (Hayes et al. 2025).

    Computed in logarithms throughout, so that p = e^−800 with n = e^800 is as good as p = 1/2 with n = 1.

    Args:
        log_p: log p, the secret's log-probability in nats, at most 0; −inf is p = 0.
        n: Number of draws, a real number of at least 0. Broadcast against `log_p`.
        log: Return the natural log of the chance, which does not underflow.

    Raises:
        ValueError: a positive log-probability, a negative or infinite n, NaN.
    """
    log_p = _checks.real_array("log_p", log_p, high=0.0)
    n = _checks.real_array("n", n, 0.0, high_open=True)
    log_p, n = np.broadcast_arrays(log_p, n)
    hazard = _log_hazard(np.atleast_1d(log_p)).reshape(log_p.shape)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        exponent = np.where(n == 0, -np.inf, np.log(n) + hazard)
        rate = np.exp(exponent)  # −log of the chance to miss in n draws
        if log:
            chance = np.where(rate < math.log(2.0), np.log(-np.expm1(-rate)), np.log1p(-np.exp(-rate)))
            chance = np.where(exponent < -37.0, exponent, chance)
        else:
            chance = -np.expm1(-rate)
    return float(chance) if chance.ndim == 0 else chance


def discoverable_queries(log_p: ArrayLike, p: ArrayLike, log: bool = False) -> float | NDArray[np.float64]:
    """The smallest real n with 1 − (1 − e^log_p)ⁿ ≥ p: how many draws make a secret (n, p)-discoverable.

    n = log(1 − p)/log(1 − e^log_p). It is 0 at p = 0, infinite if the secret is impossible or p = 1 is asked of an
    uncertain one, and 0 (an infimum: any n above 0 will do) if the secret is certain.

    Args:
        log_p: The secret's log-probability in nats, at most 0.
        p: The chance wanted, in [0, 1]. Broadcast against `log_p`.
        log: Return ln n, which stays finite where n overflows (log_p below −709).

    Raises:
        ValueError: a positive log-probability, p outside [0, 1], NaN.
    """
    log_p = _checks.real_array("log_p", log_p, high=0.0)
    p = _checks.probabilities("p", p)
    log_p, p = np.broadcast_arrays(log_p, p)
    hazard = _log_hazard(np.atleast_1d(log_p)).reshape(log_p.shape)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_n = np.where((p == 0) | (log_p == 0), -np.inf, np.log(-np.log1p(-p)) - hazard)
        result = log_n if log else np.exp(log_n)
    return float(result) if result.ndim == 0 else result
