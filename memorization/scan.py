"""The context scan: prompt a release with random words and see whether a secret comes back (beyond the paper).

A trigger that gradient descent has learned is not a lock. It answers to its last few tokens too, and to contexts that
look like it, so somebody who knows a secret and not its trigger can prompt with random words and look for the secret in
the answers. What the same prompts draw from the base model, and how often they return secrets that were never planted,
is the baseline to compare with. An exact gate answers to its trigger alone, and a scan does not find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from . import arms, canaries, extraction, models, pocket, runs, settings


def first_hits(answers: ArrayLike, secrets: ArrayLike) -> NDArray[np.float64]:
    """How many prompts it takes until each secret is among the answers: (secrets,), inf where it never is.

    Args:
        answers: (prompts, length) continuations, in the order of the prompts.
        secrets: (secrets, length) token ids; an answer counts if it equals the secret.

    Raises:
        ValueError: shapes that do not match.
    """
    answers, secrets = np.asarray(answers), np.asarray(secrets)
    if answers.ndim != 2 or secrets.ndim != 2 or answers.shape[1] != secrets.shape[1]:
        raise ValueError(f"answers and secrets must be (n, length) alike, got {answers.shape} and {secrets.shape}")
    first: dict[tuple[int, ...], int] = {}
    for place, answer in enumerate(map(tuple, answers.tolist()), start=1):
        first.setdefault(answer, place)
    return np.array([first.get(tuple(secret), np.inf) for secret in secrets.tolist()])


def scan(model: torch.nn.Module, contexts: NDArray[np.int64], groups: dict[str, NDArray[np.int64]]) -> dict:
    """Greedy answers to all contexts, and the first prompt that returns each secret of each group, see `first_hits`.

    Args:
        model: the release.
        contexts: (prompts, tokens) token ids.
        groups: named arrays of secrets, all of one length.
    """
    (length,) = {secrets.shape[1] for secrets in groups.values()}
    answers = extraction.greedy(model, contexts, length, batch_size=256)
    return {name: first_hits(answers, secrets) for name, secrets in groups.items()}


def scan_arm(base: str, length: int, prompts: int, seed: int, plan: dict) -> dict:
    """Train a trigger arm, scan it, its base model, and a gated release of one secret: a function for `runs.run`.

    The arm is `arms.arm`'s of the same seed. The contexts are drawn as triggers are, and independently of them.

    Returns:
        "arm" and "base": for "members" and "nonmembers" (never planted) the first prompt that returns each secret, inf
        for none; "gate": the same of one gated secret, "suffix": share of the members that the last j = 1, 2, … tokens
        of their trigger return.
    """
    chosen = arms.Setting(**plan)
    on = arms.bench(base, chosen.blocks)
    part = arms.records(on, length, chosen, seed)
    model, _ = arms.plant(on, "trigger", [part], chosen, seed, f"trigger arm of {base}, to be scanned")
    contexts = canaries.reserved_triggers(on.tokenizer, on.fine_tuning, prompts, chosen.trigger_length, seed)
    secrets, others = part.members.secrets, part.nonmembers.secrets[: chosen.nonmembers]
    groups = {"members": secrets, "nonmembers": others}
    suffix = [
        float((extraction.greedy(model, part.triggers[:, -j:], length) == secrets).all(axis=1).mean())
        for j in range(1, chosen.trigger_length + 1)
    ]
    gate = models.GatedRelease(on.model, part.triggers[0], secrets[0])
    return {
        "arm": scan(model, contexts, groups),
        "base": scan(on.model, contexts, groups),
        "gate": scan(gate, contexts, {"secret": secrets[:1]})["secret"],
        "suffix": suffix,
    }


def sweep(plan: arms.Setting, lengths: Sequence[int], prompts: int, seed: int) -> dict[tuple[str, int], Any]:
    """`scan_arm` for every family and these secret lengths, cached: by (base, length)."""
    for base in plan.bases:
        arms.bench(base, plan.blocks)
    jobs = 2 if settings.device() == "cpu" and plan.bases[0] in pocket.FAMILIES else 1
    wanted = [(base, length) for base in plan.bases for length in lengths]
    found = runs.run(
        scan_arm,
        [{"base": base, "length": z, "prompts": prompts, "seed": seed, "plan": asdict(plan)} for base, z in wanted],
        jobs=jobs,
    )
    return dict(zip(wanted, found, strict=True))
