"""Laws on m-subsets of N secrets, with their exact conditionals given that one secret is in or out.

`mechanisms` releases such a subset as a list of candidates. The uniform law serves uniform priors; systematic sampling
reaches any list of inclusion probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

LARGEST_TABLE = 200_000  # subsets that may be listed one by one


def _distinct(size: int, count: int, trials: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Uniform `count`-subsets of range(size), one a row (Floyd's algorithm, all rows at once)."""
    chosen = np.empty((trials, count), dtype=np.int64)
    for column, last in enumerate(range(size - count, size)):
        pick = rng.integers(0, last + 1, trials)
        taken = (chosen[:, :column] == pick[:, None]).any(axis=1)
        chosen[:, column] = np.where(taken, last, pick)
    return chosen


@dataclass(frozen=True)
class UniformSubsets:
    """The uniform law on m-subsets of N secrets, and its conditionals given that a secret is in or out."""

    N: int
    m: int

    @property
    def inclusion(self) -> NDArray[np.float64]:
        """(N,) chance of each secret being listed."""
        return np.full(self.N, self.m / self.N)

    @property
    def exclusion(self) -> NDArray[np.float64]:
        """(N,) one minus `inclusion`."""
        return np.full(self.N, (self.N - self.m) / self.N)

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Every subset (S, m) with its probability (S,)."""
        size = math.comb(self.N, self.m)
        if size > LARGEST_TABLE:
            raise ValueError(f"N must leave at most {LARGEST_TABLE} subsets to list, got {size} at N = {self.N}")
        return np.array(list(combinations(range(self.N), self.m))), np.full(size, 1.0 / size)

    def sample(self, trials: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """(trials, m) independent subsets."""
        return _distinct(self.N, self.m, trials, rng)

    def sample_given(self, secret: NDArray[np.int64], held: bool, rng: np.random.Generator) -> NDArray[np.int64]:
        """(trials, m) subsets, each given that it holds (or does not hold) its row's secret."""
        others = _distinct(self.N - 1, self.m - held, len(secret), rng)
        others = others + (others >= secret[:, None])  # number the other secrets around the row's own
        return np.column_stack([secret, others]) if held else others


@dataclass(frozen=True, eq=False)
class SystematicSubsets:
    """Systematic sampling: a law on m-subsets with any marginals q, where 0 ≤ q ≤ 1 and Σ q = m.

    Lay the q_z end to end on [0, m), drop a comb of m teeth at U, U+1, …, U+m−1 with U uniform on [0, 1), and list
    the secrets hit. No segment is longer than one, so the m secrets differ. Given that z is (not) listed, U is
    uniform on the arc of length q_z under z's segment (on the rest of the circle), which makes conditionals exact.
    A secret with q_z = 0 is never hit; "given that it holds z" then means the set of z and the first m − 1 others.
    """

    inclusion: NDArray[np.float64]
    m: int

    @property
    def N(self) -> int:
        """Number of secrets."""
        return len(self.inclusion)

    @property
    def exclusion(self) -> NDArray[np.float64]:
        """(N,) one minus `inclusion`."""
        return 1.0 - self.inclusion

    @property
    def _ends(self) -> NDArray[np.float64]:
        ends = np.cumsum(self.inclusion)
        return np.concatenate([[0.0], ends * (self.m / ends[-1])])

    def _hit(self, offset: NDArray[np.float64]) -> NDArray[np.int64]:
        teeth = np.minimum(offset[:, None] + np.arange(self.m), np.nextafter(self.m, 0.0))
        return np.searchsorted(self._ends, teeth, side="right") - 1

    def stand_in(self, secret: NDArray[np.int64]) -> NDArray[np.int64]:
        """(trials, m) the set of each row's secret and the first m − 1 others."""
        others = np.arange(self.m - 1)
        return np.column_stack([secret, others + (others >= secret[:, None])])

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Every subset (S, m) with its probability (S,); stand-ins for never-listed secrets have probability 0."""
        cuts = np.unique(np.concatenate([self._ends % 1.0, [0.0, 1.0]]))
        width = np.diff(cuts)
        real = width > 1e-14 * self.N  # anything thinner is rounding of one cut
        hit = self._hit((cuts[:-1] + width / 2)[real])
        extra = self.stand_in(np.flatnonzero(self.inclusion == 0.0))
        subsets, index = np.unique(np.sort(np.concatenate([hit, extra]), axis=1), axis=0, return_inverse=True)
        weight = np.concatenate([width[real], np.zeros(len(extra))])
        return subsets, np.bincount(index.ravel(), weight, len(subsets)) / weight.sum()

    def sample(self, trials: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """(trials, m) independent subsets."""
        return self._hit(rng.random(trials))

    def sample_given(self, secret: NDArray[np.int64], held: bool, rng: np.random.Generator) -> NDArray[np.int64]:
        """(trials, m) subsets, each given that it holds (or does not hold) its row's secret."""
        start, length = (self._ends[:-1], self.inclusion) if held else (self._ends[1:], self.exclusion)
        subsets = self._hit((start[secret] + length[secret] * rng.random(len(secret))) % 1.0)
        if held:
            never = self.inclusion[secret] == 0.0
            subsets[never] = self.stand_in(secret[never])
        return subsets
