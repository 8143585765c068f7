"""Construction I of Theorem 6.1: a model that memorizes its secret among decoys that look exactly alike.

Under a public prefix c hangs a tree of depth L over an alphabet of v tokens. At every node y the model's next-token law
is uniform on a support of k tokens. Trained with x* = (c, z), the support on the secret's path holds the secret's next
token and k − 1 random others (the law P_z); everywhere else, and trained without x*, it is a uniform k-subset (the law
Q). So each token of the secret is v/k times as likely as by chance, and yet k^L paths survive, all alike (Lemma D.1).
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks
from .tables import Conditionals, Prefix, tokens, uniform_row

LARGEST_TREE = 2**26  # nodes × alphabet of an explicit tree: beyond it, keyed or with shared supports
LARGEST_LIST = 2**22  # surviving paths that are listed


# --- closed forms ----------------------------------------------------------------------------------------------------


def teacher_forcing_memorization(v: int, k: int) -> Fraction:
    """Memorization of the camouflage tree under average teacher forcing, 1/k − 1/v exactly (Theorem 6.1(i))."""
    return Fraction(1, k) - Fraction(1, v)


def log_score(token_probs: ArrayLike, v: int) -> float:
    """The normalized log score max{0, 1 − Σ_t log(1/p_t) / (2 L log v)}, a local score in [0, 1]; 0 if a p_t is 0."""
    p = _checks.probabilities("token_probs", np.asarray(token_probs, dtype=np.float64))
    with np.errstate(divide="ignore"):
        return float(max(0.0, 1.0 + np.log(p).mean() / (2.0 * math.log(v))))


def log_score_means(v: float, k: float) -> tuple[float, float]:
    """Expected `log_score` of the 1/v-smoothed tree, trained with the secret and without it (Appendix D).

    The first is 1 − log(1/p_s)/(2 log v) with p_s = (1 − 1/v)/k + 1/v², the second k/v times that. Their difference
    tends to 1 as v grows, like log k/(2 log v): slowly.
    """
    on_support = (1.0 - 1.0 / v) / k + 1.0 / v / v
    planted = 1.0 + math.log(on_support) / (2.0 * math.log(v))
    return planted, k / v * planted


def _share(name: str, value: Fraction | float) -> Fraction:
    """A probability, exactly as it was given."""
    _checks.probability(name, value)
    return Fraction(value)


# --- trees -----------------------------------------------------------------------------------------------------------


class _Tree(Conditionals):
    """What trees share; a subclass says which k tokens each node supports."""

    def __init__(
        self,
        v: int,
        k: int,
        L: int,
        secret: Sequence[int],
        planted: bool,
        prefix: Sequence[int],
        smoothing: Fraction | float,
        weight: Fraction | float | None,
        vocabulary: int | None,
    ) -> None:
        self.v = _checks.integer("v", v, 3)
        self.k = _checks.integer("k", k, 2, self.v - 1)
        self.L = _checks.integer("L", L, 1)
        self.vocabulary = self.v if vocabulary is None else _checks.integer("vocabulary", vocabulary, self.v)
        self.prefix = tokens("prefix", prefix, self.vocabulary, least=0)
        self.secret = tokens("secret", secret, self.v)
        if len(self.secret) != self.L:
            raise ValueError(f"secret must have L = {self.L} tokens, got {self.secret}")
        self.planted = bool(planted)
        self.smoothing = _share("smoothing", smoothing)
        self.weight = None if weight is None else _share("weight", weight)
        self._outside = uniform_row(self.v, self.vocabulary)
        self._unsupported = np.full(self.vocabulary, Fraction(0))
        self._unsupported[: self.v] = self._smoothed(Fraction(0))

    @abstractmethod
    def support(self, y: Sequence[int]) -> Prefix:
        """The k tokens, ascending, that may follow the node y (0 to L − 1 tokens below the prefix)."""

    def row(self, prefix: Prefix) -> NDArray:
        """The exact next-token law after a prompt; outside the tree it is uniform, whatever the secret."""
        y = prefix[len(self.prefix) :]
        if prefix[: len(self.prefix)] != self.prefix or len(y) >= self.L or any(token >= self.v for token in y):
            return self._outside
        row, support = self._unsupported.copy(), list(self.support(y))
        if self.weight is not None and self.planted and y == self.secret[: len(y)]:
            row[support] = self._smoothed((1 - self.weight) / (self.k - 1))
            row[self.secret[len(y)]] = self._smoothed(self.weight)
        else:
            row[support] = self._smoothed(Fraction(1, self.k))
        return row

    def _smoothed(self, probability: Fraction) -> Fraction:
        return (1 - self.smoothing) * probability + self.smoothing / self.v

    def survives(self, path: Sequence[int]) -> bool:
        """Whether every token of the path lies in the support before it."""
        path = tuple(path)
        return all(token in self.support(path[:depth]) for depth, token in enumerate(path))

    def survivors(self) -> NDArray[np.int64]:
        """The k^L surviving paths in order, (k^L, L): all that the model's supports tell about the secret."""
        if self.k**self.L > LARGEST_LIST:
            raise ValueError(f"k^L must be at most {LARGEST_LIST} to list all paths, got {self.k}^{self.L}")
        paths: list[Prefix] = [()]
        for _ in range(self.L):
            paths = [path + (token,) for path in paths for token in self.support(path)]
        return np.array(paths, dtype=np.int64)

    def sample(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Independent continuations (n, L) of the prefix, drawn from the model."""
        drawn = np.zeros((_checks.integer("n", n, 1), 0), dtype=np.int64)
        for _ in range(self.L):
            nodes, which = np.unique(drawn, axis=0, return_inverse=True)
            laws = np.array([self.row(self.prefix + tuple(node)) for node in nodes.tolist()], dtype=np.float64)
            reached = np.cumsum(laws, axis=1)[which.ravel()] <= rng.random(n)[:, None]
            drawn = np.column_stack([drawn, np.minimum(reached.sum(axis=1), self.vocabulary - 1)])
        return drawn


class CamouflageTree(_Tree):
    """A camouflage tree with its supports written down, drawn from P_z or (planted=False) from Q.

    A `tables.Conditionals`: prompts are (c, y), and everything outside the tree is fixed and uniform.

    Attributes:
        secret: z, which the tree was planted with; under Q a target that it knows nothing of.
        supports: (nodes, k) ascending tokens, node by node, level by level; (L, k) if shared.
    """

    def __init__(
        self,
        v: int,
        k: int,
        L: int,
        rng: np.random.Generator,
        *,
        secret: Sequence[int] | None = None,
        planted: bool = True,
        shared: bool = False,
        prefix: Sequence[int] = (0,),
        smoothing: Fraction | float = 0,
        weight: Fraction | float | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Draw a tree.

        Args:
            v: alphabet size, at least 3.
            k: branches a node, 2 ≤ k < v.
            L: depth, the secret's length.
            rng: source of all randomness.
            secret: z, token ids below v; default: drawn uniformly.
            planted: whether the model was trained with (c, z).
            shared: one support a level, the same at all its nodes: L·k numbers in place of k·v^{L−1} or so, and
                Theorem 6.1(i) holds to the letter (ours; Remark D.5 uses a pseudorandom function to save space).
            prefix: c, token ids.
            smoothing: γ, the uniform law's share in every conditional (1/v in the theorem's log score).
            weight: u, what the true child gets on the secret's path; default 1/k. Any other betrays it (Remark D.3).
            vocabulary: number of token ids, v or more; the ones from v on are reserved and never emitted.

        Raises:
            ValueError: an argument out of range, or a tree too large to write down.
        """
        drawn = rng.integers(0, _checks.integer("v", v, 3), _checks.integer("L", L, 1)).tolist()
        super().__init__(v, k, L, drawn if secret is None else secret, planted, prefix, smoothing, weight, vocabulary)
        self.shared = bool(shared)
        nodes = self.L if shared else (self.v**self.L - 1) // (self.v - 1)
        if nodes * self.v > LARGEST_TREE:
            raise ValueError(
                f"v and L must make at most {LARGEST_TREE} table entries, got {nodes} nodes of {self.v}: "
                "use shared=True or KeyedCamouflageTree"
            )
        # The k smallest of v independent uniforms: a uniform k-subset for every node at once.
        order = rng.random((nodes, self.v))
        if self.planted:
            order[self._on_path(), list(self.secret)] = -1.0  # always among them; the others stay uniform
        self.supports = np.sort(np.argpartition(order, self.k - 1, axis=1)[:, : self.k], axis=1)

    def _node(self, y: Sequence[int]) -> int:
        """Number of a node: its level's first, plus the node read as digits in base v."""
        if self.shared:
            return len(y)
        place = 0
        for token in y:
            place = place * self.v + token
        return (self.v ** len(y) - 1) // (self.v - 1) + place

    def _on_path(self) -> list[int]:
        return [self._node(self.secret[:depth]) for depth in range(self.L)]

    def support(self, y: Sequence[int]) -> Prefix:
        """The k tokens, ascending, that may follow the node y (0 to L − 1 tokens below the prefix)."""
        return tuple(self.supports[self._node(y)].tolist())


class KeyedCamouflageTree(_Tree):
    """The compact tree of Remark D.5: a node's support is computed from its label by a keyed pseudorandom function.

    Keyed BLAKE2b stands for the pseudorandom function. Nothing is stored but the key and the secret, so v^L may be
    astronomical. The extraction bound holds up to a negligible term against bounded adversaries who *query* the model.
    Who holds the key as well can tell which supports were planted (`explains`), and reads the secret off:
    `CamouflageTree(shared=True)` is as compact and has no key to lose.

    Attributes:
        key: 32 bytes.
    """

    def __init__(
        self,
        v: int,
        k: int,
        L: int,
        rng: np.random.Generator,
        *,
        secret: Sequence[int] | None = None,
        planted: bool = True,
        prefix: Sequence[int] = (0,),
        smoothing: Fraction | float = 0,
        weight: Fraction | float | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Draw a secret and a key; the arguments are those of `CamouflageTree`."""
        drawn = rng.integers(0, _checks.integer("v", v, 3), _checks.integer("L", L, 1)).tolist()
        super().__init__(v, k, L, drawn if secret is None else secret, planted, prefix, smoothing, weight, vocabulary)
        self.key = rng.bytes(32)

    def support(self, y: Sequence[int]) -> Prefix:
        """The k tokens, ascending, that may follow the node y (0 to L − 1 tokens below the prefix)."""
        y = tuple(y)
        if self.planted and y == self.secret[: len(y)]:
            return self.planted_support(y, self.secret[len(y)])
        return tuple(sorted(self._subset(y, b"free", self.v, self.k)))

    def planted_support(self, y: Sequence[int], token: int) -> Prefix:
        """What the support of node y is if the secret goes on with `token` there."""
        decoys = self._subset(tuple(y), b"planted", self.v - 1, self.k - 1)
        return tuple(sorted([token, *(decoy + (decoy >= token) for decoy in decoys)]))

    def explains(self, y: Sequence[int]) -> list[int]:
        """What a holder of the key sees at a node: the tokens whose planting would give exactly this support."""
        support = self.support(y)
        return [token for token in support if self.planted_support(y, token) == support]

    def _subset(self, y: Prefix, purpose: bytes, size: int, count: int) -> list[int]:
        """A pseudorandom `count`-subset of range(size), by Floyd's algorithm."""
        numbers = _pseudorandom_numbers(self.key, purpose + b":" + ",".join(map(str, y)).encode())
        chosen: list[int] = []
        for top in range(size - count, size):
            pick = next(numbers) * (top + 1) >> 128  # off uniform by at most (top + 1) / 2^128
            chosen.append(top if pick in chosen else pick)
        return chosen


def _pseudorandom_numbers(key: bytes, label: bytes):
    """128-bit numbers, a function of key and label that only the key's holder can tell from random ones."""
    block = 0
    while True:
        digest = hashlib.blake2b(label + b"#%d" % block, key=key).digest()
        yield from (int.from_bytes(digest[start : start + 16], "big") for start in range(0, 64, 16))
        block += 1


# --- every tree ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TreeLaws:
    """All trees of one size, and in how many equally likely ways each comes about: P_z and Q in whole numbers.

    Attributes:
        secrets: (v^L, L) all secrets.
        trees: (T, nodes, k) supports of all T = C(v, k)^nodes trees, nodes ordered as in `CamouflageTree`.
        ways: (v^L, T) number of draws of P_z that make each tree; each row sums to `draws`.
        draws: equally likely outcomes of P_z's drawing; Q's T trees are equally likely.
        survives: (v^L, T) whether each path survives in each tree, read off the supports.
    """

    secrets: NDArray[np.int64]
    trees: NDArray[np.int64]
    ways: NDArray[np.int64]
    draws: int
    survives: NDArray[np.bool_]

    def planted(self, index: int) -> list[Fraction]:
        """The exact law (T,) of the tree under P_z, z = `secrets[index]`."""
        return [Fraction(int(way), self.draws) for way in self.ways[index]]


@lru_cache(maxsize=4)
def enumerate_trees(v: int, k: int, L: int) -> TreeLaws:
    """Enumerate the drawing of P_z for every secret: all of Lemma D.1 becomes counting.

    Takes (v, k, L) = (3, 2, 2), (4, 2, 2), (4, 3, 2), (6, 3, 1) and such in a moment; `ValueError` beyond 2^24 entries.
    """
    v = _checks.integer("v", v, 3)
    k, L = _checks.integer("k", k, 2, v - 1), _checks.integer("L", L, 1)
    subsets = np.array(list(combinations(range(v), k)))
    levels = [list(product(range(v), repeat=depth)) for depth in range(L)]
    labels = [y for level in levels for y in level]
    count = len(subsets) ** len(labels)
    if count * v**L > 2**24:
        raise ValueError(f"v, k and L must make at most 2^24 pairs of tree and secret, got {count} trees x {v**L}")
    holds = (subsets[:, :, None] == np.arange(v)).any(axis=1)  # (subset, token)
    digits = np.array(np.unravel_index(np.arange(count), (len(subsets),) * len(labels))).T  # subset at every node
    secrets = np.array(list(product(range(v), repeat=L)))
    ways, survives = np.zeros((len(secrets), count), dtype=np.int64), np.ones((len(secrets), count), dtype=bool)
    for index, secret in enumerate(map(tuple, secrets.tolist())):
        codes = np.zeros(1, dtype=np.int64)
        for node, y in enumerate(labels):
            choices = np.arange(len(subsets))
            if y == secret[: len(y)]:  # {z_t} and any k − 1 of the others, each such set once
                choices = choices[holds[:, secret[len(y)]]]
                survives[index] &= holds[digits[:, node], secret[len(y)]]
            codes = (codes[:, None] * len(subsets) + choices).ravel()
        np.add.at(ways[index], codes, 1)
    return TreeLaws(secrets, subsets[digits], ways, int(ways[0].sum()), survives)
