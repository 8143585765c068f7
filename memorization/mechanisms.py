"""The mechanisms that meet the bounds: exact laws, and vectorized samplers.

Two shapes cover all of them. A *count mechanism* looks at one number, how many copies of the target x* its corpus
holds (`randomized_response`, `bernoulli_staircase`, `tight_canary`, `geometric_counts`): Theorem 4.1 and Lemma 4.4.
A *subset mechanism* looks at the secrets that follow one public prefix c and releases a list of m candidate secrets
(`subset_release`, `subset_selection`, `frontier_release`): Lemma 5.2, and what lies beyond the paper.

Privacy statements say which neighbors they hold for. A count changes by at most one under both replace-one and
add/remove, so the count mechanisms are private under both. Randomness comes from an explicit generator; batches are
arrays with one trial a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from . import _checks
from ._subsets import SystematicSubsets, UniformSubsets
from .bounds import k_copy_orbit

if TYPE_CHECKING:
    from .tradeoff import TradeOff


def _counts(counts: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(counts)
    if array.dtype == bool:
        array = array.astype(np.int64)  # a membership bit is a count
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"counts must be whole numbers, got an array of {array.dtype}")
    if (array < 0).any():
        raise ValueError(f"counts must be at least 0, got {int(array.min())}")
    return array


def _symmetric(f: TradeOff) -> TradeOff:
    if not f.symmetric:
        raise ValueError(f"f must be symmetric, got {f!r}; f.symmetrize() is the symmetric curve that it implies")
    return f


# --- Count mechanisms: what is released depends on the number of copies of x* ---------------------------------------


@dataclass(frozen=True, eq=False)
class CountMechanism:
    """Releases one of J numbers, by a law that depends on the copy count of the target.

    Attributes:
        laws: (K+1, J) row k is the exact law of the release when the corpus holds k copies; counts above K use row K.
        outputs: (J,) the numbers released.
    """

    laws: NDArray[np.float64]
    outputs: NDArray[np.float64]

    def law(self, counts: ArrayLike) -> NDArray[np.float64]:
        """Law(s) of the release at the given copy count(s): shape of `counts`, then J."""
        return self.laws[np.minimum(_counts(counts), len(self.laws) - 1)]

    def mean(self, counts: ArrayLike) -> NDArray[np.float64] | float:
        """Expected number released, the exact E[h] of the score h that reads it."""
        mean = self.law(counts) @ self.outputs
        return float(mean) if mean.ndim == 0 else mean

    def advantage(self, copies: int = 1) -> float:
        """Total variation between the laws with `copies` copies and with none: no bounded score memorizes more."""
        copies = _checks.integer("copies", copies)
        return float(np.maximum(self.law(copies) - self.laws[0], 0.0).sum())

    def then(self, kernel: ArrayLike, outputs: ArrayLike | None = None) -> CountMechanism:
        """Post-process the release by a Markov kernel (J, J'), for example `binary_symmetric(gamma)`."""
        kernel = _checks.probabilities("kernel", kernel)
        if kernel.ndim != 2 or len(kernel) != len(self.outputs):
            raise ValueError(f"kernel must have {len(self.outputs)} rows, one an output, got shape {kernel.shape}")
        if np.abs(kernel.sum(axis=1) - 1.0).max() > _checks.SUM_TOLERANCE:
            raise ValueError(f"kernel must have rows that sum to 1, got sums {kernel.sum(axis=1)}")
        if outputs is None:
            outputs = self.outputs if kernel.shape[1] == len(self.outputs) else np.arange(kernel.shape[1])
        return CountMechanism(self.laws @ kernel, np.asarray(outputs, dtype=np.float64))

    def sample(self, counts: ArrayLike, rng: np.random.Generator) -> NDArray[np.float64]:
        """One independent release for every entry of `counts` (same shape)."""
        steps = np.cumsum(self.law(counts)[..., :-1], axis=-1)
        return self.outputs[(rng.random(np.shape(counts))[..., None] >= steps).sum(axis=-1)]


def randomized_response(epsilon: float) -> CountMechanism:
    """Release the membership bit, flipped with probability 1/(e^ε + 1): ε-DP, advantage exactly tanh(ε/2).

    Theorem 4.1 for pure DP is met with equality (Appendix B.4 builds its counterexample on it).
    """
    epsilon = _checks.finite("epsilon", epsilon, 0.0)
    keep, flip = expit(epsilon), expit(-epsilon)
    return CountMechanism(np.array([[keep, flip], [flip, keep]]), np.array([0.0, 1.0]))


def binary_symmetric(gamma: float) -> NDArray[np.float64]:
    """Kernel (2, 2) of the channel that flips a bit with probability `gamma`.

    After randomized response it leaves memorization (1 − 2γ) tanh(ε/2) (Remark 4.5, Figure 8).
    """
    gamma = _checks.probability("gamma", gamma)
    return np.array([[1.0 - gamma, gamma], [gamma, 1.0 - gamma]])


def bernoulli_staircase(epsilon: float, k: int) -> CountMechanism:
    """Release a bit of bias b_min(count, k), where b_0, …, b_k is an optimal orbit of Lemma 4.4.

    ε-DP on all corpora, and b_k − b_0 = η*_k(ε). Only the drawn bit may be released: the biases are distinct
    numbers, so publishing b_count itself would give the count away.

    The orbit is symmetric, 1 − b_i = b_{k−i}, so both sides of every coin keep their full relative precision.
    """
    orbit = k_copy_orbit(epsilon, k)
    return CountMechanism(np.stack([orbit[::-1], orbit], axis=1), np.array([0.0, 1.0]))


def tight_canary(f: TradeOff, copies: int = 1) -> CountMechanism:
    """The canary that meets Theorem 4.1 for any symmetric f: f-DP, and memorization exactly η(f^{(copies)}).

    The released number is p(1 | c) ∈ {0, 1}. With one copy this is Appendix B.3: φ*(W), the optimal test at level α†
    on a draw W from a pair that attains f (`attaining_draw`), so the laws are Bernoulli(α†) without the target and
    Bernoulli(F(α†)) with it. More copies climb the orbit of F from the maximizer of F^{∘copies}(x) − x.
    For a target of mass ω under the corpus law, memorization is (1 − ω)^n η(f) (Remark B.7): `games.copy_count_laws`.
    """
    copies = _checks.integer("copies", copies, 1)
    curves = [_symmetric(f).group(step) for step in range(1, copies + 1)]
    bias = curves[-1].advantage_level()
    ones = [bias, *(curve.power(bias) for curve in curves)]
    zeros = [1.0 - bias, *(curve(bias) for curve in curves)]
    return CountMechanism(np.stack([zeros, ones], axis=1), np.array([0.0, 1.0]))


def attaining_draw(f: TradeOff, member: ArrayLike, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw W of Lemma B.4: uniform on [0, 1] for non-members, with distribution function F = 1 − f for members.

    T(P, Q) = f, and the test {W ≤ α} is optimal at every level α.
    """
    member = np.asarray(member, dtype=bool)
    uniform = rng.random(member.shape)
    jump = float(f.power(0.0))  # members put this mass on W = 0
    inverse = np.asarray(f.threshold(np.maximum(uniform, jump)))
    return np.where(member, np.where(uniform < jump, 0.0, inverse), uniform)


@dataclass(frozen=True)
class GeometricCounts:
    """A count plus two-sided geometric noise, P(noise = j) = (1 − r)/(1 + r) r^|j| with r = e^{−ε}.

    ε-DP for the count of one target. Its advantage at k copies is η*_k(ε) for every k, odd ones included (Lemma 4.4).
    """

    epsilon: float

    def pmf(self, value: ArrayLike, count: ArrayLike = 0) -> NDArray[np.float64] | float:
        """Probability of releasing `value` when the corpus holds `count` copies; arguments broadcast."""
        distance = np.abs(np.asarray(value) - _counts(count))
        probability = math.tanh(self.epsilon / 2) * np.exp(-self.epsilon * distance)  # tanh(ε/2) = (1 − r)/(1 + r)
        return float(probability) if probability.ndim == 0 else probability

    def cdf(self, value: ArrayLike, count: ArrayLike = 0) -> NDArray[np.float64] | float:
        """Probability of a release of at most `value`."""
        shift = np.floor(np.asarray(value)) - _counts(count)
        # Both tails are geometric: P(noise ≤ −j) = r^j/(1 + r) for j ≥ 0, and by symmetry above.
        lower = np.exp(-self.epsilon * np.maximum(-shift, 0.0)) * expit(self.epsilon)
        upper = np.exp(-self.epsilon * np.maximum(shift + 1.0, 0.0)) * expit(self.epsilon)
        probability = np.where(shift < 0, lower, 1.0 - upper)
        return float(probability) if probability.ndim == 0 else probability

    def threshold(self, copies: int) -> int:
        """The best test between `copies` copies and none says "present" when the release is at least this number."""
        return _checks.integer("copies", copies, 1) // 2 + 1

    def advantage(self, copies: int = 1) -> float:
        """Total variation between the laws with `copies` copies and with none, through the best threshold."""
        if _checks.integer("copies", copies) == 0:
            return 0.0
        above = self.threshold(copies)
        below = copies - above
        # P(−below ≤ noise < above): the two one-sided pieces, written so that nothing cancels at small ε.
        right, left = -math.expm1(-self.epsilon * above), -math.expm1(-self.epsilon * below)
        return (right + math.exp(-self.epsilon) * left) * float(expit(self.epsilon))

    def sample(self, counts: ArrayLike, rng: np.random.Generator) -> NDArray[np.int64]:
        """One noisy release for every entry of `counts` (same shape): the count plus a difference of geometrics."""
        counts = _counts(counts)
        if self.epsilon < 1e-15:
            raise ValueError(f"epsilon must be at least 1e-15 to sample, got {self.epsilon!r}: the noise overflows")
        stop = -math.expm1(-self.epsilon)
        return counts + rng.geometric(stop, counts.shape) - rng.geometric(stop, counts.shape)


def geometric_counts(epsilon: float) -> GeometricCounts:
    """The geometric mechanism on a copy count (Lemma 4.4), for ε > 0."""
    return GeometricCounts(_checks.finite("epsilon", epsilon, 0.0, low_open=True))


def laplace_advantage(epsilon: float, copies: int = 1) -> float:
    """Total variation 1 − e^{−kε/2} between continuous Laplace noise of scale 1/ε and its shift by k copies.

    It meets η*_k for even k alone (Lemma 4.4), which is why the count must stay an integer.
    """
    epsilon = _checks.finite("epsilon", epsilon, 0.0)
    return -math.expm1(-_checks.integer("copies", copies) * epsilon / 2)


# --- Subset mechanisms: what is released is a list of m candidates out of N secrets ---------------------------------


@dataclass(frozen=True, eq=False)
class SubsetMechanism:
    """Releases a list C of m candidate secrets; the training data shifts the chance that the planted one is on it.

    With no secret to favor, C follows the base law Q. If secret z drives the release at level j, then
    P_z = t Q(· | z ∈ C) + (1 − t) Q(· | z ∉ C) with t = `inclusion[j, z]`; row 0 of `inclusion` is Q's own.

    Attributes:
        base: the law Q.
        inclusion: (L+1, N) chance of z being listed when z drives at level j.
        exclusion: (L+1, N) one minus `inclusion`, computed without cancellation.
        rule: "single": z drives, at level 1, if it is the only document with prefix c (Lemma 5.2). "margin": z drives
            at level min(n_z − Σ_{z' ≠ z} n_{z'}, L) if that is positive (beyond the paper).
    """

    base: UniformSubsets | SystematicSubsets
    inclusion: NDArray[np.float64]
    exclusion: NDArray[np.float64]
    rule: str

    @property
    def N(self) -> int:
        """Number of secrets in the support."""
        return self.base.N

    @property
    def m(self) -> int:
        """List budget."""
        return self.base.m

    def mixing_weight(self, level: int = 1) -> NDArray[np.float64]:
        """(N,) weight a in P_z = a Q(· | z ∈ C) + (1 − a) Q, Lemma 5.2's form of the law; needs q_z < 1."""
        return np.clip(1.0 - self.exclusion[level] / self.exclusion[0], 0.0, 1.0)

    def driver(self, secrets: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which secret drives the release, and at which level.

        Args:
            secrets: (trials, n) whole numbers, the secrets of the documents with prefix c. Below N: in the support;
                N or more: another secret; negative: no such document in this slot.

        Returns:
            Driver (trials,) and level (trials,); level 0 means that C follows Q whatever the driver.
        """
        secrets = np.asarray(secrets)
        if secrets.ndim != 2 or not np.issubdtype(secrets.dtype, np.integer):
            raise ValueError(
                f"secrets must be whole numbers, one trial a row, got {secrets.dtype} of shape {secrets.shape}"
            )
        trials, slots = secrets.shape
        if slots == 0:
            return np.zeros(trials, dtype=np.int64), np.zeros(trials, dtype=np.int64)
        ordered = np.sort(secrets, axis=1)
        documents = (secrets >= 0).sum(axis=1)
        # A strict majority, if there is one, sits in the middle of the sorted documents.
        middle = np.minimum(slots - documents + documents // 2, slots - 1)
        driver = ordered[np.arange(trials), middle]
        margin = 2 * (secrets == driver[:, None]).sum(axis=1) - documents
        level = np.minimum(margin, len(self.inclusion) - 1) if self.rule == "margin" else documents == 1
        level = np.where((driver >= 0) & (driver < self.N), np.maximum(level, 0), 0)
        return np.where(level > 0, driver, 0), level

    def subsets(self) -> NDArray[np.int64]:
        """(S, m) the lists that can be released, in the order of `law`."""
        return self.base.table()[0]

    def law(self, secret: int | None = None, level: int = 1) -> NDArray[np.float64]:
        """(S,) exact law over `subsets`: of P_z when `secret` z drives at `level`, of Q when it is None."""
        subsets, null = self.base.table()
        if secret is None:
            return null
        secret = _checks.integer("secret", secret, 0, self.N - 1)
        level = _checks.integer("level", level, 0, len(self.inclusion) - 1)
        held = (subsets == secret).any(axis=1)
        law = np.zeros(len(null))
        for side, total in ((held, self.inclusion[level, secret]), (~held, self.exclusion[level, secret])):
            if null[side].sum() > 0.0:
                law[side] = null[side] * (total / null[side].sum())
        if self.inclusion[0, secret] == 0.0:
            (stand_in,) = np.sort(self.base.stand_in(np.array([secret])), axis=1)
            law[(subsets == stand_in).all(axis=1)] = self.inclusion[level, secret]
        return law

    def law_given(self, secrets: ArrayLike) -> NDArray[np.float64]:
        """(S,) exact law of the release on one corpus, given by its prefix-c secrets (see `driver`)."""
        (driver,), (level,) = self.driver(np.asarray(secrets, dtype=np.int64)[None, :])
        return self.law(int(driver), int(level)) if level else self.law()

    def extraction(self, prior: ArrayLike | None = None, copies: int = 1) -> float:
        """Exact success of the protocol that outputs C; z ~ `prior` (uniform if None) is planted `copies` times."""
        prior = np.full(self.N, 1.0 / self.N) if prior is None else _checks.distribution("prior", prior)
        if len(prior) != self.N:
            raise ValueError(f"prior must have one entry a secret, {self.N}, got {len(prior)}")
        planted = np.zeros((1, _checks.integer("copies", copies)), dtype=np.int64)
        return math.fsum(prior * self.inclusion[self.driver(planted)[1][0]])

    def sample(self, secrets: ArrayLike, rng: np.random.Generator) -> NDArray[np.int64]:
        """(trials, m) sorted lists, one independent release for every row of `secrets` (see `driver`)."""
        driver, level = self.driver(secrets)
        released = self.base.sample(len(driver), rng)
        listed = rng.random(len(driver)) < self.inclusion[level, driver]
        for held in (True, False):
            rows = (level > 0) & (listed == held)
            released[rows] = self.base.sample_given(driver[rows], held, rng)
        return np.sort(released, axis=1)


def _levels(f: TradeOff, base: UniformSubsets | SystematicSubsets, copies: int | None) -> SubsetMechanism:
    """Let F drive the inclusion probabilities: up to `copies` applications of it, or one under Lemma 5.2's rule."""
    steps = 1 if copies is None else _checks.integer("copies", copies, 1)
    curves = [_symmetric(f).group(step) for step in range(1, steps + 1)]
    inclusion = [base.inclusion, *(curve.power(base.inclusion) for curve in curves)]
    exclusion = [base.exclusion, *(curve(base.inclusion) for curve in curves)]
    return SubsetMechanism(base, np.array(inclusion), np.array(exclusion), "single" if copies is None else "margin")


def _support(N: int, m: int) -> UniformSubsets:
    m = _checks.integer("m", m, 1)
    if _checks.integer("N", N, 2) <= m:
        raise ValueError(f"m must lie in [1, N - 1] = [1, {N - 1}], got {m}")
    return UniformSubsets(N, m)


def subset_release(f: TradeOff, N: int, m: int, copies: int | None = None) -> SubsetMechanism:
    """The subset-release gadget of Lemma 5.2: f-DP under add/remove, with Ext = F(m/N) on N equally likely secrets.

    Args:
        f: symmetric trade-off function.
        N: number of secrets in the support.
        m: list budget, 1 ≤ m < N.
        copies: None for the paper's rule (a secret drives only when its document is the only one with prefix c).
            A number k drives the gadget by the strict majority's margin up to k instead, which is still f-DP and
            attains F^{∘k}(m/N) with k copies planted (beyond the paper).
    """
    return _levels(f, _support(N, m), copies)


def subset_selection(epsilon: float, N: int, m: int) -> SubsetMechanism:
    """Subset selection (Ye and Barg): P_z(C) ∝ e^{ε·1[z ∈ C]}, Q uniform; ε-DP under replace-one and add/remove.

    Lists z with probability e^ε κ/(1 − κ + e^ε κ), κ = m/N, the most any ε-DP algorithm can under replace-one
    (beyond the paper).
    """
    epsilon, base = _checks.finite("epsilon", epsilon, 0.0), _support(N, m)
    logit = epsilon + math.log(m) - math.log(N - m)
    inclusion = np.array([base.inclusion, np.full(N, expit(logit))])
    return SubsetMechanism(base, inclusion, np.array([base.exclusion, np.full(N, expit(-logit))]), "single")


def frontier_release(f: TradeOff, inclusion: ArrayLike, copies: int | None = None) -> SubsetMechanism:
    """Release a systematic sample whose marginals q suit a non-uniform prior; f-DP under add/remove.

    Lists the planted z with probability F(q_z), so Ext = Σ π_z F(q_z). With q from
    `bounds.extraction_frontier(f, prior, m).inclusion` that is the largest value any f-DP algorithm allows
    (beyond the paper).

    Args:
        f: symmetric trade-off function.
        inclusion: (N,) marginals q in [0, 1]; their sum must be a whole number m (within 1e-9) with 1 ≤ m < N.
        copies: as in `subset_release`.
    """
    q = _checks.probabilities("inclusion", inclusion)
    if q.ndim != 1 or q.size < 2:
        raise ValueError(f"inclusion must be a vector of at least two probabilities, got shape {q.shape}")
    total = math.fsum(q)
    m = round(total)
    if abs(total - m) > _checks.SUM_TOLERANCE or not 1 <= m < q.size:
        raise ValueError(f"inclusion must sum to a whole number in [1, {q.size - 1}], got a total of {total!r}")
    return _levels(f, SystematicSubsets(q, m), copies)
