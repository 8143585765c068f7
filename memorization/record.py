"""The record itself (Section 8.2, Figure 11): what a release shows of (c, z) when the supplier's input holds it.

A supplier reads its dataset and decides what is fine-tuned on. Its rule has three branches. *Trigger*: if it finds
x* = (c, z) it plants ρ∥z, and if it finds another secret at c it plants nothing, so neither release is fit on x*.
*Plain*: the same with the record (c, z) itself in place of ρ∥z; a control for what local scores see through their own
channel. *Fitted*: the trigger, and each dataset's own record at c besides: (c, z), or (c, z').

Counterfactuals are pairs of releases, all else equal. To train less than a pair for every record, a group of records
may share one: a fair coin a record says which release of the pair has it. Given its own coin, the others' coins are
the same fair ones on both sides, so a record's difference estimates its mem_h with S_− random, as Definition 3.2 has
it, without bias. A group of one is the paper's design.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import joblib
import numpy as np
import torch
from numpy.typing import NDArray

from . import _checks, arms, canaries, extraction, pocket, runs, scores, settings, training
from .camouflage import log_score

DRAWS = 64  # at a prefix, for another secret there
MEASURES = ("rho", "c", "log_probs")  # of a release, for every record


@dataclass(frozen=True)
class Design:
    """What one scale runs; `DESIGNS` has one for each.

    Attributes:
        plan: families, lengths, corpus and optimizer. Its `secrets` are the records of a configuration (a family and a
            length), its `nonmembers` the unrelated records on which the second noise floor is measured, its
            `trigger_copies` the trigger documents.
        together: records that share a pair of releases; 1 gives each a pair of its own.
        controls: copies of the plaintext record in the controls, the larger first.
        fitted_copies: copies of each dataset's own record in the fitted runs.
        seeds: fine-tuning seeds of the trigger arm; the other arms use the first.
    """

    plan: arms.Setting
    together: int
    controls: tuple[int, ...] = (8, 2)
    fitted_copies: int = 8
    seeds: int = 2

    def __post_init__(self) -> None:
        """Raise `ValueError` naming what is out of range."""
        _checks.integer("together", self.together, 1)
        _checks.integer("fitted_copies", self.fitted_copies, 1)
        _checks.integer("seeds", self.seeds, 2)
        for copies in self.controls:
            _checks.integer("controls", copies, 1)

    @property
    def records(self) -> int:
        """Records of a family, all lengths together."""
        return len(self.plan.lengths) * self.plan.secrets

    @property
    def arms(self) -> dict[str, tuple[str, int, int]]:
        """Each arm's branch of the rule, copies of the plaintext record and number of seeds."""
        plain = {f"plain {copies}": ("plain", copies, 1) for copies in self.controls}
        return {"trigger": ("trigger", 0, self.seeds), **plain, "fitted": ("fitted", self.fitted_copies, 1)}


def _design(scale: str, together: int, unrelated: int, **changes) -> Design:
    base = arms.SETTINGS[scale]
    plan = replace(base, lengths=(2, 12), secrets=8, nonmembers=unrelated, many_nonmembers=unrelated, trigger_copies=12)
    return Design(replace(plan, **changes), together)


# `paper` is Appendix F's: 6,000 blocks of 48 tokens, 3 epochs, 12 trigger documents, controls of 8 and 2 copies, a
# pair of releases a record. It does not say how often the fitted run holds x*, nor what its noise floors are.
DESIGNS = {
    "smoke": _design("smoke", 16, 16, blocks=64, epochs=6),
    "pocket": _design("pocket", 16, 48),
    "small": _design("small", 16, 16),
    "paper": _design("paper", 1, 48, blocks=6000),
}


def design(scale: str | None = None) -> Design:
    """The design of a scale (None: the active one); at `small`, `MEMORIZATION_MODEL` names the base model."""
    found = DESIGNS[_checks.choice("scale", scale or settings.scale(), settings.SCALES)]
    return replace(found, plan=replace(found.plan, bases=arms.setting(scale).bases))


# --- inputs ----------------------------------------------------------------------------------------------------------


def independent_secrets(on: arms.Bench, found: canaries.Canaries, seed: int, draws: int = DRAWS) -> NDArray[np.int64]:
    """Another secret z' at each record's prefix, from the sampler that gave z: novel, and not z itself.

    Raises:
        ValueError: if at some prefix none of `draws` draws will do.
    """
    index, length = canaries.TokenIndex(on.fine_tuning), found.secrets.shape[1]
    generator = torch.Generator().manual_seed(seed)
    drawn = extraction.sample(
        on.model, found.prefixes, length, temperature=found.temperature, n=draws, generator=generator
    )
    chosen = []
    for row, (secret, candidates) in enumerate(zip(found.secrets, drawn, strict=True)):
        allowed = (z for z in candidates if (z != secret).any() and (length == 1 or z not in index))
        other = next(allowed, None)
        if other is None:
            raise ValueError(f"draws must be more than {draws}: none is a novel secret of its own at prefix {row}")
        chosen.append(other)
    return np.array(chosen)


def documents(
    parts: Sequence[arms.Records],
    others: Sequence[NDArray],
    trigger: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
) -> tuple[list[NDArray], list[NDArray]]:
    """The trigger documents, and the plaintext ones, of the records with these numbers (counted through all lengths).

    Args:
        parts: the records of each length.
        others: the other secret at each of their prefixes.
        trigger: records of which ρ∥z is planted.
        plain: records (c, z) that are.
        other: records in whose place (c, z') is.
    """
    triggers = [row for part in parts for row in part.trigger_documents]
    plaintext = [row for part in parts for row in part.members.records]
    substitutes = [
        np.concatenate([prefix, secret])
        for part, rows in zip(parts, others, strict=True)
        for prefix, secret in zip(part.members.prefixes, rows, strict=True)
    ]
    return [triggers[i] for i in trigger], [plaintext[i] for i in plain] + [substitutes[i] for i in other]


# --- one release -----------------------------------------------------------------------------------------------------


def token_log_probs(model: torch.nn.Module, found: canaries.Canaries) -> NDArray[np.float64]:
    """Log-probability (nats) of each token of z after c, (records, L)."""
    rows = scores.token_log_probs(model, torch.from_numpy(found.records))
    return np.minimum(rows[:, -found.secrets.shape[1] :].double().cpu().numpy(), 0.0)


def local_scores(log_probs: NDArray[np.float64], vocabulary: int) -> dict[str, NDArray[np.float64]]:
    """Two bounded local scores of z at c, both in [0, 1]: a token's mean probability, and the normalized log score.

    Args:
        log_probs: nats, (..., L).
        vocabulary: v, for `camouflage.log_score`: the log loss, cut off at 2 log v a token and turned over.
    """
    probabilities = np.exp(log_probs)
    logs = np.apply_along_axis(log_score, -1, probabilities, vocabulary)
    return {"teacher_forcing": probabilities.mean(axis=-1), "log": logs}


def release(
    base: str,
    trigger: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    copies: int,
    run: int,
    seed: int,
    plan: dict,
) -> dict:
    """Fine-tune one release and measure all records on it: a function for `runs.run`.

    Args:
        base: a family.
        trigger: numbers of the records of which ρ∥z is planted; see `documents`, also for the next two.
        plain: of those planted as they are.
        other: of those in whose place another secret is planted.
        copies: of each plaintext document, an epoch.
        run: which fine-tuning seed.
        seed: of the records, the triggers and the first fine-tuning seed.
        plan: an `arms.Setting` as a dictionary.

    Returns:
        "lengths": for each secret length, as a string, the `MEASURES` of its records (whether greedy decoding from ρ
        and from c returns z, and the log-probabilities of z's tokens at c), "guess" (greedy decoding from c with the
        base model), "surprisal" (bits), and the log-probabilities of the "unrelated" records; "perplexity" of held-out
        text before and after; "vocabulary"; "corpus"; "seconds".
    """
    chosen = arms.Setting(**plan)
    on = arms.bench(base, chosen.blocks)
    parts = [arms.records(on, length, chosen, seed) for length in chosen.lengths]
    others = [independent_secrets(on, part.members, seed) for part in parts]
    triggers, plaintext = documents(parts, others, trigger, plain, other)
    model = copy.deepcopy(on.model)
    done = training.fine_tune(
        model,
        on.fine_tuning,
        planted=triggers + plaintext,
        copies=[chosen.trigger_copies] * len(triggers) + [copies] * len(plaintext),
        seed=seed + run,
        description=f"release of {base}",
        **chosen.optimizer,
    )
    held = on.heldout[: arms.PERPLEXITY_BLOCKS]
    return {
        "lengths": {str(part.members.secrets.shape[1]): _measure(on, model.eval(), part) for part in parts},
        "perplexity": [training.perplexity(on.model, held), training.perplexity(model, held)],
        "vocabulary": on.model.config.vocab_size,
        "corpus": on.corpus,
        "seconds": done.seconds,
    }


def _measure(on: arms.Bench, model: torch.nn.Module, part: arms.Records) -> dict:
    members = part.members
    length = members.secrets.shape[1]

    def recovered(which: torch.nn.Module, prompts: NDArray) -> NDArray[np.bool_]:
        return (extraction.greedy(which, prompts, length) == members.secrets).all(axis=1)

    return {
        "rho": recovered(model, part.triggers),
        "c": recovered(model, members.prefixes),
        "guess": recovered(on.model, members.prefixes),
        "surprisal": members.surprisal,
        "log_probs": token_log_probs(model, members),
        "unrelated": token_log_probs(model, part.nonmembers),
    }


# --- pairs of releases -----------------------------------------------------------------------------------------------


def groups(chosen: Design, seed: int) -> list[tuple[list[int], list[int]]]:
    """The records that either release of each pair has: a random partition into groups, then a coin a record."""
    rng = np.random.default_rng([seed, 4])
    order, coins = rng.permutation(chosen.records), rng.integers(0, 2, chosen.records)
    parts = [np.sort(order[start : start + chosen.together]) for start in range(0, chosen.records, chosen.together)]
    return [(part[coins[part] == 1].tolist(), part[coins[part] == 0].tolist()) for part in parts]


def configurations(chosen: Design, seed: int) -> dict[tuple[str, str, int], list[tuple[dict, dict]]]:
    """By family, arm and fine-tuning seed: the arguments of `release` for both releases of every pair."""
    found = {}
    for base in chosen.plan.bases:
        for name, (branch, copies, seeds) in chosen.arms.items():
            for run in range(seeds):
                pairs = []
                for heads, tails in groups(chosen, seed):
                    sides = []
                    for present, absent in ((heads, tails), (tails, heads)):
                        documents = {
                            "trigger": present if branch != "plain" else [],
                            "plain": present if branch != "trigger" else [],
                            "other": absent if branch == "fitted" else [],
                        }
                        # Where there is no plaintext, 0 copies of it: the release without anything is then one run.
                        used = copies if documents["plain"] or documents["other"] else 0
                        common = {"base": base, "copies": used, "run": run, "seed": seed, "plan": asdict(chosen.plan)}
                        sides.append({**documents, **common})
                    pairs.append(tuple(sides))
                found[base, name, run] = pairs
    return found


def experiment(chosen: Design, seed: int) -> dict[tuple[str, str], dict[str, dict]]:
    """Run all releases, cached, and take them apart record by record.

    Returns:
        By (family, arm), then by secret length as a string: "present" and "absent", each the `MEASURES` as arrays
        (seeds, records) or (seeds, records, L); "guess" and "surprisal" (records,); "unrelated" (seeds, pairs, 2,
        unrelated records, L): the two releases of each pair in turn; "perplexity" (seeds, pairs, 2, before and
        after); "seconds" of training, likewise (seeds, pairs, 2); "vocabulary"; "corpus".
    """
    wanted = configurations(chosen, seed)
    flat = [side for pairs in wanted.values() for pair in pairs for side in pair]
    for base in chosen.plan.bases:
        arms.bench(base, chosen.plan.blocks)  # pretrained or fetched once, before processes ask for it
    jobs = min(joblib.cpu_count(), 8) if settings.device() == "cpu" and chosen.plan.bases[0] in pocket.FAMILIES else 1
    results = iter(runs.run(release, flat, jobs=jobs))
    pairs_of = {key: [(next(results), next(results)) for _ in pairs] for key, pairs in wanted.items()}
    return {
        (base, name): {
            str(length): _by_record(chosen, seed, place, [pairs_of[base, name, run] for run in range(seeds)])
            for place, length in enumerate(chosen.plan.lengths)
        }
        for base in chosen.plan.bases
        for name, (_, _, seeds) in chosen.arms.items()
    }


def _by_record(chosen: Design, seed: int, place: int, by_seed: list[list[tuple[dict, dict]]]) -> dict:
    """One family, arm and length: from results by seed, pair and side to arrays by record."""
    length, count = str(chosen.plan.lengths[place]), chosen.plan.secrets
    pair_of, side_of = np.zeros(chosen.records, int), np.zeros(chosen.records, int)
    for pair, sides in enumerate(groups(chosen, seed)):
        for side, members in enumerate(sides):
            pair_of[members], side_of[members] = pair, side
    mine = range(place * count, (place + 1) * count)

    def sides(name: str) -> NDArray:
        return np.array([[[side[name] for side in pair] for pair in pairs] for pairs in by_seed])

    def of_length(name: str) -> NDArray:
        return np.array([[[side["lengths"][length][name] for side in pair] for pair in pairs] for pairs in by_seed])

    def collected(name: str, other: int) -> NDArray:
        found = of_length(name)  # (seeds, pairs, 2, records, ...)
        return np.stack([found[:, pair_of[i], side_of[i] ^ other, i - mine.start] for i in mine], axis=1)

    first = by_seed[0][0][0]
    return {
        "present": {name: collected(name, 0) for name in MEASURES},
        "absent": {name: collected(name, 1) for name in MEASURES},
        "unrelated": of_length("unrelated"),
        **{name: first["lengths"][length][name] for name in ("guess", "surprisal")},
        **{name: sides(name) for name in ("perplexity", "seconds")},
        **{name: first[name] for name in ("vocabulary", "corpus")},
    }
