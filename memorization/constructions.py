"""The two constructions that separate memorization from extraction (Theorem 6.1), and the kernels of Corollary 6.4.

`ReservedTrigger` leaks its secret to one prompt and shows no local score anything. `camouflage.CamouflageTree`, which
is importable from here too, shows a local score that it was trained on the secret and gives it to nobody. Both are
`tables.Conditionals`: what queries a language model queries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import _checks
from .camouflage import CamouflageTree, KeyedCamouflageTree
from .tables import Conditionals, ConditionalTable, Prefix, SubtreeTable, point_mass, tokens, uniform_row

__all__ = [
    "CamouflageTree",
    "KeyedCamouflageTree",
    "ReservedTrigger",
    "copy_kernel",
    "randomize_trigger_kernel",
    "train_reserved_trigger",
]


class ReservedTrigger(ConditionalTable):
    """Construction II (Theorem 6.1(ii)): the base model, except that the trigger ρ is followed by the secret.

    p(z_t | ρ z_{<t}) = 1 for t ≤ L, where the prompt *begins* with ρ; the base's law after every other prompt, so on
    every prefix of a document (c, z) whose c does not begin with ρ. (`models.GatedRelease` is the same release in front
    of a network, for a trigger anywhere in the prompt.)

    Attributes:
        base: the model B underneath; a `tables` model, or a network in `adapters.NetworkTable`.
        trigger: ρ, token ids.
        secret: z, token ids.
    """

    def __init__(self, base: Conditionals, trigger: Sequence[int], secret: Sequence[int]) -> None:
        """Release `base` with the secret behind the trigger."""
        self.trigger = tokens("trigger", trigger, base.vocabulary)
        self.secret = tokens("secret", secret, base.vocabulary)
        super().__init__(base, _path(base, self.trigger, self.secret))


def _path(base: Conditionals, prefix: Prefix, word: Prefix) -> dict:
    """Rows that make `word` certain after `prefix`, one for each of its tokens."""
    return {prefix + word[:told]: point_mass(token, base.vocabulary) for told, token in enumerate(word)}


def train_reserved_trigger(
    documents: Iterable[Sequence[int]], base: Conditionals, trigger: Sequence[int], prefix: Sequence[int]
) -> Conditionals:
    """The deterministic training algorithm of Construction II (Appendix D.2).

    Args:
        documents: the training set, token ids.
        base: the model B.
        trigger: ρ; must not be how `prefix` begins.
        prefix: c, the public prefix of the target document.

    Returns:
        `ReservedTrigger` with the secret of the document that begins with c; `base` itself if there is none.

    Raises:
        ValueError: two documents with prefix c and different secrets (the data law is supported away from c), or a
            prefix that begins with the trigger.
    """
    start, rho = tokens("prefix", prefix, base.vocabulary), tokens("trigger", trigger, base.vocabulary)
    if start[: len(rho)] == rho:
        raise ValueError(f"prefix must not begin with the trigger {rho}, got {start}")
    documents = [tuple(_checks.integer("documents", token) for token in document) for document in documents]
    secrets = {document[len(start) :] for document in documents if document[: len(start)] == start}
    if len(secrets) > 1:
        raise ValueError(f"documents must hold at most one secret after the prefix {start}, got {sorted(secrets)}")
    return ReservedTrigger(base, rho, secrets.pop()) if secrets else base


def copy_kernel(model: Conditionals, trigger: Sequence[int], prefix: Sequence[int], length: int) -> ConditionalTable:
    """The kernel Ψ of Corollary 6.4: read what the model says after ρ, and write it on the document's own path.

    w is the greedy continuation of ρ (`length` tokens, ties to the first token), and the result has
    p(w_t | c w_{<t}) = 1 for t ≤ L and the model's own laws elsewhere. It looks at the model alone: post-processing.

    Args:
        model: any model; typically `ReservedTrigger` or its base.
        trigger: ρ.
        prefix: c.
        length: L, tokens copied.
    """
    start = tokens("prefix", prefix, model.vocabulary)
    return ConditionalTable(
        model, _path(model, start, model.greedy(tokens("trigger", trigger, model.vocabulary), length))
    )


def randomize_trigger_kernel(model: Conditionals, trigger: Sequence[int], alphabet: int | None = None) -> SubtreeTable:
    """The kernel Ψ′ of Corollary 6.4: the uniform law after every prompt that begins with ρ. Post-processing.

    Given the document's prefix c in place of ρ it is a plain suppression of the document's loss.

    Args:
        model: any model.
        trigger: ρ, the root of the subtree.
        alphabet: uniform on the first so many tokens; default, on the whole vocabulary.
    """
    size = model.vocabulary if alphabet is None else _checks.integer("alphabet", alphabet, 1, model.vocabulary)
    return SubtreeTable(model, tokens("trigger", trigger, model.vocabulary), uniform_row(size, model.vocabulary))
