"""What a trade-off function caps: counterfactual memorization, and the extraction of a secret.

Each bound here is the exact value of an extremal problem, attained by a mechanism in `mechanisms`. Adjacency is said
aloud: a replace-one step is a removal and an addition, so a guarantee for add/remove neighbors counts twice where a
record is swapped for another. ε and losses are in nats, entropies in bits, κ is the oblivious baseline κ_π(m).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from . import _checks
from .piecewise import _like
from .tradeoff import GaussianDP, PureDP, TradeOff

Array = NDArray[np.float64]

ADJACENCIES = ("replace-one", "add-remove")
FUNCTIONALS = ("replace-one", "leave-one-out")
RUNS = ("independent", "shared")
_SMALLEST = 1e-300  # atoms and baselines below this are rounded up to it, which only loosens a bound


def _finite_epsilon(epsilon: ArrayLike) -> Array:
    return _checks.real_array("epsilon", epsilon, 0.0, high_open=True)


# ---------------------------------------------------------------------------------------------------------------------
# Counterfactual memorization
# ---------------------------------------------------------------------------------------------------------------------


def memorization_cap(
    f: TradeOff, functional: str = "replace-one", adjacency: str = "replace-one", copies: int = 1
) -> float:
    """The largest |mem_h| over corpus laws, examples and scores h in [0, 1], for an f-DP algorithm.

    The two corpora compared lie some number of neighbor steps apart, and η(f^{(steps)}) caps the difference of any
    bounded score between them: Theorem 4.1 for one step, Lemma 4.4 (general f) for several.

    ===============  ============  ======================  =====================================================
    functional       adjacency     steps                   why
    ===============  ============  ======================  =====================================================
    "replace-one"    replace-one   copies                  one swap a copy
    "replace-one"    add-remove    2 · copies              a swap is a removal and an addition
    "leave-one-out"  add-remove    copies                  one removal a copy (Appendix A.1)
    "leave-one-out"  replace-one   none: `ValueError`      corpora of different sizes are no number of swaps apart
    ===============  ============  ======================  =====================================================

    Args:
        f: the guarantee, held for every ordered pair of neighbors under `adjacency`.
        functional: "replace-one" (plug-in memorization, Definition 3.2) or "leave-one-out" (planted against absent).
        adjacency: the neighbors that f speaks of. Accountants of DP-SGD certify "add-remove".
        copies: how often the example is in the corpus that holds it.

    Raises:
        ValueError: for an unknown name, fewer than one copy, or a functional that the adjacency does not control.
    """
    _checks.choice("functional", functional, FUNCTIONALS)
    _checks.choice("adjacency", adjacency, ADJACENCIES)
    steps = _checks.integer("copies", copies, 1)
    if functional == "leave-one-out" and adjacency == "replace-one":
        raise ValueError(
            "adjacency must be 'add-remove' for functional='leave-one-out', got 'replace-one': replacing records never "
            "changes the size of a dataset, so that guarantee says nothing about leaving one out"
        )
    if functional == "replace-one" and adjacency == "add-remove":
        steps *= 2
    return float(f.group(steps).advantage())


def truncated_loss_cap(f: TradeOff, M: float) -> float:
    """M · η(f): the cap on memorization measured by a log-loss that is cut off at `M` nats (Appendix B.4).

    Without the cut nothing holds: the log-loss gap of a private mechanism can be as large as one likes. `f` holds
    for the neighbors that the functional compares (see `memorization_cap`).
    """
    return _checks.finite("M", M, 0.0) * float(f.advantage())


def k_copy_advantage(epsilon: ArrayLike, k: ArrayLike) -> float | Array:
    """η*_k(ε), the largest total variation across `k` steps of ε-DP (Lemma 4.4, exact for pure DP).

    1 − e^{−kε/2} for even k, 1 − 2e^{−(k−1)ε/2}/(e^ε + 1) for odd k (tanh(ε/2) at k = 1); strictly below the
    tanh(kε/2) of group privacy from k = 2 on. Written as sums of positive terms, so accurate at every ε.

    Args:
        epsilon: ε in nats, finite, at least 0; broadcasts with `k`.
        k: whole numbers of at least 1.
    """
    epsilon, k = np.broadcast_arrays(_finite_epsilon(epsilon), _checks.real_array("k", k, 1.0, high_open=True))
    if np.any(k != np.floor(k)):
        raise ValueError(f"k must be whole numbers of at least 1, got {float(k[k != np.floor(k)].flat[0])!r}")
    even = -np.expm1(-k * epsilon / 2.0)
    r, half = np.exp(-epsilon), (k - 1.0) / 2.0
    odd = (-np.expm1(-(half + 1.0) * epsilon) - r * np.expm1(-half * epsilon)) / (1.0 + r)
    return _like(np.where(k % 2 == 0, even, odd))


def k_copy_orbit(epsilon: float, k: int) -> Array:
    """An optimal orbit b_0, …, b_k of the cap map b ↦ F_ε(b): b_k − b_0 = η*_k(ε) (Lemma 4.4).

    For odd k the optimal start is unique; for even k it is an interval, and this is the orbit through its symmetric
    point. Either way 1 − b is `b[::-1]`, which gives the complements near 1 to full relative accuracy.

    Returns:
        Array of shape (k + 1,), nondecreasing.
    """
    epsilon, k = float(_checks.finite("epsilon", epsilon, 0.0)), _checks.integer("k", k, 1)
    # Growth by e^ε up to the breakpoint 1/(e^ε + 1) (odd k) or to 1/2 (even k); then the mirror image.
    top = float(special.expit(-epsilon)) if k % 2 else 0.5
    rising = top * np.exp(-epsilon * np.arange((k + 1) // 2 - 1 if k % 2 else k // 2, -1, -1))
    return np.concatenate([rising, 1.0 - (rising[::-1] if k % 2 else rising[-2::-1])])


# ---------------------------------------------------------------------------------------------------------------------
# Extraction: from the baseline alone
# ---------------------------------------------------------------------------------------------------------------------


def extraction_bound(f: TradeOff, kappa: ArrayLike) -> float | Array:
    """F(κ) = 1 − f(κ), the boundary of extraction (Theorem 5.1(i)), attained on uniform priors (ii).

    No protocol with oblivious baseline `kappa` in [0, 1] succeeds more often against an algorithm that is f-DP under
    add/remove (or under replace-one, Appendix C.2a). For k copies of the document pass `f.group(k)`; for a prior that
    depends on the corpus, the mean baseline (C.2b).
    """
    return f.power(_checks.probabilities("kappa", kappa))


def entropy_threshold(f: TradeOff, m: int, tau: ArrayLike) -> float | Array:
    """H* = log2(m/α*(τ)) in bits: with this much min-entropy `m` guesses succeed at most `tau` of the time.

    Theorem 5.1(iii). For pure DP and τ ≤ e^ε/(e^ε + 1) this is ε log2 e + log2(m/τ), and exact for uniform priors;
    otherwise it is sufficient. `inf` where only κ = 0 is safe. For k copies pass `f.group(k)`.

    Raises:
        ValueError: if `tau` is outside [0, 1] or below F(0), where no entropy is enough.
    """
    m = _checks.integer("m", m, 1)
    alpha = np.asarray(f.threshold(tau), dtype=np.float64)
    with np.errstate(divide="ignore"):
        return _like(math.log2(m) - np.log2(alpha))


def replace_extraction_bound(epsilon: ArrayLike, kappa: ArrayLike) -> float | Array:
    """e^ε κ/(1 − κ + e^ε κ), the boundary under ε-DP for replace-one neighbors (beyond the paper).

    The odds of the baseline times e^ε. It holds for every prior and list budget, is attained on uniform priors by
    `mechanisms.subset_selection`, and lies below F_ε(κ). Arguments broadcast.
    """
    epsilon, kappa = _finite_epsilon(epsilon), _checks.probabilities("kappa", kappa)
    return _like(_raise_odds(epsilon, kappa))


def replace_threshold(epsilon: ArrayLike, tau: ArrayLike) -> float | Array:
    """τ/(τ + e^ε(1 − τ)), the largest baseline that replace-one ε-DP keeps at or below `tau` (beyond the paper).

    It answers Remark 5.4 for pure DP and lies inside the paper's bracket, from α* at ε to α* at ε/2.
    """
    epsilon, tau = _finite_epsilon(epsilon), _checks.probabilities("tau", tau)
    scaled = tau * np.exp(-epsilon)
    return _like(np.where(tau == 1.0, 1.0, scaled / np.where(tau == 1.0, 1.0, scaled + (1.0 - tau))))


def _raise_odds(shift: Array, chance: Array) -> Array:
    """The probability whose odds are e^shift (shift ≥ 0) times those of `chance`, without overflow."""
    safe = np.where(chance == 0.0, 1.0, chance)
    return np.where(chance == 0.0, 0.0, safe / (safe + (1.0 - safe) * np.exp(-shift)))


# ---------------------------------------------------------------------------------------------------------------------
# Extraction: from the whole prior
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ExtractionFrontier:
    """The exact optimum of `extraction_frontier`.

    Attributes:
        value: the greatest probability of extraction.
        inclusion: q, shape (N,): how often an optimal protocol lists each secret when none is planted, in the order
            of the prior. Sums to m unless mass was left unlisted. `mechanisms.frontier_release` turns it into the
            mechanism that attains `value`.
    """

    value: float
    inclusion: Array


def extraction_frontier(
    f: TradeOff,
    prior: ArrayLike,
    m: int,
    copies: int = 1,
    rest: float = 0.0,
    atom_cap: float | None = None,
) -> ExtractionFrontier:
    """The greatest extraction success over all f-DP algorithms and protocols (beyond the paper).

    max Σ_z π_z F^{∘copies}(q_z) subject to 0 ≤ q_z ≤ 1 and Σ_z q_z = m, for add/remove neighbors. At most F(κ), with
    equality on uniform priors, so an audit that compares its success rate with this loses no power.

    The objective is concave and separable: budget flows to the atoms whose marginal gain π_z F'(q_z) is largest, down
    to one common level. That level is found by bisection (for piecewise-linear F this is the greedy order of the
    segments, for the Gaussian curve the one monotone equation) to rounding. A curve of any other kind is replaced by
    its certified piecewise-linear lower bound, which can only raise `value`.

    Args:
        f: a symmetric trade-off function.
        prior: probabilities of the listed secrets, shape (N,); with `rest` they sum to 1.
        m: list budget, 1 ≤ m ≤ N (m = N lists everything: value 1); unlimited when there is `rest`.
        copies: how many copies of the document are planted.
        rest: probability of all secrets that are not listed. `value` is then a certified upper bound: the optimum is
            Schur-convex in the prior, so it is largest when the rest sits in as few atoms as `atom_cap` allows. These
            are counted, not enumerated.
        atom_cap: what no unlisted secret exceeds (needed if `rest` > 0).

    Raises:
        ValueError: if f is not symmetric, the masses do not sum to 1, m > N with nothing unlisted, or a number is out
            of range.
    """
    if not f.symmetric:
        raise ValueError("f must be a symmetric trade-off function (symmetrize it first), got one that is not")
    rest = _checks.probability("rest", rest)
    prior = _prior_with_rest(prior, rest)
    m = _checks.integer("m", m, 1, prior.size if rest == 0.0 else None)
    curve = f.group(_checks.integer("copies", copies, 1))

    mass, level_of, count = np.unique(prior, return_inverse=True, return_counts=True)
    listed, count = mass.size, count.astype(np.float64)
    if rest > 0.0:
        if atom_cap is None:
            raise ValueError("atom_cap must be given when rest > 0: without it one atom could hold all of the rest")
        cap = max(_checks.real("atom_cap", atom_cap, 0.0, 1.0, low_open=True), _SMALLEST)
        full = math.floor(rest / cap)
        mass = np.concatenate([mass, [cap, min(max(rest - full * cap, 0.0), cap)]])
        count = np.concatenate([count, [float(full), 1.0]])

    level = _water_fill(curve, mass, count, float(m))
    value = math.fsum(count * mass * curve.power(level))
    return ExtractionFrontier(min(value, 1.0), level[:listed][level_of.ravel()])


def _prior_with_rest(prior: ArrayLike, rest: float) -> Array:
    """The listed probabilities, checked to sum to 1 − rest."""
    if rest == 0.0:
        return _checks.distribution("prior", prior)
    listed = _checks.probabilities("prior", prior)
    if listed.ndim != 1:
        raise ValueError(f"prior must be a vector of probabilities, got shape {listed.shape}")
    total = math.fsum(listed) + rest
    if abs(total - 1.0) > _checks.SUM_TOLERANCE:
        raise ValueError(f"prior and rest must sum to 1 (within {_checks.SUM_TOLERANCE:g}), got a total of {total!r}")
    return listed


def _water_fill(curve: TradeOff, mass: Array, count: Array, budget: float) -> Array:
    """Inclusions that maximize Σ count · mass · F(q) subject to Σ count · q = budget, one for each entry of `mass`."""
    if count.sum() <= budget:
        return np.ones_like(mass)
    level_at, lowest, highest = _marginal_levels(curve)
    positive = mass > 0.0
    gain = np.full_like(mass, -math.inf)
    gain[positive] = np.log(mass[positive] / mass.max())

    def levels(price: float) -> Array:
        return level_at(price - gain)

    low, high = lowest + gain[positive].min() - 1.0, highest + 1.0
    more, less = levels(low), levels(high)
    if count @ more <= budget:  # every secret of positive mass is always listed: fill up with the others
        more, less = np.ones_like(mass), more
    else:
        for _ in range(120):  # far below the spacing of floats, except around 0 where small μ needs it
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            between = levels(middle)
            if count @ between > budget:
                low, more = middle, between
            else:
                high, less = middle, between
    # What separates the two sides is bought at one and the same price: any share of it is optimal.
    spare = budget - count @ less
    return np.clip(less + (more - less) * (spare / (count @ (more - less))), 0.0, 1.0)


def _marginal_levels(curve: TradeOff) -> tuple[Callable[[Array], Array], float, float]:
    """Where the slope of F falls to e^s, as a function of s, with the range of s that matters."""
    if isinstance(curve, GaussianDP) and curve.mu > _SMALLEST:
        mu = curve.mu  # F'(Φ(t)) = exp(−μt − μ²/2), so slope e^s is at t = −s/μ − μ/2; Φ is 0 or 1 beyond ±40
        return lambda s: special.ndtr(-s / mu - mu / 2.0), -mu * (40.0 + mu / 2.0), mu * (40.0 - mu / 2.0)
    knots = (PureDP(0.0) if isinstance(curve, GaussianDP) else curve._finite())._knots
    extremes = np.finfo(np.float64)
    slope = np.minimum.accumulate(np.clip(knots.slope, extremes.tiny, extremes.max))  # falls, despite rounding
    fall = -np.log(slope)
    return lambda s: knots.alpha.value[np.searchsorted(fall, -s, side="left")], -float(fall[-1]), -float(fall[0])


# ---------------------------------------------------------------------------------------------------------------------
# Extraction audits
# ---------------------------------------------------------------------------------------------------------------------


def refuted_epsilon(
    successes: ArrayLike,
    baselines: ArrayLike,
    confidence: float,
    runs: str = "independent",
    adjacency: str = "add-remove",
) -> float:
    """The largest ε that an extraction audit refutes: Corollary 5.3 as a test (beyond the paper).

    Under ε-DP the number of successes is stochastically at most a sum of independent coins, canary i with chance
    b_i(ε). ε is refuted if that sum reaches the observed number with probability at most 1 − `confidence`; this
    exact Poisson-binomial tail grows with ε, so everything below the returned value is refuted too.

    =============  ============  ===================================  ==========================================
    runs           adjacency     b(ε)                                 why
    =============  ============  ===================================  ==========================================
    "independent"  add-remove    F_ε(κ)                               Theorem 5.1(i), run by run
    "independent"  replace-one   κ with its odds times e^ε            beyond the paper, below F_ε(κ)
    "shared"       replace-one   κ with its odds times e^ε            given the model and the other secrets, the
                                                                      posterior odds move by at most e^ε
    "shared"       add-remove    κ with its odds times e^{2ε}         a swap of secrets is two steps
    =============  ============  ===================================  ==========================================

    Canaries of one training run are dependent: F_ε(κ) would not be valid for them. "shared" needs the secrets to be
    drawn independently (or each κ to hold given all other secrets); "independent" needs one canary a run. If each
    canary is planted k times, the value is about k-fold groups: divide it by k.

    Args:
        successes: whether each canary was extracted, shape (n,), booleans or 0 and 1, n ≥ 1.
        baselines: upper ends of the certified κ of each canary, a number or shape (n,). The same protocol and list
            budget must be behind both.
        confidence: 1 minus the chance of refuting a true ε, in (0, 1).
        runs: "independent" (one canary per training run) or "shared" (all of them in one model).
        adjacency: the neighbors for which ε is claimed.

    Returns:
        ε in nats: 0.0 if nothing is refuted, `inf` if a secret with baseline 0 was extracted.
    """
    won, kappa = _outcomes(successes, baselines)
    miss = 1.0 - _checks.real("confidence", confidence, 0.0, 1.0, low_open=True, high_open=True)
    _checks.choice("runs", runs, RUNS)
    _checks.choice("adjacency", adjacency, ADJACENCIES)
    if np.any(won & (kappa == 0.0)):
        return math.inf
    steps = 2.0 if runs == "shared" and adjacency == "add-remove" else 1.0
    kappa, total = np.where(kappa > 0.0, np.maximum(kappa, _SMALLEST), 0.0), int(won.sum())

    def refutes(epsilon: float) -> bool:
        if runs == "independent" and adjacency == "add-remove":
            chances = PureDP(epsilon).power(kappa)
        else:
            chances = _raise_odds(np.float64(steps * epsilon), kappa)
        return _tail(chances, total) <= miss

    low, high = 0.0, 1.0
    if not refutes(low):
        return low
    while refutes(high):  # ends: every success has κ ≥ 1e-300, so its b(ε) tends to 1 before ε = 800
        low, high = high, 2.0 * high
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low


def _outcomes(successes: ArrayLike, baselines: ArrayLike) -> tuple[NDArray[np.bool_], Array]:
    """Successes as booleans with a baseline for each."""
    won = _checks.probabilities("successes", successes)
    if won.ndim != 1 or won.size == 0 or np.any((won != 0.0) & (won != 1.0)):
        raise ValueError(f"successes must be a non-empty vector of booleans, got {successes!r}")
    kappa = _checks.probabilities("baselines", baselines)
    if kappa.shape not in ((), won.shape):
        raise ValueError(f"baselines must be one number or of shape {won.shape}, got shape {kappa.shape}")
    return won == 1.0, np.broadcast_to(kappa, won.shape)


def _tail(chances: Array, count: int) -> float:
    """P(at least `count` of the independent coins come up): sums of nonnegative terms only, O(n · count)."""
    if count == 0:
        return 1.0
    below, reached = np.zeros(count), 0.0
    below[0] = 1.0
    for chance in chances:
        reached += below[-1] * chance
        below[1:] = below[1:] * (1.0 - chance) + below[:-1] * chance
        below[0] *= 1.0 - chance
    return float(reached)
