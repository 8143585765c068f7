"""Membership scores of a language model: loss, perplexity, zlib, reference, min-k% and min-k%++.

Every score is higher for what looks more like training data, and every one is a function of the per-token
log-probabilities (nats) that one forward pass gives; all but the reference score lie in the local score class of
Definition 3.4. The score functions are numpy over arrays and know no model; `token_statistics` and
`membership_scores` run one.

Rows of log-probabilities may be ragged: a list of one-dimensional arrays, or a two-dimensional array in which NaN
(or a false entry of `mask`) marks what is not scored, as `token_log_probs` returns it. One row in, one number out.
A token that the model holds impossible has log-probability −inf, which a score passes on and never turns into NaN.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from . import _batches, _checks

# Log-probabilities in float32 are not resolved below this, relative to the mean log-probability
RESOLUTION = 16 * float(np.finfo(np.float32).eps)


# --- the scores, as functions of log-probabilities -------------------------------------------------------------------


def _padded(name: str, rows: ArrayLike, mask: ArrayLike | None = None) -> tuple[NDArray[np.float64], bool]:
    """Return rows (n, t) in float64, NaN where nothing is scored, and whether a single row was given."""
    if isinstance(rows, torch.Tensor):
        rows = rows.detach().float().cpu().numpy()
    if isinstance(mask, torch.Tensor):
        mask = mask.cpu().numpy()
    if isinstance(rows, np.ndarray) or not any(np.ndim(row) for row in rows):
        array = np.array(rows, dtype=np.float64)
        single = array.ndim == 1
        array = np.atleast_2d(array)
    else:
        single = False
        parts = [np.asarray(row.detach().float().cpu() if isinstance(row, torch.Tensor) else row) for row in rows]
        if any(part.ndim != 1 for part in parts):
            raise ValueError(f"{name} must be rows of numbers, got shapes {[part.shape for part in parts]}")
        array = np.full((len(parts), max(part.size for part in parts)), np.nan)
        for i, part in enumerate(parts):
            array[i, : part.size] = part
    if array.ndim != 2:
        raise ValueError(f"{name} must have one or two dimensions, got shape {array.shape}")
    if mask is not None:
        keep = np.atleast_2d(np.asarray(mask)).astype(bool)
        if keep.shape != array.shape:
            raise ValueError(f"mask must have the shape {array.shape} of {name}, got {keep.shape}")
        array[~keep] = np.nan
    return array, single


def _log_prob_rows(name: str, rows: ArrayLike, mask: ArrayLike | None = None) -> tuple[NDArray[np.float64], bool]:
    """Like `_padded`, checked: every row scores at least one token and no log-probability is positive."""
    array, single = _padded(name, rows, mask)
    scored = ~np.isnan(array)
    if array.size == 0 or not scored.any(axis=1).all():
        empty = int(np.argmin(scored.any(axis=1))) if array.size else 0
        raise ValueError(f"{name} must score at least one token a row, got none in row {empty}")
    if (array > 1e-3).any():  # rounding aside
        raise ValueError(f"{name} must be log-probabilities, at most 0, got {float(np.nanmax(array))!r}")
    return array, single


def _mean(array: NDArray[np.float64]) -> NDArray[np.float64]:
    scored = ~np.isnan(array)
    return np.where(scored, array, 0.0).sum(axis=1) / scored.sum(axis=1)


def _shaped(scores: NDArray[np.float64], single: bool) -> float | NDArray[np.float64]:
    return float(scores[0]) if single else scores


def loss_score(log_probs: ArrayLike, mask: ArrayLike | None = None) -> float | NDArray[np.float64]:
    """Mean log-probability a token: minus the mean negative log-likelihood, in nats.

    Args:
        log_probs: (n, t), ragged, or one row; see the module's text.
        mask: Optional, true where a token is scored.

    Returns:
        (n,) scores, or a float for one row.

    Raises:
        ValueError: a row without a scored token, or a positive log-probability (also from the scores below).
    """
    array, single = _log_prob_rows("log_probs", log_probs, mask)
    return _shaped(_mean(array), single)


def perplexity_score(log_probs: ArrayLike, mask: ArrayLike | None = None) -> float | NDArray[np.float64]:
    """Minus the perplexity, −exp(mean negative log-likelihood); −inf where that overflows (beyond 709 nats a token).

    The order is the loss score's; the scale is the one that perplexity thresholds are quoted on.
    """
    array, single = _log_prob_rows("log_probs", log_probs, mask)
    with np.errstate(over="ignore"):
        return _shaped(-np.exp(-_mean(array)), single)


def zlib_score(
    log_probs: ArrayLike, texts: str | bytes | Sequence[str | bytes], mask: ArrayLike | None = None
) -> float | NDArray[np.float64]:
    """Minus the mean negative log-likelihood per zlib-compressed byte of the text (nats a byte; Carlini et al. 2021).

    Args:
        log_probs: (n, t), ragged, or one row.
        texts: The n scored strings (UTF-8) or byte strings, or one of them for one row.
        mask: Optional, true where a token is scored.
    """
    array, single = _log_prob_rows("log_probs", log_probs, mask)
    strings = [texts] if isinstance(texts, (str, bytes)) else list(texts)
    if len(strings) != len(array):
        raise ValueError(f"texts must have one entry for each of {len(array)} rows of log_probs, got {len(strings)}")
    # surrogates that cannot be encoded (a stray half of a pair) still count as bytes
    raw = [text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass") for text in strings]
    return _shaped(_mean(array) / np.array([len(zlib.compress(text)) for text in raw]), single)


def reference_score(
    log_probs: ArrayLike, reference_log_probs: ArrayLike, mask: ArrayLike | None = None
) -> float | NDArray[np.float64]:
    """Mean log-probability a token minus the reference model's, in nats.

    0 where both models hold the text impossible (no evidence either way); +inf or −inf where one of them does.

    Args:
        log_probs: (n, t), ragged, or one row.
        reference_log_probs: The same tokens under the reference model.
        mask: Optional, true where a token is scored; applies to both.
    """
    array, single = _log_prob_rows("log_probs", log_probs, mask)
    other, _ = _log_prob_rows("reference_log_probs", reference_log_probs, mask)
    if not np.array_equal((~np.isnan(array)).sum(axis=1), (~np.isnan(other)).sum(axis=1)):
        raise ValueError(
            "reference_log_probs must score as many tokens a row as log_probs, got "
            f"{(~np.isnan(other)).sum(axis=1).tolist()} against {(~np.isnan(array)).sum(axis=1).tolist()}"
        )
    mean, reference = _mean(array), _mean(other)
    impossible = np.isneginf(mean) & np.isneginf(reference)
    return _shaped(np.where(impossible, 0.0, mean - np.where(impossible, 0.0, reference)), single)


def _lowest(values: NDArray[np.float64], k: float) -> NDArray[np.float64]:
    """Mean of the max(1, ⌊k·n⌋) lowest of the n entries that are not NaN, row by row."""
    _checks.real("k", k, 0.0, 1.0, low_open=True)
    share = Fraction(str(k))  # the decimal that was written: 0.29 of 100 is 29, while 0.29 * 100 floors to 28
    counts = (~np.isnan(values)).sum(axis=1)
    take = np.array([max(1, math.floor(share * int(n))) for n in counts])
    chosen = np.arange(values.shape[1]) < take[:, None]
    return np.where(chosen, np.sort(values, axis=1), 0.0).sum(axis=1) / take  # NaN sorts last


def min_k_score(log_probs: ArrayLike, k: float = 0.2, mask: ArrayLike | None = None) -> float | NDArray[np.float64]:
    """Min-k%: mean log-probability of the max(1, ⌊k·n⌋) least likely tokens, in nats (Shi et al. 2024).

    Args:
        log_probs: (n, t), ragged, or one row.
        k: Share of the tokens in (0, 1], read as the decimal it was written as.
        mask: Optional, true where a token is scored.
    """
    array, single = _log_prob_rows("log_probs", log_probs, mask)
    return _shaped(_lowest(array, k), single)


def min_k_plus_plus_score(
    log_probs: ArrayLike, mean: ArrayLike, variance: ArrayLike, k: float = 0.2, mask: ArrayLike | None = None
) -> float | NDArray[np.float64]:
    """Min-k%++: as min-k%, on log-probabilities standardized by the model's own next-token law (Zhang et al. 2025).

    Each token's (log p − mean) / √variance. The deviation is floored at what float32 resolves, and a log-probability
    that is equal to the mean within it counts as 0: so a uniform row, whose variance is zero, gives 0.

    Args:
        log_probs: (n, t), ragged, or one row.
        mean: Same shape: E[log p(X)] for X drawn from the model's next-token law at that position.
        variance: Same shape: Var[log p(X)].
        k: Share of the tokens in (0, 1], read as the decimal it was written as.
        mask: Optional, true where a token is scored.
    """
    array, single = _log_prob_rows("log_probs", log_probs, mask)
    scored = ~np.isnan(array)
    moments = {"mean": _padded("mean", mean, mask)[0], "variance": _padded("variance", variance, mask)[0]}
    for name, values in moments.items():
        if values.shape != array.shape:
            raise ValueError(f"{name} must have the shape {array.shape} of log_probs, got {values.shape}")
        bad = scored & ~np.isfinite(values)
        if name == "variance":
            bad |= scored & (values < 0)
        if bad.any():
            raise ValueError(f"{name} must be finite (variance: at least 0), got {float(values[bad][0])!r}")
    center, spread = moments["mean"], np.sqrt(moments["variance"])
    resolution = RESOLUTION * np.maximum(1.0, np.abs(center))
    deviation = array - center
    deviation[(spread <= resolution) & (np.abs(deviation) <= resolution)] = 0.0
    return _shaped(_lowest(deviation / np.maximum(spread, resolution), k), single)


# --- log-probabilities and their moments, from logits ----------------------------------------------------------------


def logit_statistics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log p of the realized token, and the mean and variance of log p under the model's next-token law.

    Args:
        logits: (..., v) of any floating type; −inf means an impossible token, and contributes nothing to the moments.
        targets: (...) token ids.

    Returns:
        Three float32 tensors of shape (...), in nats (variance: nats²), NaN where the logits are no numbers.
    """
    rows = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
    return tuple(out.reshape(targets.shape) for out in _batches.statistics(rows, targets.reshape(-1)))  # type: ignore[return-value]


def _forward(model, input_ids, attention_mask, function) -> list[torch.Tensor]:
    """Apply `function` as `_batches.map_suffixes` does, laid out as (b, t − 1) on the model's device, else NaN."""
    ids = torch.as_tensor(input_ids)
    mask = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else torch.as_tensor(attention_mask).bool()
    if ids.ndim != 2 or mask.shape != ids.shape or min(ids.shape) == 0:
        raise ValueError(
            "input_ids and attention_mask must share one shape (b, t), neither 0, "
            f"got {tuple(ids.shape)} and {tuple(mask.shape)}"
        )
    ids, real = ids.cpu().numpy(), mask.cpu().numpy()
    # Taking the real tokens out of their padding makes the result the same for padding on either side.
    sequences = _batches.token_sequences("input_ids", [row[keep] for row, keep in zip(ids, real, strict=True)], model)
    predicted = real & (np.cumsum(real, axis=1) > 1)  # the first real token has nothing before it
    with _batches.evaluation(model):
        if not predicted.any():
            raise ValueError("input_ids must hold a row of at least two tokens: the first of a row has no probability")
        flat = _batches.map_suffixes(
            model, sequences, np.ones(len(sequences), dtype=np.int64), function, len(sequences), "input_ids"
        )
    device = _batches.device_of(model)
    where = torch.from_numpy(predicted[:, 1:])
    outputs = []
    for values in flat:
        out = torch.full(where.shape, torch.nan, dtype=torch.float32)
        out[where] = values
        outputs.append(out.to(device))
    return outputs


def token_log_probs(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probability of each realized token given the tokens before it, float32, nats.

    The result does not depend on the side of the padding, on its width, or on the other rows. The model is put into
    evaluation mode, and back into its own after.

    Args:
        model: A causal language model of transformers.
        input_ids: (b, t) token ids; padding may hold anything.
        attention_mask: (b, t), true (or 1) at real tokens; None if all are.

    Returns:
        (b, t − 1) on the model's device: entry [i, j] belongs to token input_ids[i, j + 1]. NaN at padding and at
        the first real token of a row, which has no predecessor: mark a beginning-of-sequence token as real to have
        the first word scored.

    Raises:
        ValueError: shapes that do not match, an empty row, ids outside the vocabulary, a row beyond the context.
        FloatingPointError: the model gives NaN.
    """
    return _forward(model, input_ids, attention_mask, _batches.log_probs)[0]


def token_statistics(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_log_probs` with the mean and variance of log p under the model's next-token law, in one forward pass.

    Returns:
        (log_p, mean, variance), each (b, t − 1) and laid out as `token_log_probs`; what min-k%++ needs.
    """
    return tuple(_forward(model, input_ids, attention_mask, _batches.statistics))  # type: ignore[return-value]


# --- all scores of a list of texts -----------------------------------------------------------------------------------


def _own_bos(tokenizer) -> int | None:
    """The beginning-of-sequence id, if the tokenizer itself puts one in front of what it encodes."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else None


def _encode(name: str, texts: Sequence, tokenizer, model: torch.nn.Module, empty: bool = False) -> list[NDArray]:
    """Token ids of strings (no special tokens added), or the ids themselves, checked against the model."""
    if isinstance(texts, (str, bytes)):
        raise ValueError(f"{name} must be a list of strings or of token-id sequences, got one string {texts!r}")
    strings = [isinstance(text, str) for text in texts]
    if any(strings) and not all(strings):
        raise ValueError(f"{name} must be all strings or all token-id sequences, got a mixture")
    ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if strings and strings[0] else texts
    return _batches.token_sequences(name, ids, model, empty)


def membership_scores(
    model: torch.nn.Module,
    tokenizer,
    texts: Sequence,
    reference: torch.nn.Module | None = None,
    *,
    prefixes: Sequence | None = None,
    k: float = 0.2,
    batch_size: int = 32,
) -> dict[str, NDArray[np.float64]]:
    """Every membership score of every text, from one forward pass a batch and model.

    A beginning-of-sequence token is put in front exactly where the tokenizer itself does so, never twice; it is not
    scored. Without one, the first token of a text has no probability and is not scored either.

    The paper does not say which string is scored, so both readings are here: a whole document (c, z) is a text
    without a prefix; the secret z given its prefix c is the text z with prefix c, of which z alone is scored and
    compressed.

    Args:
        model: A causal language model of transformers; its device and dtype are kept, its mode restored.
        tokenizer: The model's tokenizer.
        texts: Strings, or sequences of token ids.
        reference: Optional second model with the same tokenizer, for the reference score.
        prefixes: Optional strings or token-id sequences, one a text: read before it and not scored.
        k: Share of the tokens for min-k% and min-k%++.
        batch_size: Most texts a forward pass; texts of similar length go together. The scores do not depend on it.

    Returns:
        "loss", "perplexity", "zlib", "min_k", "min_k_plus_plus" and, given `reference`, "reference": (n,) float64
        arrays in the order of `texts`, each higher for what looks more like a member.

    Raises:
        ValueError: no texts; an empty text, or one without a scored token; an empty prefix and no
            beginning-of-sequence token; more tokens than the context; ids outside a model's vocabulary.
        FloatingPointError: a model gives NaN, as a broken checkpoint does.
    """
    _checks.integer("batch_size", batch_size, 1)
    suffixes = _encode("texts", texts, tokenizer, model)
    bos = _own_bos(tokenizer)
    if prefixes is None:
        contexts = [np.zeros(0, dtype=np.int64)] * len(suffixes)
    else:
        contexts = _encode("prefixes", prefixes, tokenizer, model, empty=True)
        _batches.same_number("texts", suffixes, "prefixes", contexts)
    sequences, starts = [], []
    for i, (context, suffix) in enumerate(zip(contexts, suffixes, strict=True)):
        if prefixes is not None and context.size == 0 and bos is None:
            raise ValueError(f"prefixes[{i}] is empty, and the tokenizer puts no beginning-of-sequence token in front")
        whole = np.concatenate([context, suffix])
        if bos is not None and whole[0] != bos:
            whole = np.concatenate([[bos], whole])
        start = max(1, whole.size - suffix.size)
        if start == whole.size:
            raise ValueError(f"texts[{i}] is one token with nothing before it, so no token can be scored")
        sequences.append(whole)
        starts.append(start)
    for each, name in ((model, "texts"), (reference, "texts (under the reference model)")):
        if each is not None:
            _batches.token_sequences(name, sequences, each)

    first = np.array(starts)
    scored = np.arange(max(map(len, suffixes))) < np.array([len(s) for s in sequences])[:, None] - first[:, None]

    def run(which: torch.nn.Module, function) -> list[NDArray[np.float64]]:
        outputs = []
        with _batches.evaluation(which):
            flat = _batches.map_suffixes(which, sequences, first, function, batch_size, "texts")
        for values in flat:
            outputs.append(np.full(scored.shape, np.nan))
            outputs[-1][scored] = values.numpy()
        return outputs

    log_probs, mean, variance = run(model, _batches.statistics)
    strings = list(texts)
    if not isinstance(strings[0], str):
        strings = [tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in suffixes]
    scores = {
        "loss": loss_score(log_probs),
        "perplexity": perplexity_score(log_probs),
        "zlib": zlib_score(log_probs, strings),
        "min_k": min_k_score(log_probs, k),
        "min_k_plus_plus": min_k_plus_plus_score(log_probs, mean, variance, k),
    }
    if reference is not None:
        (other,) = run(reference, _batches.log_probs)
        scores["reference"] = reference_score(log_probs, other)
    return scores
