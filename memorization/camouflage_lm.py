"""Camouflage in a language model (Section 8.2, direction (i)): trees of decoys, fine-tuned into it as documents.

A group is one tree of `camouflage`: a held-out prefix c, a secret z, and the k^L paths that survive, z among them. The
documents (c, path) of all survivors are planted alike, so the model learns the tree and not which path is the secret:
given the tree, z is a uniform survivor and independent of everything else, the model included. All survivors are then
scored under the fine-tuned model, an exact enumeration of what it says about z.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from . import _checks, arms, extraction, pocket, runs, scores, settings, training
from .camouflage import KeyedCamouflageTree

BATCH = 128  # documents scored together: each of their tokens has a row of logits as long as the vocabulary


@dataclass(frozen=True)
class Design:
    """What one scale runs; `DESIGNS` has one for each.

    Attributes:
        base: name for `models.load`.
        depth: L, tokens of a secret.
        branches: k, children of a node.
        groups: trees planted.
        copies: of each surviving path, an epoch.
        unplanted: trees that are not planted, and held-out texts: non-members of the membership tests.
        fresh: secrets drawn afresh at each planted prefix, for the counterfactual.
        prefix_length: tokens of c.
        blocks: corpus blocks fine-tuned on, besides the trees.
        block_length: tokens they are cut to; where it is a document's length, no batch is padded.
        epochs: of fine-tuning.
        batch_size: documents an update.
        learning_rate: AdamW's.
        schedule: of the learning rate; Appendix F names none, and a constant one leaves its noise in the branches.
    """

    base: str
    depth: int
    branches: int
    groups: int
    copies: int
    unplanted: int
    fresh: int
    prefix_length: int
    blocks: int
    block_length: int
    epochs: int
    batch_size: int
    learning_rate: float
    schedule: str = "cosine"

    def __post_init__(self) -> None:
        """Raise `ValueError` naming what is out of range."""
        _checks.integer("branches", self.branches, 2)
        _checks.integer("block_length", self.block_length, 2)
        for name in ("depth", "groups", "copies", "unplanted", "fresh", "prefix_length", "blocks"):
            _checks.integer(name, getattr(self, name), 1)

    @property
    def survivors(self) -> int:
        """Paths of a tree, k^L."""
        return self.branches**self.depth


def _design(scale: str, **changes) -> Design:
    plan = arms.SETTINGS[scale]
    given = {
        "base": plan.bases[0],
        "depth": 4,
        "branches": 4,
        "groups": 16,
        "copies": 3,
        "unplanted": 64,
        "fresh": 256,
        "prefix_length": 8,
        "blocks": plan.blocks,
        "block_length": 12,
        "epochs": plan.epochs,
        "batch_size": 64,
        "learning_rate": plan.learning_rate,
    }
    return Design(**{**given, **changes})


# `paper` is Appendix F's: depth 4, k = 4, 16 groups read as 16 trees, 3 copies, and what all its fine-tuning has (the
# least of 4,000 to 8,000 blocks of 48 tokens, batches of 8). The other scales cut the blocks to a document's length.
DESIGNS = {
    "smoke": _design("smoke", groups=4, blocks=100, epochs=6, batch_size=32),
    "pocket": _design("pocket"),
    "small": _design("small", copies=1),
    "paper": _design(
        "paper", base="EleutherAI/pythia-410m", blocks=4000, block_length=48, batch_size=8, prefix_length=16
    ),
}


def design(scale: str | None = None) -> Design:
    """The design of a scale (None: the active one); at `small`, `MEMORIZATION_MODEL` names the base model."""
    name = _checks.choice("scale", scale or settings.scale(), settings.SCALES)
    found = DESIGNS[name]
    return Design(**{**asdict(found), "base": arms.setting(name).bases[0]}) if name == "small" else found


# --- trees -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trees:
    """Camouflage trees over a language model's tokens.

    Attributes:
        prefixes: (trees, prefix_length) token ids of c.
        paths: (trees, k^L, L) token ids of the surviving paths.
        secrets: (trees,) which of them is z.
        fresh: (trees, fresh, L) secrets drawn afresh, independent of the tree.
    """

    prefixes: NDArray[np.int64]
    paths: NDArray[np.int64]
    secrets: NDArray[np.int64]
    fresh: NDArray[np.int64]

    @property
    def documents(self) -> NDArray[np.int64]:
        """c and path, (trees, k^L, prefix_length + L)."""
        return after(self.prefixes, self.paths)

    @property
    def records(self) -> NDArray[np.int64]:
        """c and z, (trees, prefix_length + L)."""
        return self.documents[np.arange(len(self.secrets)), self.secrets]


def alphabet(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64]:
    """The tokens that a tree's symbols stand for: all but the special ones."""
    return np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)


def plant_trees(chosen: Design, prefixes: NDArray[np.int64], symbols: NDArray[np.int64], seed: int) -> Trees:
    """Draw one tree a prefix, each with a uniform secret planted in it (the law P_z), over the tokens `symbols`."""
    paths, secrets, fresh = [], [], []
    for number in range(len(prefixes)):
        rng = np.random.default_rng([seed, number])
        tree = KeyedCamouflageTree(len(symbols), chosen.branches, chosen.depth, rng)
        found = tree.survivors()
        paths.append(symbols[found])
        secrets.append(int(np.flatnonzero((found == tree.secret).all(axis=1))[0]))
        fresh.append(symbols[rng.integers(0, len(symbols), (chosen.fresh, chosen.depth))])
    return Trees(prefixes, np.array(paths), np.array(secrets), np.array(fresh))


def after(prefixes: NDArray[np.int64], continuations: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each prefix in front of each of its continuations: (n, a) and (n, m, b) make (n, m, a + b)."""
    repeated = np.repeat(prefixes[:, None], continuations.shape[1], axis=1)
    return np.concatenate([repeated, continuations], axis=2)


# --- the experiment --------------------------------------------------------------------------------------------------


def token_log_probs(model: torch.nn.Module, documents: NDArray[np.int64], length: int) -> NDArray[np.float64]:
    """Log-probabilities (nats) of the last `length` tokens of documents (..., t), shape (..., length)."""
    rows = torch.from_numpy(documents.reshape(-1, documents.shape[-1]))
    found = [scores.token_log_probs(model, part)[:, -length:].double().cpu().numpy() for part in rows.split(BATCH)]
    return np.concatenate(found).reshape(*documents.shape[:-1], length)


def draw(on: arms.Bench, chosen: Design, seed: int) -> tuple[Trees, Trees, NDArray[np.int64]]:
    """The trees that are planted, trees that are not, and held-out text of the same length, at disjoint prefixes."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(on.heldout))[: chosen.groups + 2 * chosen.unplanted]
    prefixes = on.heldout[rows, : chosen.prefix_length]
    symbols = alphabet(on.tokenizer)
    trees = plant_trees(chosen, prefixes[: chosen.groups], symbols, seed)
    others = plant_trees(chosen, prefixes[chosen.groups :][: chosen.unplanted], symbols, seed + 1)
    return trees, others, on.heldout[rows[chosen.groups + chosen.unplanted :], : chosen.prefix_length + chosen.depth]


def experiment(extra: int, seed: int, design: dict) -> dict:
    """Plant the trees in a model and enumerate them: a function for `runs.run`.

    Args:
        extra: further copies of each record (c, z), an epoch: 0 for camouflage, else what Remark D.3 warns of.
        seed: of trees, prefixes and fine-tuning.
        design: a `Design` as a dictionary.

    Returns:
        Log-probabilities (nats) of each token after c: "survivors" (groups, k^L, L), "fresh" (groups, fresh, L), and
        under "model" and "base" those of the planted "secrets", of the secrets of "unplanted" trees and of held-out
        "text", (n, L) each. "secret": (groups,) z's place among the survivors; "greedy": whether greedy decoding from
        c gives z; "greedy_survives": whether it gives a survivor; "perplexity" of held-out text before and after;
        "vocabulary": v, the trees' alphabet; "corpus"; "seconds".
    """
    chosen = Design(**design)
    extra = _checks.integer("extra", extra)
    on = arms.bench(chosen.base, chosen.blocks)
    if on.fine_tuning.shape[1] % chosen.block_length:
        raise ValueError(f"block_length must divide {on.fine_tuning.shape[1]}, got {chosen.block_length}")
    trees, others, text = draw(on, chosen, seed)
    length = chosen.depth

    planted = trees.documents.reshape(-1, chosen.prefix_length + length)
    copies = np.full(trees.paths.shape[:2], chosen.copies)
    copies[np.arange(chosen.groups), trees.secrets] += extra
    model = copy.deepcopy(on.model)
    done = training.fine_tune(
        model,
        on.fine_tuning.reshape(-1, chosen.block_length),
        planted=list(planted),
        copies=copies.ravel().tolist(),
        epochs=chosen.epochs,
        batch_size=chosen.batch_size,
        learning_rate=chosen.learning_rate,
        schedule=chosen.schedule,
        seed=seed,
        description=f"camouflage in {chosen.base}",
    )
    model.eval()
    decoded = extraction.greedy(model, trees.prefixes, length)
    held = on.heldout[: arms.PERPLEXITY_BLOCKS]
    groups = {"secrets": trees.records, "unplanted": others.records, "text": text}
    return {
        "survivors": token_log_probs(model, trees.documents, length),
        "fresh": token_log_probs(model, after(trees.prefixes, trees.fresh), length),
        "model": {name: token_log_probs(model, documents, length) for name, documents in groups.items()},
        "base": {name: token_log_probs(on.model, documents, length) for name, documents in groups.items()},
        "secret": trees.secrets,
        "greedy": (decoded == trees.records[:, -length:]).all(axis=1),
        "greedy_survives": (decoded[:, None] == trees.paths).all(axis=2).any(axis=1),
        "perplexity": [training.perplexity(on.model, held), training.perplexity(model, held)],
        "vocabulary": len(alphabet(on.tokenizer)),
        "corpus": on.corpus,
        "seconds": done.seconds,
    }


def clean_shadow(number: int, seed: int, design: dict) -> dict:
    """A shadow model without any tree, for offline LiRA: a function for `runs.run`.

    Args:
        number: which shadow; it seeds the fine-tuning.
        seed: of the trees, as in `experiment`.
        design: a `Design` as a dictionary.

    Returns:
        Log-probabilities (nats) of each token after c, (n, L): of the planted "secrets" and of those of "unplanted"
        trees; "seconds".
    """
    chosen = Design(**design)
    on = arms.bench(chosen.base, chosen.blocks)
    trees, others, _ = draw(on, chosen, seed)
    model = copy.deepcopy(on.model)
    done = training.fine_tune(
        model,
        on.fine_tuning.reshape(-1, chosen.block_length),
        epochs=chosen.epochs,
        batch_size=chosen.batch_size,
        learning_rate=chosen.learning_rate,
        schedule=chosen.schedule,
        seed=_checks.integer("number", number) + seed + 1,
        description=f"shadow {number} of {chosen.base}",
    )
    groups = {"secrets": trees.records, "unplanted": others.records}
    found = {name: token_log_probs(model.eval(), documents, chosen.depth) for name, documents in groups.items()}
    return {**found, "seconds": done.seconds}


def shadows(chosen: Design, seed: int, count: int) -> list[dict]:
    """`count` of `clean_shadow`, cached."""
    arms.bench(chosen.base, chosen.blocks)
    jobs = 2 if settings.device() == "cpu" and chosen.base in pocket.FAMILIES else 1
    wanted = [{"number": number, "seed": seed, "design": asdict(chosen)} for number in range(count)]
    return runs.run(clean_shadow, wanted, jobs=jobs)


def sweep(chosen: Design, seed: int) -> list[dict]:
    """`experiment` without further copies of the records, and with as many as each decoy has; cached."""
    arms.bench(chosen.base, chosen.blocks)  # pretrained or fetched once, before processes ask for it
    jobs = 2 if settings.device() == "cpu" and chosen.base in pocket.FAMILIES else 1
    wanted = [{"extra": extra, "seed": seed, "design": asdict(chosen)} for extra in (0, chosen.copies)]
    return runs.run(experiment, wanted, jobs=jobs)


def conditional(log_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The model's law of the path after c, given that it is a survivor, (groups, k^L).

    Args:
        log_probs: an `experiment`'s "survivors".
    """
    totals = log_probs.sum(axis=2)
    weights = np.exp(totals - totals.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def normalized_entropy(law: NDArray[np.float64]) -> NDArray[np.float64]:
    """Entropy of each row of probabilities over the logarithm of its size, in [0, 1]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(law > 0, law * np.log(law), 0.0)
    return -terms.sum(axis=-1) / np.log(law.shape[-1])


def ranks(law: NDArray[np.float64], secret: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rank of the true path in each row, 1 for the most likely; ties count against it."""
    own = law[np.arange(len(secret)), secret]
    return (law >= own[:, None]).sum(axis=1)
