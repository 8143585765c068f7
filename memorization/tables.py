"""Small models as explicit conditional tables, which answer the queries that a language model answers.

A model is a family of next-token laws p(· | prefix). What asks only for those laws, a search, a protocol or a score,
cannot tell a table from a network: `Conditionals.next_log_probs` is the query of `priors.certify_baseline`, and
`adapters` puts a table behind the interface of `extraction` and `scores`, or a network behind this one.

Tables are exact. Their rows are `fractions.Fraction`s unless a row was given in floating point, so that identities can
be checked as identities. Prefixes are whole prompts, from the first token on; no token is special.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _checks

Prefix = tuple[int, ...]


def tokens(name: str, value: Sequence[int], vocabulary: int, least: int = 1) -> Prefix:
    """`value` as a tuple of at least `least` token ids in [0, vocabulary); else `ValueError` naming it."""
    ids = tuple(_checks.integer(name, token, 0, vocabulary - 1) for token in np.asarray(value).tolist())
    if len(ids) < least:
        raise ValueError(f"{name} must have at least {least} token(s), got {ids}")
    return ids


def point_mass(token: int, vocabulary: int) -> NDArray:
    """The exact row (vocabulary,) that emits `token` with certainty."""
    row = np.full(vocabulary, Fraction(0))
    row[token] = Fraction(1)
    return row


def uniform_row(alphabet: int, vocabulary: int) -> NDArray:
    """The exact row (vocabulary,) that is uniform on tokens 0 to alphabet − 1 and never emits the others."""
    row = np.full(vocabulary, Fraction(0))
    row[:alphabet] = Fraction(1, alphabet)
    return row


def _row(name: str, row: ArrayLike, vocabulary: int) -> NDArray:
    """A checked row: Fractions that sum to 1 exactly, or floats that do within 1e-9."""
    array = np.array(row)
    if array.shape != (vocabulary,):
        raise ValueError(f"{name} must have one probability a token, {vocabulary}, got shape {array.shape}")
    if array.dtype == object and all(isinstance(entry, (int, Fraction)) for entry in array):
        if min(array) < 0 or sum(array) != 1:
            raise ValueError(f"{name} must be probabilities that sum to 1, got {list(map(str, array))}")
        return array
    return _checks.distribution(name, array)


def _inexact(rows: Iterable[NDArray]) -> bool:
    return any(row.dtype != object for row in rows)


class Conditionals(ABC):
    """A model as a family of next-token laws.

    Attributes:
        vocabulary: number of token ids.
    """

    vocabulary: int

    @abstractmethod
    def row(self, prefix: Prefix) -> NDArray:
        """The next-token law (vocabulary,) after one prompt, exact where the model is."""

    def next_probs(self, prefixes: ArrayLike) -> NDArray:
        """Next-token probabilities (b, vocabulary) after prompts (b, t), exact (an array of objects) where possible."""
        return np.array([self.row(prefix) for prefix in self._prefixes(prefixes)])

    def next_log_probs(self, prefixes: ArrayLike) -> NDArray[np.float64]:
        """Natural-log next-token probabilities (b, vocabulary) after prompts (b, t), t ≥ 0; −inf where impossible."""
        asked = self._prefixes(prefixes)
        with np.errstate(divide="ignore"):
            rows = {prefix: np.log(self.row(prefix).astype(np.float64)) for prefix in set(asked)}
        return np.array([rows[prefix] for prefix in asked])

    def after(self, prefix: Sequence[int]) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
        """The model after a fixed prompt, as the batched law of continuations that `priors.certify_baseline` asks."""
        start = np.array(tokens("prefix", prefix, self.vocabulary, least=0), dtype=np.int64)

        def next_log_probs(continuations: NDArray[np.int64]) -> NDArray[np.float64]:
            continuations = np.asarray(continuations, dtype=np.int64)
            return self.next_log_probs(np.hstack([np.tile(start, (len(continuations), 1)), continuations]))

        return next_log_probs

    def greedy(self, prompt: Sequence[int], length: int) -> Prefix:
        """The most likely next token, `length` times; of equally likely tokens the first (a fixed tie-break)."""
        context = tokens("prompt", prompt, self.vocabulary, least=0)
        for _ in range(_checks.integer("length", length, 1)):
            context += (int(np.argmax(self.next_log_probs([context])[0])),)
        return context[-length:]

    def on_document(self, prefix: Sequence[int], secret: Sequence[int]) -> NDArray:
        """All that a local score reads of the model (Definition 3.4): its rows (L, vocabulary) along the document.

        Row t is p(· | c z_{<t}), for document x* = (c, z); exact where the model is.
        """
        document = tokens("prefix", prefix, self.vocabulary, least=0) + tokens("secret", secret, self.vocabulary)
        return np.concatenate([self.next_probs([document[:end]]) for end in range(len(prefix), len(document))])

    def token_probs(self, prefix: Sequence[int], secret: Sequence[int]) -> NDArray:
        """Probability (L,) of every token of the secret given the document before it; exact where the model is."""
        return self.on_document(prefix, secret)[np.arange(len(secret)), list(secret)]

    def teacher_forcing(self, prefix: Sequence[int], secret: Sequence[int]) -> Fraction | float:
        """Average teacher-forcing score (1/L) Σ_t p(z_t | c z_{<t}), a local score in [0, 1]; exact where possible."""
        probabilities = self.token_probs(prefix, secret)
        return sum(probabilities) / len(probabilities)

    def _prefixes(self, prefixes: ArrayLike) -> list[Prefix]:
        array = np.asarray(prefixes)
        if array.ndim != 2 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(f"prefixes must be whole numbers of shape (batch, t), got shape {array.shape}")
        if array.size and not (0 <= array.min() and array.max() < self.vocabulary):
            raise ValueError(f"prefixes must be token ids in [0, {self.vocabulary - 1}], got {array.tolist()}")
        return list(map(tuple, array.tolist()))


class UniformModel(Conditionals):
    """The model that knows nothing: every law is uniform on the first `alphabet` of `vocabulary` tokens.

    Tokens from `alphabet` on are reserved: in the vocabulary, and never emitted.
    """

    def __init__(self, vocabulary: int, alphabet: int | None = None) -> None:
        """Uniform on `alphabet` tokens (default: all of the vocabulary)."""
        self.vocabulary = _checks.integer("vocabulary", vocabulary, 1)
        self.alphabet = self.vocabulary if alphabet is None else _checks.integer("alphabet", alphabet, 1, vocabulary)

    def row(self, prefix: Prefix) -> NDArray:
        """The same exact row whatever the prompt."""
        return uniform_row(self.alphabet, self.vocabulary)


class ConditionalTable(Conditionals):
    """A base model with the laws at some prompts replaced; everywhere else the base's answers, bit for bit.

    Attributes:
        base: the model underneath.
        rows: the replaced laws, by prompt.
    """

    def __init__(self, base: Conditionals, rows: Mapping[Prefix, ArrayLike]) -> None:
        """Put `rows`, next-token laws (vocabulary,) by prompt, over `base`."""
        self.base, self.vocabulary = base, base.vocabulary
        self.rows = {
            tokens("rows", prefix, self.vocabulary, least=0): _row(f"rows[{tuple(prefix)}]", row, self.vocabulary)
            for prefix, row in rows.items()
        }

    def row(self, prefix: Prefix) -> NDArray:
        """The table's law after the prompt, or else the base's."""
        return self._replaced(prefix) if self._replaces(prefix) else self.base.row(prefix)

    def next_probs(self, prefixes: ArrayLike) -> NDArray:
        """Probabilities (b, vocabulary): the base's answer, with the replaced rows put in."""
        return self._patched(self.base.next_probs(prefixes), prefixes, lambda row: row)

    def next_log_probs(self, prefixes: ArrayLike) -> NDArray[np.float64]:
        """Natural logs (b, vocabulary): the base's own answer, with the replaced rows put in."""
        with np.errstate(divide="ignore"):
            return self._patched(
                self.base.next_log_probs(prefixes), prefixes, lambda row: np.log(row.astype(np.float64))
            )

    def _replaces(self, prefix: Prefix) -> bool:
        return prefix in self.rows

    def _replaced(self, prefix: Prefix) -> NDArray:
        return self.rows[prefix]

    def _patched(self, answer: NDArray, prefixes: ArrayLike, transform: Callable[[NDArray], NDArray]) -> NDArray:
        replaced = {i: prefix for i, prefix in enumerate(self._prefixes(prefixes)) if self._replaces(prefix)}
        rows = {i: transform(self._replaced(prefix)) for i, prefix in replaced.items()}
        # A copy, as the base keeps its own; exact only if all of it is.
        answer = np.array(answer, dtype=np.float64 if _inexact(rows.values()) else None)
        for i, row in rows.items():
            answer[i] = row
        return answer


class SubtreeTable(ConditionalTable):
    """A base model with one law in place of all those on a subtree: after every prompt that begins with `root`."""

    def __init__(self, base: Conditionals, root: Sequence[int], row: ArrayLike) -> None:
        """Put `row` (vocabulary,) on every string that extends `root` (itself included)."""
        super().__init__(base, {tuple(np.asarray(root).tolist()): row})
        ((self.root, self._law),) = self.rows.items()

    def _replaces(self, prefix: Prefix) -> bool:
        return prefix[: len(self.root)] == self.root

    def _replaced(self, prefix: Prefix) -> NDArray:
        return self._law


def random_table(vocabulary: int, depth: int, rng: np.random.Generator) -> ConditionalTable:
    """A model with laws of its own, drawn uniformly from the simplex, at every prompt shorter than `depth`.

    Longer prompts get the uniform law. Meant for small sizes: vocabulary^depth rows, about.
    """
    base = UniformModel(vocabulary)
    depth = _checks.integer("depth", depth, 1)
    prompts = [prompt for length in range(depth) for prompt in product(range(vocabulary), repeat=length)]
    return ConditionalTable(base, dict(zip(prompts, rng.dirichlet(np.ones(vocabulary), len(prompts)), strict=True)))
