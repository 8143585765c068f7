"""Extraction from a language model: greedy, sampled and m-best continuations, and (n, p)-discoverable extraction.

Prompts and secrets are sequences of token ids, taken exactly as they are: whatever a tokenizer puts in front belongs
in the prompt. Continuations have a fixed length; an end-of-sequence token is a token like any other. Prompts of
unequal length are decoded together, with cached keys and values, and each comes out as if it were alone. Every
function puts the model into evaluation mode and back into its own after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from . import _batches, _checks, priors
from ._discoverable import (
    discoverable_probability,
    discoverable_queries,
    extraction_strength,
    verbatim,
)

__all__ = [
    "TopM",
    "discoverable_probability",
    "discoverable_queries",
    "extraction_strength",
    "forced_predictions",
    "greedy",
    "model_next_log_probs",
    "sample",
    "secret_log_prob",
    "top_m",
    "verbatim",
]

# --- decoding --------------------------------------------------------------------------------------------------------


def _prompts(name: str, prompts: Sequence, model: torch.nn.Module, following: int = 0) -> list[NDArray]:
    """Checked prompts; an empty one becomes the model's beginning-of-sequence token, and is an error without one."""
    arrays = _batches.token_sequences(name, prompts, model, empty=True)
    bos, context = getattr(model.config, "bos_token_id", None), _batches.context_length(model)
    for i, ids in enumerate(arrays):
        if ids.size == 0:
            if bos is None:
                raise ValueError(f"{name}[{i}] has no tokens, and the model has no beginning-of-sequence token")
            arrays[i] = np.array([bos], dtype=np.int64)
        _batches.check_context(f"{name}[{i}] with the {following} tokens after it", arrays[i].size + following, context)
    return arrays


def _check_logits(logits: torch.Tensor) -> torch.Tensor:
    """The logits, or `FloatingPointError` if they hold a NaN or +inf (or nothing but −inf)."""
    if not torch.isfinite(logits.amax(-1)).all():
        raise _batches.broken("a prompt")
    return logits


def greedy(model: torch.nn.Module, prompts: Sequence, length: int, batch_size: int = 64) -> NDArray[np.int64]:
    """Continue every prompt by its most likely next token, `length` times.

    Args:
        model: A causal language model of transformers.
        prompts: Token-id sequences, of any lengths.
        length: Tokens to decode, at least 1.
        batch_size: Most prompts decoded together; the result does not depend on it.

    Returns:
        (prompts, length) token ids.

    Raises:
        ValueError: no prompts, ids outside the vocabulary, prompt and continuation beyond the context, a prompt of
            no tokens when the model has no beginning-of-sequence token.
        FloatingPointError: the model gives NaN.
    """
    length = _checks.integer("length", length, 1)
    batch_size = _checks.integer("batch_size", batch_size, 1)
    arrays = _prompts("prompts", prompts, model, length)
    decoded = np.empty((len(arrays), length), dtype=np.int64)
    with _batches.evaluation(model):
        for batch in _batches.length_sorted(np.array([ids.size for ids in arrays]), batch_size, 1):
            context = _batches.read(model, [arrays[i] for i in batch])
            tokens = [_check_logits(context.logits).argmax(-1)]
            while len(tokens) < length:
                tokens.append(_check_logits(context.extend(tokens[-1][:, None])).argmax(-1))
            decoded[batch] = torch.stack(tokens, dim=1).cpu().numpy()
    return decoded


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Checked logits over the temperature in float64, their maximum 0: shifted first, lest a small one overflow."""
    logits = _check_logits(logits)
    wide = logits.cpu().double() if logits.device.type == "mps" else logits.double()  # mps has no float64
    return (wide - wide.amax(-1, keepdim=True)) / temperature


def _draw(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens (b,) by inverting each row's distribution function at `uniform` (b,), in float64."""
    cumulative = _scaled(logits, temperature).exp_().cumsum(-1)
    total = cumulative[:, -1]
    point = torch.minimum(uniform.to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first token whose cumulated mass exceeds the point: never one of probability zero.
    return torch.searchsorted(cumulative, point[:, None], right=True).squeeze(-1)


def sample(
    model: torch.nn.Module,
    prompts: Sequence,
    length: int,
    temperature: float = 1.0,
    n: int = 1,
    generator: torch.Generator | None = None,
    batch_size: int = 64,
) -> NDArray[np.int64]:
    """Draw n continuations of every prompt from the model at a temperature (the whole vocabulary, no truncation).

    The randomness is drawn before decoding, one uniform number a token, so that the result is the same for any batch
    size.

    Args:
        model: A causal language model of transformers.
        prompts: Token-id sequences, of any lengths.
        length: Tokens to draw, at least 1.
        temperature: Divides the logits, above 0.
        n: Continuations a prompt.
        generator: Source of randomness (required: a draw must be repeatable).
        batch_size: Most continuations decoded together; a prompt is read once for as many of its draws as fit.

    Returns:
        (prompts, n, length) token ids.

    Raises:
        ValueError: as `greedy`; also a temperature that is not positive, no generator.
        FloatingPointError: the model gives NaN.
    """
    length, n = _checks.integer("length", length, 1), _checks.integer("n", n, 1)
    batch_size = _checks.integer("batch_size", batch_size, 1)
    temperature = _checks.finite("temperature", temperature, 0.0, low_open=True)
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {generator!r}")
    arrays = _prompts("prompts", prompts, model, length)
    shape = (len(arrays), n, length)
    uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    drawn = np.empty(shape, dtype=np.int64)
    together = min(n, batch_size)
    with _batches.evaluation(model):
        for batch in _batches.length_sorted(np.array([ids.size for ids in arrays]), max(1, batch_size // n), 1):
            prompt = _batches.read(model, [arrays[i] for i in batch])
            for start in range(0, n, together):
                points = uniform[batch, start : start + together].flatten(0, 1)
                context = prompt.repeat(len(points) // len(batch))
                tokens = [_draw(context.logits, temperature, points[:, 0])]
                for step in range(1, length):
                    tokens.append(_draw(context.extend(tokens[-1][:, None]), temperature, points[:, step]))
                block = torch.stack(tokens, dim=1).unflatten(0, (len(batch), -1))
                drawn[batch, start : start + together] = block.cpu().numpy()
    return drawn


# --- probabilities of given continuations ----------------------------------------------------------------------------


def _teacher_forced(
    model: torch.nn.Module, prompts: Sequence, secrets: Sequence, function: Callable, batch_size: int
) -> list[list[NDArray]]:
    """Apply `function` to the logits that predict each secret's tokens: one list of arrays (a secret's tokens) each."""
    batch_size = _checks.integer("batch_size", batch_size, 1)
    ends = _batches.token_sequences("secrets", secrets, model)
    starts = _prompts("prompts", prompts, model)
    _batches.same_number("prompts", starts, "secrets", ends)
    context = _batches.context_length(model)
    for i, (prompt, secret) in enumerate(zip(starts, ends, strict=True)):
        _batches.check_context(f"prompts[{i}] with its secret", prompt.size + secret.size, context)
    whole = [np.concatenate(pair) for pair in zip(starts, ends, strict=True)]
    with _batches.evaluation(model):
        flat = _batches.map_suffixes(
            model, whole, np.array([prompt.size for prompt in starts]), function, batch_size, "prompts"
        )
    cuts = np.cumsum([secret.size for secret in ends])[:-1]
    return [np.split(values.numpy(), cuts) for values in flat]


def secret_log_prob(
    model: torch.nn.Module, prompts: Sequence, secrets: Sequence, temperature: float = 1.0, batch_size: int = 64
) -> NDArray[np.float64]:
    """Log-probability of every secret given its prompt, in nats, at a sampling temperature.

    Args:
        model: A causal language model of transformers.
        prompts: Token-id sequences, one a secret.
        secrets: Token-id sequences, none empty.
        temperature: Divides the logits at every token, above 0: the measure the secret is drawn from.
        batch_size: Most pairs a forward pass.

    Returns:
        (n,) sums over the secret's tokens; −inf if one of them is impossible.

    Raises:
        ValueError: as `greedy`; also an empty secret, prompt and secret beyond the context.
        FloatingPointError: the model gives NaN.
    """
    temperature = _checks.finite("temperature", temperature, 0.0, low_open=True)

    def at_temperature(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
        # Shifted first: a small temperature would overflow the largest logit.
        return _batches.log_probs(rows.sub_(rows.amax(-1, keepdim=True)).div_(temperature), targets)

    (log_probs,) = _teacher_forced(model, prompts, secrets, at_temperature, batch_size)
    return np.array([values.sum(dtype=np.float64) for values in log_probs])


def forced_predictions(
    model: torch.nn.Module, prompts: Sequence, secrets: Sequence, batch_size: int = 64
) -> list[NDArray[np.int64]]:
    """The model's most likely token at every position of each secret, given the prompt and the secret so far.

    This is what `extraction_strength` compares: greedy decoding from the prompt and the secret's first k tokens
    completes it if and only if the predictions from k on are all right.

    Returns:
        One array for each secret, as long as it.
    """

    def most_likely(rows: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = rows.amax(-1)
        return torch.where(torch.isfinite(largest), largest, torch.nan), rows.argmax(-1)

    _, predictions = _teacher_forced(model, prompts, secrets, most_likely, batch_size)
    return predictions


def model_next_log_probs(
    model: torch.nn.Module, prefix: Sequence[int], temperature: float = 1.0, batch_size: int = 64
) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    """The model after a fixed prefix, as the batched next-token law that `priors.certify_baseline` searches.

    The prefix is read once; each call continues copies of its keys and values. Memory: at most `batch_size` copies of
    them at a time, and the answer (8 bytes for each continuation and token of the vocabulary). The temperature is
    applied here, so leave `certify_baseline`'s own at 1.

    Args:
        model: A causal language model of transformers.
        prefix: Token ids; empty means the model's beginning-of-sequence token.
        temperature: Divides the logits, above 0: part of the measure certified.
        batch_size: Most continuations a forward pass.

    Returns:
        A function from continuations (b, t) of the prefix, t ≥ 0, to natural-log probabilities (b, v) of the next
        token, float64.

    Raises:
        ValueError: a bad prefix or temperature; later, continuations beyond the context.
        FloatingPointError: the model gives NaN (from the returned function too).
    """
    temperature = _checks.finite("temperature", temperature, 0.0, low_open=True)
    batch_size = _checks.integer("batch_size", batch_size, 1)
    (ids,), context = _prompts("prefix", [prefix], model), _batches.context_length(model)
    with _batches.evaluation(model):
        read = _batches.read(model, [ids])
        _check_logits(read.logits)

    def normalized(logits: torch.Tensor) -> NDArray[np.float64]:
        return torch.log_softmax(_scaled(logits, temperature), dim=-1).cpu().numpy()

    def next_log_probs(prefixes: NDArray[np.int64]) -> NDArray[np.float64]:
        tokens = np.asarray(prefixes, dtype=np.int64)
        if tokens.ndim != 2:
            raise ValueError(f"prefixes must have shape (batch, t), got {tokens.shape}")
        if tokens.shape[1] == 0:
            return np.repeat(normalized(read.logits), len(tokens), axis=0)
        _batches.check_context("the continued prefix", ids.size + tokens.shape[1], context)
        rows = []
        with _batches.evaluation(model):
            for start in range(0, len(tokens), batch_size):
                block = torch.from_numpy(tokens[start : start + batch_size])
                rows.append(normalized(read.repeat(len(block)).extend(block)))
        return np.concatenate(rows)

    return next_log_probs


@dataclass(frozen=True)
class TopM:
    """The most probable continuations that a search found.

    Attributes:
        sequences: (at most m, length) token ids, most probable first.
        log_probs: Their log-probabilities in nats.
        method: "best-first" if the search closed, so that these are the m most probable; else "beam".
        exact: Whether the search closed.
        certificate: What `priors.certify_baseline` returned: an interval for the mass of the true m best.
    """

    sequences: NDArray[np.int64]
    log_probs: NDArray[np.float64]
    method: str
    exact: bool
    certificate: priors.BaselineCertificate


def top_m(
    model: torch.nn.Module,
    prompt: Sequence[int],
    length: int,
    m: int,
    budget: int = 2_000,
    temperature: float = 1.0,
    beam: int = 64,
    batch_size: int = 64,
) -> TopM:
    """The m most probable continuations of a prompt: exact where best-first search closes, else by beam search.

    Args:
        model: A causal language model of transformers.
        prompt: Token ids.
        length: Tokens in a continuation, at least 1.
        m: Continuations wanted, at least 1.
        budget: Most prefixes that the best-first search may expand.
        temperature: Divides the logits, above 0. (The order of long continuations depends on it.)
        beam: Width of the beam search that follows an unclosed search; at least m is used.
        batch_size: Most continuations a forward pass.

    Returns:
        A `TopM`; where the beam search ran, its best continuations and the best-first search's together.
    """
    beam = max(_checks.integer("beam", beam, 1), _checks.integer("m", m, 1))
    length = _checks.integer("length", length, 1)
    _prompts("prompt", [prompt], model, length)
    law = model_next_log_probs(model, prompt, temperature, batch_size)
    certificate = priors.certify_baseline(law, length, m, budget, batch_size=batch_size)
    found = dict(certificate.top)
    if not certificate.closed:
        found |= _beam_search(law, length, beam)
    best = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:m]
    return TopM(
        sequences=np.array([tokens for tokens, _ in best], dtype=np.int64).reshape(-1, length),
        log_probs=np.array([log_prob for _, log_prob in best]),
        method="best-first" if certificate.closed else "beam",
        exact=certificate.closed,
        certificate=certificate,
    )


def _beam_search(
    law: Callable[[NDArray[np.int64]], NDArray[np.float64]], length: int, width: int
) -> dict[tuple[int, ...], float]:
    """Continuations of `length` tokens and their log-probabilities, keeping the `width` best at every step."""
    prefixes, log_probs = np.zeros((1, 0), dtype=np.int64), np.zeros(1)
    for _ in range(length):
        rows = law(prefixes) + log_probs[:, None]
        best = np.argsort(-rows, axis=None, kind="stable")[:width]
        parent, token = np.unravel_index(best, rows.shape)
        prefixes, log_probs = np.column_stack([prefixes[parent], token]), rows[parent, token]
    return {tuple(map(int, ids)): float(log_prob) for ids, log_prob in zip(prefixes, log_probs, strict=True)}
