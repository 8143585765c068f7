"""Trade-off functions: what differential privacy promises, as a curve of type-I against type-II error.

Here are the families with a name, `PureDP`, `ApproxDP`, `GaussianDP` and `dp_sgd`. `PiecewiseLinear` and
`from_distributions` come from `piecewise`, `from_privacy_loss` from `_privacy_loss`. All of them are `TradeOff`s: call
them for f(α), ask `power` for F = 1 − f, and see the base class for the rest.
"""

from __future__ import annotations

import decimal
import math
from decimal import Decimal

import numpy as np
from scipy import special

from . import _checks, _knots, _privacy_loss
from ._knots import TINY, Array, Knots, Twin
from ._privacy_loss import from_privacy_loss
from .piecewise import PiecewiseLinear, TradeOff, from_distributions

__all__ = [
    "ApproxDP",
    "GaussianDP",
    "PiecewiseLinear",
    "PureDP",
    "TradeOff",
    "dp_sgd",
    "from_distributions",
    "from_privacy_loss",
]

_MAX_CELLS = 2**21  # of a composed privacy-loss grid
_PRECISE = decimal.Context(prec=80, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


class ApproxDP(PiecewiseLinear):
    """f_{ε,δ}(α) = max{0, 1 − δ − e^ε α, e^{−ε}(1 − δ − α)}, the curve of (ε, δ)-DP.

    Args:
        epsilon: ε in nats, finite and at least 0. (0 with δ = 0 is perfect privacy, f(α) = 1 − α. For no promise at
            all, f = 0, take δ = 1.)
        delta: δ in [0, 1].

    Raises:
        ValueError: if either is out of range.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon = _checks.finite("epsilon", epsilon, 0.0)
        self.delta = _checks.probability("delta", delta)
        self._set(_group_knots(self.epsilon, self.delta, 1), symmetric=True)

    def __repr__(self) -> str:
        return f"ApproxDP(epsilon={self.epsilon!r}, delta={self.delta!r})"

    def advantage(self) -> float:
        """η = δ + (1 − δ) tanh(ε/2) (Theorem 4.1)."""
        return self.delta + (1.0 - self.delta) * math.tanh(self.epsilon / 2.0)

    def advantage_level(self) -> float:
        """α† = (1 − δ)/(e^ε + 1), where the two branches meet (Theorem 4.1)."""
        return (1.0 - self.delta) * float(special.expit(-self.epsilon))

    def group(self, k: int) -> PiecewiseLinear:
        """f^{(k)}, exactly, with at most k + 2 knots.

        For pure DP its advantage is η*_k of Lemma 4.4, 1 − e^{−kε/2} for even k and 1 − 2e^{−(k−1)ε/2}/(e^ε + 1) for
        odd k. `advantage_level` is the lemma's x° for odd k, and e^{−kε/2}/2, the middle of the maximizers, for even k.
        """
        k = _checks.integer("k", k, 1)
        return self if k == 1 else PiecewiseLinear._of(_group_knots(self.epsilon, self.delta, k), symmetric=True)


class PureDP(ApproxDP):
    """f_ε(α) = max{0, 1 − e^ε α, e^{−ε}(1 − α)}, the curve of ε-DP.

    Args:
        epsilon: ε in nats, finite and at least 0 (0 is perfect privacy, f(α) = 1 − α).

    Raises:
        ValueError: if `epsilon` is out of range.
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__(epsilon, 0.0)

    def __repr__(self) -> str:
        return f"PureDP(epsilon={self.epsilon!r})"


def _group_knots(epsilon: float, delta: float, k: int) -> Knots:
    """Knots of f_{ε,δ}^{(k)}.

    The branches meet at t₀ = (1 − δ)/(e^ε + 1), a fixed point of f, and t_{j+1} = f(1 − t_j) = e^{−ε}(t_j − δ) is the
    preimage of t_j under F as long as it is positive. So F^{∘k} bends at t_0, …, t_{k−1}. From t_j it takes j steps to
    reach t₀, one more to 1 − t₀, and k − 1 − j further ones from there mirror the same sequence: f^{(k)}(t_j) =
    t_{k−1−j}. The ends are f^{(k)}(0) = 1 − F^{∘k}(0) and its mirror image. Subtracting δ cancels, hence 80 digits.
    """
    with decimal.localcontext(_PRECISE):
        grow, rest = Decimal(epsilon).exp(), 1 - Decimal(delta)
        bends = [rest / (1 + grow)]
        while len(bends) < k and bends[-1] > delta:
            bends.append((bends[-1] - Decimal(delta)) / grow)
        start = Decimal(1)
        for _ in range(k if delta > 0.0 else 0):
            start = max(Decimal(0), rest - grow * (1 - start), (start - Decimal(delta)) / grow)
        inner = [j for j in reversed(range(len(bends))) if 0 <= k - 1 - j < len(bends) and start > 0]
        alpha = [Decimal(0), *(bends[j] for j in inner), start, Decimal(1)]
        beta = [start, *(bends[k - 1 - j] for j in inner), Decimal(0), Decimal(0)]
        below = max(i for i in range(len(alpha)) if alpha[i] < Decimal(TINY))
        if alpha[below] > 0:  # knots too close to 0 for floats give way to the curve's own point at the smallest level
            share = (Decimal(TINY) - alpha[below]) / (alpha[below + 1] - alpha[below])
            point = beta[below] + share * (beta[below + 1] - beta[below])
            alpha, beta = [Decimal(0), Decimal(TINY), *alpha[below + 1 :]], [start, point, *beta[below + 1 :]]
        return _knots.through(Twin.of_decimals(alpha), Twin.of_decimals(beta))


class GaussianDP(TradeOff):
    """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), the curve of telling N(0, 1) from N(μ, 1).

    Args:
        mu: μ, finite and at least 0 (0 is perfect privacy).

    Raises:
        ValueError: if `mu` is out of range.
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
        # F(x) = Φ(Φ⁻¹(x) + μ), with the quantile taken from the lighter tail
        quantile = np.where(x <= y, special.ndtri(x), -special.ndtri(y)) + self.mu
        return special.ndtr(quantile), special.ndtr(-quantile)

    def advantage(self) -> float:
        """η = 2Φ(μ/2) − 1 = erf(μ/√8) (Theorem 4.1)."""
        return math.erf(self.mu / math.sqrt(8.0))

    def advantage_level(self) -> float:
        """α† = Φ(−μ/2) (Theorem 4.1)."""
        return float(special.ndtr(-self.mu / 2.0))

    def inverse(self) -> GaussianDP:
        """G_μ itself: it is symmetric."""
        return self

    def group(self, k: int) -> GaussianDP:
        """G_{kμ}, as F∘F adds μ twice."""
        return GaussianDP(_checks.integer("k", k, 1) * self.mu)

    def compose(self, other: TradeOff) -> TradeOff:
        """G_μ ⊗ g: G of the root of the sum of squares if `other` is Gaussian, see `TradeOff.compose` otherwise."""
        if isinstance(other, GaussianDP):
            return GaussianDP(math.hypot(self.mu, other.mu))
        return super().compose(other)

    def _finite(self) -> PiecewiseLinear:
        """The envelope of a few thousand tangents; `error` is about 1e-7 for moderate μ.

        They touch at z = Φ⁻¹(1 − α) from 37, the edge of the floats, down to μ/2, where the steepness e^{μz − μ²/2} is
        1, and the rest follows by symmetry. Equal losses ask for a density of z like √φ(z) and √φ(z − μ); even steps
        besides keep the far end accurate.
        """
        mu, top = self.mu, 37.0
        if mu > 1.9 * top:  # no level in reach of a float is safe
            return PiecewiseLinear._of(ApproxDP(0.0, 1.0)._knots, True, 1.0)
        bell = math.sqrt(2.0) * special.ndtri(np.arange(1, 4096) / 4096.0)
        z = np.concatenate([bell, bell + mu, np.linspace(mu / 2.0, top, 1000)])
        z = np.append(z[(z > mu / 2.0) & (z <= top)], mu / 2.0)
        # Tangents whose steepness differs by less than 1e-9 would meet at a point lost to rounding.
        z = z[np.unique(np.floor(1e9 * mu * (top - z)), return_index=True)[1]]
        z[-1] = mu / 2.0
        steep = np.exp(mu * (z - mu / 2.0))
        alpha, away, power, beta = special.ndtr(-z), special.ndtr(z), special.ndtr(mu - z), special.ndtr(z - mu)
        width = np.where(z[1:] > 0.0, np.diff(alpha), -np.diff(away))
        climb = np.where(z[1:] > mu, np.diff(power), -np.diff(beta))
        share = np.clip((climb - steep[1:] * width) / (steep[:-1] - steep[1:]), 0.0, width)
        free = (1.0 - 1e-12) * steep[:1] * alpha[:1]  # how far the steepest tangent rises from there to level 0
        level = Twin.of_pair(
            np.concatenate([[0.0], alpha[:-1] + share, alpha[-1:]]),
            np.concatenate([[1.0], away[1:] + (width - share), away[-1:]]),
        )
        below = Twin.of_pair(
            np.concatenate([np.minimum(beta[:1] + free, 1.0), beta[1:] + steep[1:] * (width - share), alpha[-1:]]),
            np.concatenate([np.maximum(power[:1] - free, 0.0), power[:-1] + steep[:-1] * share, away[-1:]]),
        )
        knots = _knots.reflect(level, below, steep)
        exact = self._pair(knots.alpha.value, knots.alpha.rest)[1]
        return PiecewiseLinear._of(knots, True, float(np.max(exact - knots.beta.value)) + 1e-15)


def dp_sgd(
    noise_multiplier: float, sample_rate: float, steps: int, *, target_error: float = 1e-4
) -> PiecewiseLinear | GaussianDP:
    """f of DP-SGD under add/remove adjacency: Poisson-sampled batches, Gaussian noise, `steps` compositions.

    Without sampling (`sample_rate` 1) it is G_μ with μ = √steps/σ. Otherwise dp-accounting discretizes one step by
    connect-the-dots and composes it, and `from_privacy_loss` reads f off, at or below the truth. The grid is refined,
    at second order, until the errors that the steps add up to stay within `target_error`, or the composition would
    need more than 2 million cells; `error` of the result says what was reached. Replace-one neighbors take
    `.group(2)`.

    Args:
        noise_multiplier: σ, the noise's standard deviation over the clipping norm, above 0.
        sample_rate: probability that a record joins a batch, in (0, 1].
        steps: number of noisy steps, at least 1.
        target_error: sup-norm error to aim at, above 0; each factor 100 costs a factor 10 in time.

    Raises:
        ValueError: if an argument is out of range.
        ImportError: without dp-accounting.
    """
    sigma = _checks.finite("noise_multiplier", noise_multiplier, 0.0, low_open=True)
    rate = _checks.real("sample_rate", sample_rate, 0.0, 1.0, low_open=True)
    steps = _checks.integer("steps", steps, 1)
    target = _checks.finite("target_error", target_error, 0.0, low_open=True)
    if rate == 1.0:
        return GaussianDP(math.sqrt(steps) / sigma)
    interval = max(1e-3, (10.0 / sigma + 0.5 / sigma**2) / 2**17)  # losses reach 10/σ + 1/(2σ²), ten deviations out
    while True:
        step = _privacy_loss.gaussian_step(sigma, rate, interval)
        error = steps * _privacy_loss.chord_error(step)
        wanted = 0.9 * math.sqrt(target / error) if error > target else 1.0
        possible = _privacy_loss.cells(step, steps) / _MAX_CELLS
        if wanted == 1.0 or possible > 0.5:
            return from_privacy_loss(step.self_compose(steps), compositions=steps, step=step)
        interval *= min(max(wanted, possible, 1.0 / 16.0), 0.5)
