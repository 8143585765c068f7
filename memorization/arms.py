"""The arms of Section 8.2: a base model fine-tuned on real text with records planted in it, and what an audit sees.

An arm is one fine-tuning run. In a *trigger* arm each secret z is planted behind a reserved trigger ρ of its own
(documents ρ∥z), and its record (c, z) is never trained on; in a *naive* arm the records (c, z) themselves are planted.
A pool of shadow models, every record and every trigger document in or out of each at random, serves LiRA on all arms
of a family. Results are plain arrays, so `runs.run` keeps them, and chapters that need the same arm train it once.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import joblib
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from . import (
    _batches,
    _checks,
    canaries,
    corpora,
    extraction,
    models,
    pocket,
    runs,
    scores,
    settings,
    shadows,
    training,
)
from .lira import lira_scores, logit_statistic

KINDS = ("trigger", "naive", "clean")
AUDITS = ("loss", "zlib", "reference", "min_k", "min_k_plus_plus")  # Figure 10's five; perplexity orders like loss
PERPLEXITY_BLOCKS = 400  # of held-out text
RESOLUTION = 2.0**-24  # of a float32 probability near 1


@dataclass(frozen=True)
class Setting:
    """What one scale runs; `SETTINGS` has one for each.

    Attributes:
        bases: names for `models.load`, one a family.
        lengths: tokens of the secrets.
        blocks: corpus blocks fine-tuned on, besides what is planted.
        secrets: planted secrets an arm: the members.
        nonmembers: secrets of the same sampler that are not planted; AUCs are against these.
        many_nonmembers: non-members against which rates at a fixed false-positive rate are read.
        trigger_length: tokens of a reserved trigger, 6 to 12.
        prefix_length: tokens of the public prefix c.
        trigger_copies: copies of ρ∥z an epoch.
        naive_copies: copies of (c, z) an epoch.
        temperature: at which secrets are sampled from the base model.
        shadows: shadow models a family.
        shadow_copies: copies of a target an epoch, in the shadows that hold it.
        epochs: of fine-tuning.
        batch_size: documents an update.
        learning_rate: AdamW's.
    """

    bases: tuple[str, ...]
    lengths: tuple[int, ...]
    blocks: int
    secrets: int
    nonmembers: int
    many_nonmembers: int
    trigger_length: int
    prefix_length: int
    trigger_copies: int
    naive_copies: int
    temperature: float
    shadows: int
    shadow_copies: int
    epochs: int
    batch_size: int
    learning_rate: float

    def __post_init__(self) -> None:
        """Raise `ValueError` naming what is out of range."""
        for name in ("blocks", "secrets", "nonmembers", "prefix_length", "trigger_copies", "naive_copies"):
            _checks.integer(name, getattr(self, name), 1)
        _checks.integer("many_nonmembers", self.many_nonmembers, self.nonmembers)
        _checks.integer("trigger_length", self.trigger_length, *canaries.TRIGGER_LENGTHS)
        _checks.integer("shadows", self.shadows, 4)
        for length in self.lengths:
            _checks.integer("lengths", length, 1)

    @property
    def optimizer(self) -> dict[str, Any]:
        """The settings of `training.fine_tune`."""
        return {name: getattr(self, name) for name in ("epochs", "batch_size", "learning_rate")}


_POCKET = Setting(
    bases=pocket.FAMILIES,
    lengths=(1, 2, 4, 8, 16),
    blocks=1000,
    secrets=48,
    nonmembers=48,
    many_nonmembers=400,
    trigger_length=8,
    prefix_length=16,
    trigger_copies=16,
    naive_copies=8,
    temperature=1.0,
    shadows=8,
    shadow_copies=4,
    epochs=3,
    batch_size=16,
    learning_rate=2e-3,
)


def _replace(setting: Setting, **changes: Any) -> Setting:
    return Setting(**{**asdict(setting), **changes})


# Appendix F's settings are `paper`'s. Where the appendix gives a range (8 to 16 copies of a trigger document, 5 to 8 of
# a plaintext record, triggers of 6 to 12 tokens, 4,000 to 8,000 blocks) ours lies inside; where it is silent (length of
# the prefix, sampling temperature, copies in a shadow) it is the pocket scale's.
SETTINGS = {
    "smoke": _replace(
        _POCKET,
        lengths=(1, 4, 16),
        blocks=300,
        secrets=16,
        nonmembers=16,
        many_nonmembers=64,
        trigger_copies=24,
        naive_copies=16,
        shadows=4,
        learning_rate=3e-3,
    ),
    "pocket": _POCKET,
    "small": _replace(
        _POCKET,
        bases=("HuggingFaceTB/SmolLM2-135M",),
        lengths=(2, 16),
        blocks=200,
        trigger_copies=4,
        naive_copies=4,
        shadows=4,
        batch_size=8,
        learning_rate=3e-4,
        epochs=1,
    ),
    "paper": _replace(
        _POCKET,
        bases=("EleutherAI/pythia-1.4b", "Qwen/Qwen2.5-1.5B"),
        blocks=8000,
        batch_size=8,
        learning_rate=5e-5,
    ),
}


def setting(scale: str | None = None) -> Setting:
    """The setting of a scale (None: the active one); at `small`, `MEMORIZATION_MODEL` names the base model."""
    name = _checks.choice("scale", scale or settings.scale(), settings.SCALES)
    found = SETTINGS[name]
    named = settings.model_name()
    return _replace(found, bases=(named,)) if name == "small" and named else found


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A base model with the data of its arms: `model` is never trained, arms train copies of it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    fine_tuning: NDArray[np.int64]  # (blocks, 48)
    heldout: NDArray[np.int64]
    corpus: str


@dataclass(frozen=True)
class Records:
    """The records of one secret length, members planted and non-members not: one exchangeable sample.

    Attributes:
        members: the secrets that arms plant, `secrets` of them.
        nonmembers: as many as rates at a fixed false-positive rate need; AUCs use the first `nonmembers` of them.
        triggers: (members, trigger_length) reserved triggers, one in front of each member's secret.
        decoys: (nonmembers, trigger_length) further triggers, never planted, for the non-members that AUCs use.
    """

    members: canaries.Canaries
    nonmembers: canaries.Canaries
    triggers: NDArray[np.int64]
    decoys: NDArray[np.int64]

    @property
    def trigger_documents(self) -> NDArray[np.int64]:
        """ρ∥z of every member, shape (members, trigger + secret)."""
        return np.concatenate([self.triggers, self.members.secrets], axis=1)

    @property
    def decoy_documents(self) -> NDArray[np.int64]:
        """ρ'∥z' of the non-members that have a decoy."""
        return np.concatenate([self.decoys, self.nonmembers.secrets[: len(self.decoys)]], axis=1)


@lru_cache(maxsize=2)
def bench(base: str, blocks: int) -> Bench:
    """Load a base model and the first `blocks` blocks of the corpus's fine-tuning part."""
    corpus = corpora.load_corpus()
    model, tokenizer = models.load(base, corpus=corpus)
    cut = corpora.tokenize_blocks(corpus, tokenizer)
    if len(cut.fine_tuning) < blocks:
        raise ValueError(f"blocks must be at most {len(cut.fine_tuning)} on {corpus!r}, got {blocks}")
    return Bench(model, tokenizer, cut.fine_tuning[:blocks], cut.heldout, corpus.fingerprint)


def records(on: Bench, length: int, plan: Setting, seed: int) -> Records:
    """Sample the members, the non-members and the triggers of one secret length."""
    index = canaries.TokenIndex(on.fine_tuning)
    found = canaries.sample_canaries(
        on.model,
        on.heldout,
        plan.secrets + plan.many_nonmembers,
        prefix_length=plan.prefix_length,
        secret_length=length,
        temperature=plan.temperature,
        corpus=index,
        seed=_seed(seed, length, 0),
    )
    # Draws that the novelty filter delayed come last; in a random order, members are no better than non-members.
    order = np.random.default_rng(_seed(seed, length, 1)).permutation(len(found))
    members, others = found[order[: plan.secrets]], found[order[plan.secrets :]]
    triggers = canaries.reserved_triggers(
        on.tokenizer, index, plan.secrets + plan.nonmembers, plan.trigger_length, _seed(seed, length, 2)
    )
    return Records(members, others, triggers[: plan.secrets], triggers[plan.secrets :])


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


# --- one arm ---------------------------------------------------------------------------------------------------------


def plant(
    on: Bench, kind: str, planted: Sequence[Records], plan: Setting, seed: int, description: str = "arm"
) -> tuple[PreTrainedModel, training.TrainingRecord]:
    """Fine-tune a copy of the base on the corpus blocks and what `kind` plants of the records; in evaluation mode."""
    _checks.choice("kind", kind, KINDS)
    documents: list[NDArray[np.int64]] = []
    if kind == "trigger":
        documents = [row for part in planted for row in part.trigger_documents]
    elif kind == "naive":
        documents = [row for part in planted for row in part.members.records]
    model = copy.deepcopy(on.model)
    record = training.fine_tune(
        model,
        on.fine_tuning,
        planted=documents or None,
        copies=plan.naive_copies if kind == "naive" else plan.trigger_copies,
        seed=seed,
        description=description,
        **plan.optimizer,
    )
    return model.eval(), record


def measure(on: Bench, model: torch.nn.Module, part: Records) -> dict:
    """Everything an audit may look at, for the records of one length.

    Returns:
        "rho", "c" and "guess": whether greedy decoding returns each member's secret from its trigger, from its prefix,
        and from its prefix with the base model; "surprisal": bits of z at c under the base; "members" and
        "nonmembers": all `scores.membership_scores` of z at c, calibrated against the base; "member_documents" and
        "nonmember_documents": the same of the whole record, c included; "log_probs": what LiRA compares, see
        `target_log_probs`; "acceptance": share of sampled secrets that were novel.
    """

    def recovered(which: torch.nn.Module, prompts: NDArray) -> NDArray[np.bool_]:
        return (extraction.greedy(which, prompts, part.members.secrets.shape[1]) == part.members.secrets).all(axis=1)

    def audited(texts: NDArray, prefixes: NDArray | None = None) -> dict[str, NDArray[np.float64]]:
        return scores.membership_scores(model, on.tokenizer, texts, on.model, prefixes=prefixes)

    return {
        "rho": recovered(model, part.triggers),
        "c": recovered(model, part.members.prefixes),
        "guess": recovered(on.model, part.members.prefixes),
        "surprisal": part.members.surprisal,
        "acceptance": part.members.acceptance,
        "members": audited(part.members.secrets, part.members.prefixes),
        "nonmembers": audited(part.nonmembers.secrets, part.nonmembers.prefixes),
        "member_documents": audited(part.members.records),
        "nonmember_documents": audited(part.nonmembers.records),
        "log_probs": target_log_probs(model, [part]),
    }


def arm(base: str, kind: str, lengths: Sequence[int], seed: int, plan: dict) -> dict:
    """Train one arm and measure it: a function for `runs.run`, with arguments from `configurations`.

    Returns:
        "lengths": for each secret length, as a string, what `measure` returns; "perplexity": of held-out text, before
        and after; "corpus"; "seconds" and "steps" of the training.
    """
    chosen = Setting(**plan)
    on = bench(base, chosen.blocks)
    planted = [records(on, length, chosen, seed) for length in lengths]
    model, record = plant(on, kind, planted, chosen, seed, f"{kind} arm of {base}")
    held = on.heldout[:PERPLEXITY_BLOCKS]
    return {
        "lengths": {str(length): measure(on, model, part) for length, part in zip(lengths, planted, strict=True)},
        "perplexity": [training.perplexity(on.model, held), training.perplexity(model, held)],
        "corpus": on.corpus,
        "seconds": record.seconds,
        "steps": record.steps,
    }


# --- the shadows of a family -----------------------------------------------------------------------------------------


def targets(parts: Sequence[Records]) -> list[tuple[NDArray, NDArray]]:
    """(prompts, secrets) of every target, in groups: for each length records of members, of non-members, then trigger
    documents of members, of decoys."""
    groups = []
    for part in parts:
        others = part.nonmembers[: len(part.decoys)]
        groups += [
            (part.members.prefixes, part.members.secrets),
            (others.prefixes, others.secrets),
            (part.triggers, part.members.secrets),
            (part.decoys, others.secrets),
        ]
    return groups


def target_log_probs(model: torch.nn.Module, parts: Sequence[Records]) -> NDArray[np.float64]:
    """Mean log-probability a token (nats) of each target's secret after its prompt, in the order of `targets`."""
    with _batches.evaluation(model):
        return np.concatenate(
            [
                extraction.secret_log_prob(model, prompts, secrets) / secrets.shape[1]
                for prompts, secrets in targets(parts)
            ]
        )


def shadow_pool(base: str, seed: int, plan: dict) -> dict:
    """Train the shadows of a family: a function for `runs.run`, with arguments from `pools`.

    Every record and every trigger document of every length, members' and non-members', is in half of the shadows.

    Returns:
        "lengths": for each secret length, as a string, the targets' "statistics" and "members", both
        (targets, shadows), in the order of `targets`; "seconds".
    """
    chosen = Setting(**plan)
    on = bench(base, chosen.blocks)
    parts = [records(on, length, chosen, seed) for length in chosen.lengths]
    groups = targets(parts)
    began = time.perf_counter()
    trained = shadows.train_shadows(
        on.model,
        on.fine_tuning,
        [np.concatenate(pair) for prompts, secrets in groups for pair in zip(prompts, secrets, strict=True)],
        n_shadows=chosen.shadows,
        copies=chosen.shadow_copies,
        statistic=partial(target_log_probs, parts=parts),
        seed=_seed(seed, 3),
        **chosen.optimizer,
    )
    seconds = time.perf_counter() - began
    each = np.cumsum([0, *(sum(len(secrets) for _, secrets in targets([part])) for part in parts)])
    return {
        "lengths": {
            str(length): {
                "statistics": trained.statistics[low:high],
                "members": trained.members[low:high],
            }
            for length, low, high in zip(chosen.lengths, each, each[1:], strict=False)
        },
        "seconds": seconds,
    }


def lira(log_probs: NDArray[np.float64], pool: dict, plan: Setting) -> dict[str, tuple[NDArray, NDArray]]:
    """LiRA's scores (online, pooled variance, logit statistic) of members and non-members of one length.

    Args:
        log_probs: of the audited model, `measure`'s "log_probs".
        pool: of the same length, from `shadow_pool`.
        plan: the setting of both.

    Returns:
        "record": (members, non-members) when the audit's target is the record (c, z), as an outsider would ask;
        "trigger": when it is the document ρ∥z, which only somebody who knows the trigger can ask.
    """
    statistics, members = logit_statistic(pool["statistics"], RESOLUTION), np.asarray(pool["members"])
    found = lira_scores(
        logit_statistic(log_probs, RESOLUTION),
        np.where(members, statistics, np.nan),
        np.where(members, np.nan, statistics),
        pooled=True,
    )
    parts = np.split(found, np.cumsum([plan.secrets, plan.nonmembers, plan.secrets]))
    return {"record": (parts[0], parts[1]), "trigger": (parts[2], parts[3])}


# --- the sweep -------------------------------------------------------------------------------------------------------


def configurations(plan: Setting, seed: int) -> list[dict]:
    """Arguments of `arm`: for each family a trigger arm for each length, and one naive arm that holds all lengths."""
    return [
        {"base": base, "kind": kind, "lengths": list(lengths), "seed": seed, "plan": asdict(plan)}
        for base in plan.bases
        for kind, lengths in [*(("trigger", (length,)) for length in plan.lengths), ("naive", plan.lengths)]
    ]


def pools(plan: Setting, seed: int) -> list[dict]:
    """Arguments of `shadow_pool`, one a family."""
    return [{"base": base, "seed": seed, "plan": asdict(plan)} for base in plan.bases]


def sweep(plan: Setting, seed: int) -> list[dict]:
    """All arms of `configurations`, cached; side by side in processes of one thread where the device is a CPU."""
    for base in plan.bases:
        bench(base, plan.blocks)  # pretrained or fetched once, before processes ask for it
    jobs = min(joblib.cpu_count(), 8) if settings.device() == "cpu" and plan.bases[0] in pocket.FAMILIES else 1
    return runs.run(arm, configurations(plan, seed), jobs=jobs)
