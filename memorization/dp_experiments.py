"""Section 8.2's two experiments on privately trained models, as functions for `runs.run`, with their settings by scale.

*Calibration* (Theorem 4.1): canaries at several numbers of copies, all of them in one pair of models. A fair coin for
each canary says which of the two trains on it, so the canary's score under the one less its score under the other has
the leave-one-out memorization as its mean, averaged over the other canaries' coins; and where nothing is memorized,
the coins make the canaries' differences independent with mean zero, whatever noise the two models share.

*Entropy floor* (Corollary 5.3): canaries drawn at several temperatures, each one's guessability certified under its own
temperature; then three models asked for them: the base model, which never saw them, a private one, and a leaky one.

The scale "paper" is Appendix F's, as far as that is printed; what it leaves open is marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray

from . import _checks, corpora, extraction, models, priors, private_training, scores, settings
from .canaries import Canaries, TokenIndex, sample_canaries

ARMS = ("private", "leaky")
NOVELTY_DRAWS = 64  # fresh draws a prefix, to learn how often the novelty filter of its canary would have passed one

# One entry a scale; `calibration_configurations` and `sweep_configurations` turn them into configurations.
CALIBRATION = {
    "smoke": {
        "model": "pocket-neox", "blocks": 40, "per_cell": 12, "copies": [1, 2, 4, 8],
        "epsilons": [0.05, 1.0, float("inf")], "prefix_length": 16, "secret_length": 8,
        "epochs": 3, "batch_size": 32, "physical_batch": 32, "learning_rate": 2e-3, "max_grad_norm": 1.0,
    },
    "pocket": {
        "model": "pocket-neox", "blocks": 192, "per_cell": 32, "copies": [1, 2, 4, 8],
        "epsilons": [0.05, 0.1, 0.25, 0.5, 1.0, 4.0, 16.0, float("inf")], "prefix_length": 16, "secret_length": 8,
        "epochs": 3, "batch_size": 32, "physical_batch": 32, "learning_rate": 1e-3, "max_grad_norm": 1.0,
    },
    # Not printed: N (δ ≤ 2.5e-5 asks for 4,000 at least), the logical batch, the learning rate, the canary's lengths.
    "paper": {
        "model": "EleutherAI/pythia-410m", "blocks": 4000, "per_cell": 32, "copies": [1, 2, 4, 8],
        "epsilons": [0.05, 0.1, 0.25, 0.5, 1.0, 4.0, 16.0, float("inf")], "prefix_length": 16, "secret_length": 8,
        "epochs": 3, "batch_size": 64, "physical_batch": 8, "learning_rate": 5e-5, "max_grad_norm": 1.0,
    },
}  # fmt: skip
CALIBRATION["small"] = {**CALIBRATION["paper"], "model": "", "blocks": 1000}  # MEMORIZATION_MODEL

SWEEP = {
    "smoke": {
        "model": "pocket-neox", "blocks": 60, "temperatures": [0.1, 0.4, 0.8, 1.2], "per_temperature": 20,
        "prefix_length": 16, "secret_length": 4, "budget": 1700, "epsilon": 4.0, "leaky_copies": 8,
        "epochs": 3, "batch_size": 32, "physical_batch": 32, "learning_rate": 2e-3, "max_grad_norm": 1.0,
    },
    "pocket": {
        "model": "pocket-neox", "blocks": 500, "temperatures": [0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3],
        "per_temperature": 40, "prefix_length": 16, "secret_length": 4, "budget": 1700, "epsilon": 4.0,
        "leaky_copies": 8, "epochs": 3, "batch_size": 32, "physical_batch": 32, "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
    },
    # Not printed: length, temperatures, budget, the leaky model's copies, N, the logical batch, the learning rate. The
    # budget settles every canary at H* = 9.09 bits: 4 + 3 · 2^H* = 1,641 prefixes (chapter on certification).
    "paper": {
        "model": "EleutherAI/pythia-410m", "blocks": 4000, "temperatures": [0.1, 0.3, 0.5, 0.7, 0.9, 1.1],
        "per_temperature": 40, "prefix_length": 16, "secret_length": 4, "budget": 1700, "epsilon": 4.0,
        "leaky_copies": 8, "epochs": 3, "batch_size": 64, "physical_batch": 8, "learning_rate": 5e-5,
        "max_grad_norm": 1.0,
    },
}  # fmt: skip
SWEEP["small"] = {**SWEEP["paper"], "model": "", "blocks": 1000}


def _data(model: str) -> tuple[torch.nn.Module, corpora.Blocks]:
    """The base model (`MEMORIZATION_MODEL` for an empty name) and the corpus in its tokens."""
    name = model or settings.model_name()
    if not name:
        raise ValueError("MEMORIZATION_MODEL must name the model of the scale 'small', got nothing")
    base, tokenizer = models.load(name)
    return base, corpora.tokenize_blocks(corpora.load_corpus(), tokenizer)


def _chosen(blocks: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """`count` of the fine-tuning blocks, at random."""
    _checks.integer("blocks", count, 1, len(blocks))
    return blocks[np.random.default_rng([seed, 0]).choice(len(blocks), count, replace=False)]


def teacher_forcing(model: torch.nn.Module, canaries: Canaries) -> NDArray[np.float64]:
    """The mean probability of each secret's tokens given what is before them, (n,), in [0, 1]: the score h."""
    found = []
    for rows in np.array_split(canaries.records, -(-len(canaries) // 64)):
        log_p = scores.token_log_probs(model, torch.from_numpy(rows))[:, -canaries.secrets.shape[1] :]
        found.append(log_p.double().exp().mean(1).cpu().numpy())
    return np.concatenate(found)


def extracted(model: torch.nn.Module, canaries: Canaries) -> NDArray[np.bool_]:
    """Whether greedy decoding from its prefix returns each secret verbatim, (n,)."""
    return (extraction.greedy(model, canaries.prefixes, canaries.secrets.shape[1]) == canaries.secrets).all(axis=1)


def certify(model: torch.nn.Module, canaries: Canaries, budget: int) -> dict[str, NDArray]:
    """κ(1) of each canary under `model` at the canaries' own temperature: lower and upper end, closed or not."""
    found = []
    for prefix in canaries.prefixes:
        law = extraction.model_next_log_probs(model, prefix, canaries.temperature)
        found.append(priors.certify_baseline(law, canaries.secrets.shape[1], 1, budget))
    parts = {
        "lower": [one.lower * (1.0 - one.slack) for one in found],
        "upper": [min(1.0, one.upper * (1.0 + one.slack)) for one in found],
        "closed": [one.closed for one in found],
        "expanded": [one.expanded for one in found],
    }
    return {name: np.array(values) for name, values in parts.items()}


# --- calibration -----------------------------------------------------------------------------------------------------


def calibration_configurations(setting: dict, seed: int) -> list[dict]:
    """Two runs, one a side, for each ε of a setting of `CALIBRATION`."""
    common = {name: value for name, value in setting.items() if name not in ("epsilons", "max_grad_norm")}
    return [
        {**common, "epsilon": epsilon, "max_grad_norm": _clip(epsilon, setting), "side": side, "seed": seed}
        for epsilon in setting["epsilons"]
        for side in (0, 1)
    ]


def _clip(epsilon: float, setting: dict) -> float | None:
    """The clipping norm; none without noise (Appendix F's non-private configuration)."""
    return None if np.isinf(epsilon) else setting["max_grad_norm"]


def calibration_canaries(
    base: torch.nn.Module,
    data: corpora.Blocks,
    per_cell: int,
    copies: Sequence[int],
    lengths: tuple[int, int],
    seed: int,
) -> tuple[Canaries, NDArray[np.int64], NDArray[np.int64]]:
    """The canaries of all cells, their copies (n,), and the side (n,) whose model trains on each."""
    n = _checks.integer("per_cell", per_cell, 2) * len(copies)
    canaries = sample_canaries(
        base, data.heldout, n, prefix_length=lengths[0], secret_length=lengths[1], corpus=data.fine_tuning, seed=seed
    )
    rng = np.random.default_rng([seed, 1])
    return canaries, rng.permutation(np.repeat(copies, per_cell)), rng.integers(0, 2, n)


def calibration(
    model: str,
    epsilon: float,
    side: int,
    blocks: int,
    per_cell: int,
    copies: Sequence[int],
    prefix_length: int,
    secret_length: int,
    epochs: int,
    batch_size: int,
    physical_batch: int,
    learning_rate: float,
    max_grad_norm: float | None,
    seed: int,
) -> dict:
    """One model of the pair at one ε: scores of all canaries, planted here or on the other side.

    δ = 1/(10N), N the public number of records: the blocks and the expected copies.

    Returns:
        Arrays of shape (n,): `copies`, `planted`, `teacher_forcing`, `base` (the same score before training),
        `extracted`, `base_extracted`, `surprisal` (bits); and the run's `accounting`, `losses` and `seconds`.
    """
    _checks.integer("side", side, 0, 1)
    base, data = _data(model)
    lengths = (prefix_length, secret_length)
    canaries, times, sides = calibration_canaries(base, data, per_cell, copies, lengths, seed)
    before = {"base": teacher_forcing(base, canaries), "base_extracted": extracted(base, canaries)}
    planted = sides == side
    record = private_training.private_fine_tune(
        base,
        _chosen(data.fine_tuning, blocks, seed),
        planted=canaries.records[planted].tolist(),
        copies=times[planted].tolist(),
        epsilon=epsilon,
        size=blocks + int(times.sum()) // 2,
        epochs=epochs,
        batch_size=batch_size,
        physical_batch=physical_batch,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        seed=2 * seed + side,
        progress=False,
    )
    return {
        "copies": times,
        "planted": planted,
        "surprisal": canaries.surprisal,
        "teacher_forcing": teacher_forcing(base, canaries),
        "extracted": extracted(base, canaries),
        **before,
        **_outcome(record),
    }


def _outcome(record: private_training.PrivateRecord) -> dict:
    return {"accounting": asdict(record.accounting), "losses": record.losses, "seconds": record.seconds}


def calibration_baselines(
    model: str, per_cell: int, copies: Sequence[int], prefix_length: int, secret_length: int, budget: int, seed: int
) -> dict[str, NDArray]:
    """Certified κ(1) of the canaries of `calibration` with the same arguments: what extraction bounds start from."""
    base, data = _data(model)
    canaries, times, _ = calibration_canaries(base, data, per_cell, copies, (prefix_length, secret_length), seed)
    return {"copies": times, **certify(base, canaries, budget)}


def memorization(first: dict, second: dict) -> NDArray[np.float64]:
    """Each canary's score where it was planted less its score where it was not, (n,), from the two sides' results."""
    if not (first["planted"] ^ second["planted"]).all():
        raise ValueError("first and second must be the two sides of one pair, got sides that plant the same canary")
    gap = first["teacher_forcing"] - second["teacher_forcing"]
    return np.where(first["planted"], gap, -gap)


# --- the entropy floor -----------------------------------------------------------------------------------------------


def sweep_configurations(setting: dict, seed: int) -> tuple[list[dict], list[dict]]:
    """Configurations of `certified_sweep`, one a temperature, and of `sweep_arm`, one an arm."""
    canary = {name: setting[name] for name in ("model", "per_temperature", "prefix_length", "secret_length")}
    canary |= {"temperatures": setting["temperatures"], "seed": seed}
    training = {name: setting[name] for name in ("blocks", "epochs", "batch_size", "physical_batch", "learning_rate")}
    searches = [{**canary, "which": i, "budget": setting["budget"]} for i in range(len(setting["temperatures"]))]
    arms = {
        "private": {"epsilon": setting["epsilon"], "copies": 1},
        "leaky": {"epsilon": float("inf"), "copies": setting["leaky_copies"]},
    }
    clips = {arm: {"max_grad_norm": _clip(arms[arm]["epsilon"], setting)} for arm in ARMS}
    return searches, [{**canary, **training, **arms[arm], **clips[arm]} for arm in ARMS]


def sweep_canaries(
    base: torch.nn.Module, data: corpora.Blocks, temperatures: Sequence[float], count: int, lengths: tuple[int, int],
    seed: int,
) -> list[Canaries]:  # fmt: skip
    """`count` canaries at each temperature, no two with one held-out block."""
    index = TokenIndex(data.fine_tuning)
    return [
        sample_canaries(
            base,
            data.heldout[i :: len(temperatures)],
            count,
            prefix_length=lengths[0],
            secret_length=lengths[1],
            temperature=temperature,
            corpus=index,
            seed=seed + i,
        )
        for i, temperature in enumerate(temperatures)
    ]


def certified_sweep(
    model: str,
    temperatures: Sequence[float],
    which: int,
    per_temperature: int,
    prefix_length: int,
    secret_length: int,
    budget: int,
    seed: int,
) -> dict[str, NDArray]:
    """What can be said about one temperature's canaries without training: κ(1), surprisal, and the blind guess.

    Returns:
        Arrays (n,): `certify`'s, `surprisal` in bits at temperature 1 (Appendix F) and `own_surprisal` at the canary's
        own temperature, `guessed`, whether the base model's greedy decoding is the secret, and `novel`, how many of
        `draws` fresh draws at its prefix the corpus does not hold. The filter conditions the canary on that: its
        baseline is at most κ over the probability of a novel draw.
    """
    base, data = _data(model)
    lengths = (prefix_length, secret_length)
    canaries = sweep_canaries(base, data, temperatures, per_temperature, lengths, seed)[which]
    own = extraction.secret_log_prob(base, canaries.prefixes, canaries.secrets, canaries.temperature)
    return {
        **certify(base, canaries, budget),
        "surprisal": canaries.surprisal,
        "own_surprisal": -own / np.log(2.0),
        "guessed": extracted(base, canaries),
        "novel": _novel(base, canaries, TokenIndex(data.fine_tuning), [seed, 2, which]),
        "draws": NOVELTY_DRAWS,
    }


def _novel(base: torch.nn.Module, canaries: Canaries, corpus: TokenIndex, seed: list[int]) -> NDArray[np.int64]:
    """How many of `NOVELTY_DRAWS` continuations of each prefix the corpus does not hold, (n,)."""
    generator = torch.Generator().manual_seed(int(np.random.default_rng(seed).integers(2**62)))
    length, at = canaries.secrets.shape[1], canaries.temperature
    draws = extraction.sample(base, canaries.prefixes, length, at, NOVELTY_DRAWS, generator=generator)
    return np.array([sum(draw not in corpus for draw in of_one) for of_one in draws])


def sweep_arm(
    model: str,
    temperatures: Sequence[float],
    per_temperature: int,
    prefix_length: int,
    secret_length: int,
    blocks: int,
    epsilon: float,
    copies: int,
    epochs: int,
    batch_size: int,
    physical_batch: int,
    learning_rate: float,
    max_grad_norm: float | None,
    seed: int,
) -> dict:
    """A model trained on half of the canaries of all temperatures: what it returns, and a membership score.

    A coin for each canary says whether it is planted. δ = 1/(10N), N the blocks and the expected copies.

    Returns:
        Arrays (n,), temperature by temperature: `planted`, `extracted`; the scores `loss`, the secret's mean
        log-probability a token in nats, and `reference`, that less the base model's (both higher for members); and the
        run's `accounting`, `losses`, `seconds`.
    """
    base, data = _data(model)
    groups = sweep_canaries(base, data, temperatures, per_temperature, (prefix_length, secret_length), seed)
    prefixes = np.concatenate([group.prefixes for group in groups])
    secrets = np.concatenate([group.secrets for group in groups])
    planted = np.random.default_rng([seed, 1]).integers(0, 2, len(secrets)) == 1
    before = extraction.secret_log_prob(base, prefixes, secrets)
    record = private_training.private_fine_tune(
        base,
        _chosen(data.fine_tuning, blocks, seed),
        planted=np.concatenate([prefixes, secrets], axis=1)[planted].tolist(),
        copies=copies,
        epsilon=epsilon,
        size=blocks + copies * len(secrets) // 2,
        epochs=epochs,
        batch_size=batch_size,
        physical_batch=physical_batch,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        seed=seed,
        progress=False,
    )
    after = extraction.secret_log_prob(base, prefixes, secrets)
    return {
        "planted": planted,
        "extracted": (extraction.greedy(base, prefixes, secret_length) == secrets).all(axis=1),
        "loss": after / secret_length,
        "reference": (after - before) / secret_length,
        **_outcome(record),
    }
