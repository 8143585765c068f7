"""Trade-off functions: what differential privacy promises, as a curve of type-I against type-II error."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal

import numpy as np
from scipy import special

from . import _checks
from .piecewise import Array, PiecewiseLinear, TradeOff, Twin

__all__ = ["ApproxDP", "GaussianDP", "PiecewiseLinear", "PureDP", "TradeOff"]

_DIGITS = decimal.Context(prec=80, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


class ApproxDP(PiecewiseLinear):
    """f_{ε,δ}(α) = max{0, 1 − δ − e^ε α, e^{−ε}(1 − δ − α)}, the curve of (ε, δ)-DP.

    Args:
        epsilon: ε in nats, finite and at least 0 (0 with δ = 0 is perfect privacy).
        delta: δ in [0, 1]; at 1 nothing is promised, f = 0.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon = _checks.finite("epsilon", epsilon, 0.0)
        self.delta = _checks.probability("delta", delta)
        alpha, beta = _approx_knots(self.epsilon, self.delta)
        self._set(alpha, beta, symmetric=True)

    def __repr__(self) -> str:
        return f"ApproxDP(epsilon={self.epsilon!r}, delta={self.delta!r})"

    def advantage(self) -> float:
        """η = δ + (1 − δ) tanh(ε/2) (Theorem 4.1)."""
        return self.delta + (1.0 - self.delta) * math.tanh(self.epsilon / 2.0)

    def advantage_level(self) -> float:
        """α† = (1 − δ)/(e^ε + 1), where both branches meet."""
        return (1.0 - self.delta) * float(special.expit(-self.epsilon))


class PureDP(ApproxDP):
    """f_ε(α) = max{0, 1 − e^ε α, e^{−ε}(1 − α)}, the curve of ε-DP.

    Args:
        epsilon: ε in nats, finite and at least 0 (0 is perfect privacy).
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon, 0.0)

    def __repr__(self) -> str:
        return f"PureDP(epsilon={self.epsilon!r})"


def _approx_knots(epsilon: float, delta: float) -> tuple[Twin, Twin]:
    with decimal.localcontext(_DIGITS):
        one, rest = Decimal(1), 1 - Decimal(delta)
        meet = rest / (1 + Decimal(epsilon).exp())
        alpha = [Decimal(0), meet, rest, one]
        beta = [rest, meet, Decimal(0), Decimal(0)]
        keep = [i for i in range(4) if i == 3 or float(alpha[i]) < float(alpha[i + 1])]
        alpha, beta = [alpha[i] for i in keep], [beta[i] for i in keep]
        return Twin.of_decimals(alpha, [1 - a for a in alpha]), Twin.of_decimals(beta, [1 - b for b in beta])


class GaussianDP(TradeOff):
    """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), the curve of telling N(0, 1) from N(μ, 1).

    Args:
        mu: μ, finite and at least 0 (0 is perfect privacy).
    """

    def __init__(self, mu: float) -> None:
        self.mu = _checks.finite("mu", mu, 0.0)

    def __repr__(self) -> str:
        return f"GaussianDP(mu={self.mu!r})"

    def __eq__(self, other: object) -> bool:
        return self.mu == other.mu if isinstance(other, GaussianDP) else NotImplemented

    def __hash__(self) -> int:
        return hash((GaussianDP, self.mu))

    def _pair(self, x: Array, y: Array) -> tuple[Array, Array]:
        shifted = np.where(x <= y, special.ndtri(x), -special.ndtri(y)) + self.mu
        return special.ndtr(shifted), special.ndtr(-shifted)

    def advantage(self) -> float:
        """η = 2Φ(μ/2) − 1 = erf(μ/√8) (Theorem 4.1)."""
        return math.erf(self.mu / math.sqrt(8.0))

    def advantage_level(self) -> float:
        """α† = Φ(−μ/2)."""
        return float(special.ndtr(-self.mu / 2.0))

    def inverse(self) -> GaussianDP:
        """G_μ itself, which is symmetric."""
        return self

    def group(self, k: int) -> GaussianDP:
        """G_{kμ}: k Gaussian steps of μ add up."""
        return GaussianDP(_checks.integer("k", k, 1) * self.mu)

    def _finite(self) -> PiecewiseLinear:
        raise NotImplementedError
