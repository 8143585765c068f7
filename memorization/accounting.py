"""What DP-SGD costs: noise calibrated to a target ε, and ε by two accountants, under add/remove of one record.

The mechanism is the Poisson-sampled Gaussian one, composed over the steps. Accountants, all of Opacus: "rdp"
calibrates, as in Appendix F, over more orders than its default: those end at 63, and cannot certify ε = 0.05 at
δ = 2.5e-5 with any noise. "prv" is tighter as a rule and reported beside it; where it gives up, which it does silently
(ε = inf), dp-accounting's privacy-loss distribution takes over and a warning says so. "gdp" is a central-limit
approximation that can report less than was spent, and is not used.

For the whole trade-off curve in place of one (ε, δ) see `tradeoff.dp_sgd`.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

import numpy as np
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

from . import _checks

# Rényi orders: Opacus's own, then on to where ε near 0.01 is decided.
ORDERS = (*RDPAccountant.DEFAULT_ALPHAS, *(2**power * step for power in range(5, 10) for step in (2, 3)))
TOLERANCE = 1e-3  # how far below its target, relatively, the calibrated ε may end
_PRV_ERROR = (0.01, 5e-4)  # of the PRV accountant's ε: relative, but at least this (finer grids take minutes)


@dataclass(frozen=True)
class Accounting:
    """What a run of the Poisson-sampled Gaussian mechanism costs, under add/remove of one record.

    Attributes:
        target_epsilon: the ε asked for, in nats; `inf` for a run without noise.
        delta: δ.
        noise_multiplier: standard deviation of the noise over the clipping norm.
        sample_rate: probability that a record joins a step's batch.
        steps: number of steps.
        epsilon_rdp: ε by Opacus's Rényi accountant, an upper bound.
        epsilon_prv: ε by numerical composition, an upper bound, tighter as a rule.
        prv_accountant: which accountant that was, "opacus-prv" or "dp-accounting-pld" ("none" without noise).
    """

    target_epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    epsilon_rdp: float
    epsilon_prv: float
    prv_accountant: str


def epsilon_rdp(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    """ε (nats) at δ by Opacus's Rényi accountant over `ORDERS`, an upper bound.

    Raises:
        ValueError: if an argument is out of range.
    """
    accountant = RDPAccountant()
    accountant.history = [_mechanism(noise_multiplier, sample_rate, steps)]
    delta = _delta(delta)
    with warnings.catch_warnings():
        # An order at the end of the list is a looser bound, not a wrong one.
        warnings.filterwarnings("ignore", message="Optimal order is")
        return max(0.0, float(accountant.get_epsilon(delta, alphas=list(ORDERS))))


def epsilon_prv(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> tuple[float, str]:
    """ε (nats) at δ by numerical composition of the privacy loss, an upper bound, and which accountant gave it.

    Opacus's PRV accountant, its error set to 1% of the Rényi ε (the default, 0.01 in all, is a fifth of ε = 0.05).
    Where that fails or returns no finite number, a `UserWarning` says so and dp-accounting's privacy-loss distribution
    is used instead.

    Raises:
        ValueError: if an argument is out of range.
    """
    mechanism, delta = _mechanism(noise_multiplier, sample_rate, steps), _delta(delta)
    coarse = epsilon_rdp(*mechanism, delta)
    accountant = PRVAccountant()
    accountant.history = [mechanism]
    relative, least = _PRV_ERROR
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # overflow on its way to the infinity caught below
            epsilon = float(accountant.get_epsilon(delta, eps_error=max(relative * coarse, least)))
        problem = "" if math.isfinite(epsilon) and epsilon >= 0.0 else f"returned {epsilon}"
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        problem = f"raised {type(error).__name__}: {error}"
    if not problem:
        return epsilon, "opacus-prv"
    warnings.warn(
        f"Opacus's PRV accountant {problem} at noise multiplier {mechanism[0]:g}, sample rate {mechanism[1]:g}, "
        f"{mechanism[2]} steps; dp-accounting's privacy-loss distribution is used instead",
        stacklevel=2,
    )
    return _epsilon_pld(*mechanism, delta, interval=1e-3 * max(coarse, 1e-2)), "dp-accounting-pld"


def _epsilon_pld(noise_multiplier: float, sample_rate: float, steps: int, delta: float, interval: float) -> float:
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    step = dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier))
    accountant = PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(dp_event.SelfComposedDpEvent(step, steps)).get_epsilon(delta))


def calibrate(epsilon: float, delta: float, sample_rate: float, steps: int) -> Accounting:
    """The least noise whose ε by the Rényi accountant is at most the target, with the bill by both accountants.

    Args:
        epsilon: target ε in nats, above 0; `inf` for no noise.
        delta: δ in (0, 1).
        sample_rate: probability that a record joins a step's batch, in (0, 1].
        steps: number of steps.

    Raises:
        ValueError: if an argument is out of range, or no noise multiplier reaches the target at this δ.
    """
    target = _checks.real("epsilon", epsilon, 0.0, low_open=True)
    delta = _delta(delta)
    _, rate, steps = _mechanism(1.0, sample_rate, steps)
    if math.isinf(target):
        return Accounting(target, delta, 0.0, rate, steps, math.inf, math.inf, "none")
    try:
        sigma = _least_noise(target, delta, rate, steps)
    except ValueError as error:
        raise ValueError(
            f"epsilon must be one that Rényi accounting can certify at delta {delta:g}, got {target:g} ({error})"
        ) from None
    prv, name = epsilon_prv(sigma, rate, steps, delta)
    return Accounting(target, delta, sigma, rate, steps, epsilon_rdp(sigma, rate, steps, delta), prv, name)


@functools.lru_cache(maxsize=256)
def _least_noise(target: float, delta: float, rate: float, steps: int) -> float:
    """Opacus's bisection, its tolerance made relative."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is")
        return float(
            get_noise_multiplier(
                target_epsilon=target,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=TOLERANCE * target,
                alphas=list(ORDERS),
            )
        )


def _mechanism(noise_multiplier: float, sample_rate: float, steps: int) -> tuple[float, float, int]:
    """The checked triple that Opacus calls a history entry."""
    return (
        _checks.finite("noise_multiplier", noise_multiplier, 0.0, low_open=True),
        _checks.real("sample_rate", sample_rate, 0.0, 1.0, low_open=True),
        _checks.integer("steps", steps, 1),
    )


def _delta(delta: float) -> float:
    return _checks.real("delta", delta, 0.0, 1.0, low_open=True, high_open=True)
