"""How well a secret can be guessed before any model is released: the oblivious baseline, and its certificate.

A prior that can be listed has its baseline kappa summed outright. A prior given by an autoregressive model cannot be
listed (vocabulary ** length strings), so `certify_baseline` encloses kappa in an interval by best-first search over
prefixes. Every extraction bound of the package is a function of kappa; an audit takes the upper end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks

ROW_TOLERANCE = 1e-4  # how far from one a row of next-token probabilities may sum: float32 passes, raw logits do not
SLACK_PER_TOKEN = 2.0**-41  # relative rounding error a token adds to a string's probability (see `certify_baseline`)

NextLogProbs = Callable[[NDArray[np.int64]], ArrayLike]


def zipf_prior(support: int, exponent: float) -> NDArray[np.float64]:
    """The Zipf law on `support` atoms, masses proportional to rank ** -exponent, largest first (0 is uniform)."""
    support = _checks.integer("support", support, 1)
    exponent = _checks.finite("exponent", exponent, 0.0)
    weights = np.exp(-exponent * np.log(np.arange(1.0, support + 1.0)))
    return weights / math.fsum(weights)


def min_entropy(prior: ArrayLike) -> float:
    """The min-entropy of a prior in bits, -log2 of its largest atom."""
    return 0.0 - math.log2(_checks.distribution("prior", prior).max())  # 0.0 - x: a point mass has 0 bits, not -0


def oblivious_baseline(prior: ArrayLike, m: int) -> float:
    """The oblivious baseline kappa_prior(m): the largest prior mass that m candidates can cover (Definition 3.3).

    It is at most m 2^(-min_entropy(prior)), with equality when the m largest atoms are equal, and never below a
    1/m-th of that.

    Args:
        prior: Probabilities of the N possible secrets, shape (N,), summing to 1.
        m: List budget, 0 to N.

    Raises:
        ValueError: `prior` is not a probability vector, or `m` lies outside 0 to N.
    """
    masses = _checks.distribution("prior", prior)
    m = _checks.integer("m", m, 0, masses.size)
    # The whole support has mass 1 whatever rounding the prior carries.
    return 1.0 if m == masses.size else min(1.0, math.fsum(_largest(masses, m)))


def conditional_baseline(joint: ArrayLike, m: int) -> float:
    """The baseline of an adversary who knows the rest of the corpus: E_S of the best m-list's mass given S.

    This is the kappa-bar of Proposition C.2(b), for priors that depend on the corpus. It is never below the baseline
    of the secret's marginal law, and equals it when secret and corpus are independent.

    Args:
        joint: Joint probabilities of corpus (rows) and secret (columns), shape (corpora, N), summing to 1. From
            weights and conditional priors it is `weights[:, None] * conditionals`.
        m: List budget, 0 to N.

    Raises:
        ValueError: `joint` is not a matrix of probabilities that sum to 1, or `m` lies outside 0 to N.
    """
    masses = _checks.probabilities("joint", joint)
    if masses.ndim != 2:
        raise ValueError(f"joint must be a matrix, corpora by secrets, got an array of shape {masses.shape}")
    _checks.distribution("joint", masses.ravel())
    m = _checks.integer("m", m, 0, masses.shape[1])
    return 1.0 if m == masses.shape[1] else min(1.0, math.fsum(_largest(masses, m).ravel()))


def _largest(masses: NDArray[np.float64], m: int) -> NDArray[np.float64]:
    """The m < N largest entries along the last axis, in no particular order."""
    return np.partition(masses, masses.shape[-1] - 1 - m, axis=-1)[..., masses.shape[-1] - m :]


@dataclass(frozen=True)
class BaselineCertificate:
    """An enclosure of kappa(m) for an autoregressive prior, from `certify_baseline`. Masses are probabilities.

    Attributes:
        lower: Mass of the m best complete strings found.
        upper: No list of m strings has more mass than this; equal to `lower` when `closed`.
        closed: Whether the search proved that no string outside `top` could improve it.
        top: The (at most m) best strings found, as (tokens, log-probability in nats), most probable first.
        frontier_mass: Beta, the largest mass of a prefix still unexplored (dropped ones included); 0 when closed.
        unexplored_mass: Total mass of such prefixes; 0 when closed.
        expanded: Prefixes expanded, that is rows of next-token probabilities asked for.
        slack: Relative rounding slack: kappa lies in [lower (1 - slack), upper (1 + slack)].
        trace: One row per batch, (expanded, lower, upper), starting from (0, 0, 1); shape (batches + 1, 3).
    """

    lower: float
    upper: float
    closed: bool
    top: tuple[tuple[tuple[int, ...], float], ...]
    frontier_mass: float
    unexplored_mass: float
    expanded: int
    slack: float
    trace: NDArray[np.float64] = field(repr=False, compare=False)

    @property
    def entropy(self) -> tuple[float, float]:
        """-log2 of `upper` and of `lower`, in bits: at m = 1 an enclosure of the min-entropy."""
        low, high = (0.0 - math.log2(mass) if mass > 0 else math.inf for mass in (self.upper, self.lower))
        return low, high


def certify_baseline(
    next_log_probs: NextLogProbs,
    length: int,
    m: int = 1,
    budget: int = 10_000,
    *,
    batch_size: int = 64,
    max_frontier: int = 1_000_000,
    temperature: float = 1.0,
) -> BaselineCertificate:
    """Enclose kappa(m) of an autoregressive prior over strings of one fixed length (Appendix F).

    A prefix is at least as probable as each of its extensions, so the most probable unexplored prefix bounds every
    string not yet seen. The search keeps the m best complete strings and a frontier of unexpanded prefixes, and is
    valid whatever it expands next; hence the order is chosen for speed. First a beam search m wide finds m strings.
    Then every batch holds the most probable prefix of the frontier and the next best of the same length, so that one
    call of the model expands up to `batch_size` of them. An end-of-sequence token is a token like any other.

    The measure certified is that of `next_log_probs` at `temperature`: use the one the secret was drawn at. Each row
    is normalized in float64, so float32 rounding neither adds nor loses mass. Log-probabilities accumulate in float64;
    per token four roundings at a magnitude of at most 745 nats (beyond which a probability is 0 in float64) and one
    log-sum cost at most 2^-41 relative, the certificate's `slack` in all. The model's own rounding is not included.

    Memory: 24 bytes a frontier prefix, a tuple per expanded prefix, and at worst, when no child can be pruned, 120
    bytes for each of a batch's children (`batch_size` times vocabulary). Between batches the frontier holds no more
    prefixes than the budget can still expand, nor than `max_frontier` (and m more during the beam search). The
    least probable ones are dropped, their largest and their total mass being remembered, so the interval stays
    valid. While `max_frontier` is at least `budget` this costs nothing: a prefix is dropped only when better ones
    suffice to use up the budget. Otherwise it may keep the search from closing.

    Equally probable strings are interchangeable: which of them end up in `top` may depend on `batch_size`.

    Args:
        next_log_probs: Maps prefixes of equal length, an int64 array of shape (batch, t) with 0 <= t < `length`, to
            natural-log probabilities of the next token, shape (batch, vocabulary). Whole rows, never a top-k slice:
            -inf is allowed where the probability is 0, but a row must sum to 1 within 1e-4.
        length: Tokens in a secret, at least 1.
        m: List budget, at least 1.
        budget: Most prefixes to expand, at least 1.
        batch_size: Most prefixes per call, at least 1.
        max_frontier: Most prefixes kept unexpanded, at least 1.
        temperature: Divides the log-probabilities before normalization; above 0.

    Raises:
        ValueError: An argument is out of range, or `next_log_probs` returned the wrong shape, a NaN, or a row that
            is not a probability law.
    """
    length = _checks.integer("length", length, 1)
    m = _checks.integer("m", m, 1)
    budget = _checks.integer("budget", budget, 1)
    batch_size = _checks.integer("batch_size", batch_size, 1)
    max_frontier = _checks.integer("max_frontier", max_frontier, 1)
    temperature = _checks.finite("temperature", temperature, 0.0, low_open=True)

    search = _Search(length, m, budget, max_frontier)
    prefixes, log_probs = [()], np.zeros(1)  # the empty prefix, of mass 1
    trace = [(0, 0.0, 1.0)]
    while True:
        search.expand(prefixes, log_probs, _rows(next_log_probs, prefixes, temperature, search.vocabulary))
        lower, upper = search.interval()
        trace.append((search.expanded, lower, upper))
        if search.frontier.size == 0 or search.expanded == budget:
            break
        prefixes, log_probs = search.pop(batch_size)

    log_beta, unexplored = search.unexplored()
    return BaselineCertificate(
        lower=lower,
        upper=upper,
        closed=log_beta == -math.inf,
        top=tuple(search.found),
        frontier_mass=math.exp(log_beta),
        unexplored_mass=unexplored,
        expanded=search.expanded,
        slack=length * SLACK_PER_TOKEN,
        trace=np.array(trace),
    )


def _rows(
    next_log_probs: NextLogProbs, prefixes: list[tuple[int, ...]], temperature: float, vocabulary: int | None
) -> NDArray[np.float64]:
    """Checked, tempered and normalized next-token log-probabilities, shape (batch, vocabulary)."""
    answer = next_log_probs(np.array(prefixes, dtype=np.int64))
    try:
        rows = np.array(answer, dtype=np.float64)  # a copy: it is worked on in place
    except (TypeError, ValueError) as error:
        raise ValueError(f"next_log_probs must return an array of real numbers on the CPU: {error}") from None
    width = vocabulary or (max(1, rows.shape[-1]) if rows.ndim else 1)  # the first row settles the vocabulary
    if rows.shape != (len(prefixes), width):
        raise ValueError(
            f"next_log_probs must return shape ({len(prefixes)}, {vocabulary or 'vocabulary'}) "
            f"for {len(prefixes)} prefixes, got {rows.shape}"
        )
    with np.errstate(over="ignore"):  # logits in place of log-probabilities
        totals = np.exp(rows).sum(axis=1)
    bad = ~(np.abs(totals - 1.0) <= ROW_TOLERANCE)  # true for NaN, too
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(
            f"next_log_probs must return whole rows of log-probabilities, the exponentials summing to 1 "
            f"(within {ROW_TOLERANCE:g}); those of the row for prefix {prefixes[at]} sum to {totals[at]:.6g}"
        )
    if temperature != 1.0:
        rows -= rows.max(axis=1, keepdims=True)  # so that the largest term is 1 at any temperature
        with np.errstate(over="ignore"):  # to -inf, when a temperature near 0 leaves only the best token
            rows /= temperature
        totals = np.exp(rows).sum(axis=1)
    rows -= np.log(totals)[:, None]
    return rows


_NODE = np.dtype([("log_prob", "f8"), ("parent", "i8"), ("token", "i4"), ("depth", "i4")])


class _Search:
    """The state of one search: the m best strings, the frontier, and what had to be dropped from it.

    Why pruning is free: a prefix no more probable than the m-th best string found (the incumbent) has only
    extensions that m found strings equal or beat, now and later, as the incumbent never falls. So some best m-list
    lies within (found strings) and (extensions of frontier and dropped prefixes above the incumbent), and pruned
    prefixes enter neither end of the interval.
    """

    def __init__(self, length: int, m: int, budget: int, max_frontier: int) -> None:
        self.length, self.m, self.budget, self.max_frontier = length, m, budget, max_frontier
        self.vocabulary: int | None = None  # known from the first row on
        self.found: list[tuple[tuple[int, ...], float]] = []
        self.incumbent = -math.inf
        self.frontier = np.empty(0, dtype=_NODE)
        self.parents: list[tuple[int, ...]] = []  # every expanded prefix; a node names its parent by position here
        self.dropped_log_prob, self.dropped_mass = -math.inf, 0.0

    @property
    def expanded(self) -> int:
        return len(self.parents)

    @property
    def beam_search(self) -> bool:
        """Whether the search still looks for its first m strings."""
        return len(self.found) < self.m

    def pop(self, batch_size: int) -> tuple[list[tuple[int, ...]], NDArray[np.float64]]:
        """Take up to `batch_size` prefixes of one length off the frontier, with their log-probabilities."""
        log_prob, depth = self.frontier["log_prob"], self.frontier["depth"]
        limit = min(batch_size, self.budget - self.expanded)
        if self.beam_search:
            level, limit = depth.max(), min(limit, self.m)
        else:
            level = depth[np.argmax(log_prob)]
        chosen = np.flatnonzero(depth == level)
        chosen = chosen[_best(log_prob[chosen], limit)]
        nodes = self.frontier[chosen]
        self.frontier = np.delete(self.frontier, chosen)
        pairs = zip(nodes["parent"].tolist(), nodes["token"].tolist(), strict=True)
        return [self.parents[parent] + (token,) for parent, token in pairs], nodes["log_prob"]

    def expand(
        self, prefixes: list[tuple[int, ...]], log_probs: NDArray[np.float64], rows: NDArray[np.float64]
    ) -> None:
        """Replace prefixes by their children: complete strings to the best list, others to the frontier.

        `rows` serves as working space and is overwritten.
        """
        self.vocabulary = rows.shape[1]
        first, depth = self.expanded, len(prefixes[0]) + 1
        self.parents += prefixes
        rows += log_probs[:, None]
        kept = np.flatnonzero(rows.ravel() > self.incumbent)  # the whole row; never a zero probability
        parent, token = np.divmod(kept, self.vocabulary)
        # Rounding must not lift a child above its parent, or the search would not be admissible to the last digit.
        log_prob = np.minimum(rows.ravel()[kept], log_probs[parent])
        if depth == self.length:
            self._complete(first + parent, token, log_prob)
        else:
            nodes = np.empty(log_prob.size, dtype=_NODE)
            nodes["log_prob"], nodes["parent"], nodes["token"], nodes["depth"] = log_prob, first + parent, token, depth
            self._push(nodes)

    def _complete(self, parent: NDArray[np.int64], token: NDArray[np.int64], log_prob: NDArray[np.float64]) -> None:
        best = _best(log_prob, self.m)
        self.found += [(self.parents[parent[i]] + (int(token[i]),), float(log_prob[i])) for i in best]
        self.found.sort(key=lambda string: (-string[1], string[0]))
        del self.found[self.m :]
        if not self.beam_search and self.found[-1][1] > self.incumbent:
            self.incumbent = self.found[-1][1]
            self.frontier = self.frontier[self.frontier["log_prob"] > self.incumbent]

    def _push(self, nodes: NDArray) -> None:
        beam = np.zeros(nodes.size, dtype=bool)
        if self.beam_search:  # its prefixes are long, so improbable, and would be the first to be dropped
            beam[_best(nodes["log_prob"], self.m)] = True
        frontier = np.concatenate([self.frontier, nodes[~beam]])
        kept = np.zeros(frontier.size, dtype=bool)
        kept[_best(frontier["log_prob"], min(self.max_frontier, self.budget - self.expanded))] = True
        if not kept.all():
            if self.dropped_log_prob <= self.incumbent:  # all dropped so far have been pruned since
                self.dropped_log_prob, self.dropped_mass = -math.inf, 0.0
            dropped = frontier["log_prob"][~kept]
            self.dropped_log_prob = max(self.dropped_log_prob, float(dropped.max()))
            self.dropped_mass += float(np.exp(dropped).sum())
        self.frontier = np.concatenate([frontier[kept], nodes[beam]])

    def unexplored(self) -> tuple[float, float]:
        """Log of the largest, and total, mass of prefixes under which a string above the incumbent may lie."""
        log_prob = self.frontier["log_prob"]  # all above the incumbent
        log_beta, mass = float(log_prob.max(initial=-math.inf)), float(np.exp(log_prob).sum())
        if self.dropped_log_prob > self.incumbent:
            log_beta, mass = max(log_beta, self.dropped_log_prob), mass + self.dropped_mass
        return log_beta, mass

    def interval(self) -> tuple[float, float]:
        """The two ends of the enclosure of kappa(m), valid at any time."""
        masses = [math.exp(log_prob) for _, log_prob in self.found]
        lower = min(1.0, math.fsum(masses))
        log_beta, unexplored = self.unexplored()
        if log_beta == -math.inf:
            return lower, lower
        # The j strings of a best list that are not found yet weigh at most j beta, and at most the unexplored mass.
        beta = math.exp(log_beta)
        above = [mass for mass in masses if mass > beta]
        ranked = math.fsum(above + [beta] * (self.m - len(above)))
        return lower, min(1.0, lower + unexplored, ranked)


def _best(log_prob: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Positions of the `count` largest entries (of all, if there are fewer), in no particular order."""
    if log_prob.size <= count:
        return np.arange(log_prob.size)
    return np.argpartition(log_prob, log_prob.size - 1 - count)[log_prob.size - count :]
