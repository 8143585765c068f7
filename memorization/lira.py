"""The likelihood-ratio attack (LiRA; Carlini et al. 2022): how unusual is a model's statistic on one example?

Shadow models trained with and without the example say what the statistic looks like either way. LiRA needs data of
the training population and the means to train on it, beyond access to the model; the paper reports it apart for that
reason.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from . import _checks
from .shadows import Shadows, train_shadows

__all__ = ["Shadows", "lira_scores", "logit_statistic", "loss_statistic", "train_shadows"]

# Deviations below this (in units of the statistic) are read as this: shadows that agree to the last bit say no more.
DEVIATION_FLOOR = 1e-6
MODES = ("online", "offline")


def loss_statistic(log_p: ArrayLike) -> float | NDArray[np.float64]:
    """The log-loss statistic: log p itself, so that higher means more member-like.

    Args:
        log_p: Log-probability (or its mean a token) of each example, in nats, at most 0.
    """
    log_p = _checks.real_array("log_p", log_p, high=0.0)
    return float(log_p) if log_p.ndim == 0 else log_p


def logit_statistic(log_p: ArrayLike, resolution: float = 0.0) -> float | NDArray[np.float64]:
    """The logit-scaled confidence log p − log(1 − p), which is nearer to a Gaussian than p or log p.

    Accurate at both ends: about log p where p is tiny (log p = −800 too), about −log(−log p) near p = 1. Exactly
    p = 1 gives +inf, p = 0 −inf.

    Args:
        log_p: Log-probability (or its mean a token) of each example, in nats, at most 0.
        resolution: 1 − p is read as at least this. A float32 log-probability does not resolve less than 2**-24, and
            `lira_scores` wants finite numbers.
    """
    log_p = _checks.real_array("log_p", log_p, high=0.0)
    floor = _checks.real("resolution", resolution, 0.0, 1.0, high_open=True)
    with np.errstate(divide="ignore"):
        # log(1 − e^x): through expm1 near 0, through log1p elsewhere
        near = log_p > -math.log(2.0)
        log_miss = np.where(near, np.log(-np.expm1(np.where(near, log_p, -1.0))), np.log1p(-np.exp(log_p)))
        log_miss = np.maximum(log_miss, np.log(floor))
    statistic = log_p - log_miss
    return float(statistic) if statistic.ndim == 0 else statistic


STATISTICS = {"logit": logit_statistic, "loss": loss_statistic}


def _law(
    name: str, stats: ArrayLike | None, examples: int, pooled: bool, ddof: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation (examples,) of each example's shadows, NaN entries left out."""
    values = np.asarray(np.nan if stats is None else stats, dtype=np.float64)
    if values.ndim != 2 or len(values) != examples:
        raise ValueError(f"{name} must have shape ({examples}, shadows), got {values.shape if values.ndim else stats}")
    applies = ~np.isnan(values)
    if np.isinf(values).any():
        raise ValueError(f"{name} must be finite (NaN: the shadow does not apply), got an infinite entry")
    counts = applies.sum(axis=1)
    least = 1 if pooled else max(2, ddof + 1)
    if (counts < least).any():
        example = int(np.argmax(counts < least))
        raise ValueError(
            f"{name} must have at least {least} shadow(s) an example (not NaN)"
            f"{'' if pooled else ', or pooled=True must be set'}, got {counts[example]} for example {example}"
        )
    mean = np.where(applies, values, 0.0).sum(axis=1) / counts
    squares = (np.where(applies, values - mean[:, None], 0.0) ** 2).sum(axis=1)
    if pooled:
        if (counts - 1).sum() == 0 or (counts - ddof).sum() <= 0:
            raise ValueError(
                f"{name} must have more shadows for a pooled variance with ddof={ddof}, got {counts.sum()}"
            )
        variance = np.full(examples, squares.sum() / (counts - ddof).sum())
    else:
        variance = squares / (counts - ddof)
    return mean, np.maximum(np.sqrt(variance), DEVIATION_FLOOR)


def lira_scores(
    target: ArrayLike,
    in_stats: ArrayLike | None,
    out_stats: ArrayLike,
    mode: str = "online",
    pooled: bool = False,
    ddof: int = 0,
) -> float | NDArray[np.float64]:
    """LiRA's score of each example; higher means more member-like.

    Online: the log-likelihood ratio log N(t; μ_in, σ_in) − log N(t; μ_out, σ_out) of the target model's statistic t,
    with each law's mean and deviation taken over that example's shadow models. Offline: Φ((t − μ_out)/σ_out), the
    Gaussian distribution function of the out law alone, for when no shadow was trained on the example.

    Args:
        target: (examples,) statistics of the audited model, or one number with one-dimensional shadow statistics.
        in_stats: (examples, shadows) of shadows trained with the example; NaN marks one that does not apply (that
            was trained without it). Offline it is not read and may be None.
        out_stats: The same for shadows trained without it. The numbers of shadows may differ.
        mode: "online" or "offline".
        pooled: One variance for all examples (squared deviations from each example's own mean, summed over all,
            over the sum of shadows − ddof), which is steadier with few shadows; the means stay per example.
        ddof: Subtracted from the number of shadows in the variance's denominator: 0 fits by maximum likelihood.

    Returns:
        (examples,) scores, finite; a float for one number. A standard deviation below `DEVIATION_FLOOR` is read as it.

    Raises:
        ValueError: shapes that do not match, an unknown mode, an infinite or missing statistic, too few shadows: one
            an example at least if `pooled`, else two and more than ddof (one shadow has no variance).
    """
    mode = _checks.choice("mode", mode, MODES)
    ddof = _checks.integer("ddof", ddof)
    values = _checks.real_array("target", target, low_open=True, high_open=True)
    single = values.ndim == 0
    if values.ndim > 1 or values.size == 0:
        raise ValueError(f"target must be one number or (examples,), got shape {values.shape}")
    if single:
        values, out_stats = values[None], np.asarray(out_stats, dtype=np.float64)[None]
        in_stats = None if in_stats is None else np.asarray(in_stats, dtype=np.float64)[None]
    mean_out, deviation_out = _law("out_stats", out_stats, values.size, pooled, ddof)
    standard = (values - mean_out) / deviation_out
    if mode == "offline":
        scores = ndtr(standard)
    else:
        mean_in, deviation_in = _law("in_stats", in_stats, values.size, pooled, ddof)
        scores = np.log(deviation_out / deviation_in) + (standard**2 - ((values - mean_in) / deviation_in) ** 2) / 2
    return float(scores[0]) if single else scores
