"""One causal language model over many token sequences: checks, evaluation mode, length-sorted batches.

The private floor under `scores` and `extraction`. Whatever it returns for one sequence is independent of its
neighbors, of the batch size and of any padding: sequences are padded on the right, where causal attention cannot
see the padding, or on the left under a mask with matching positions. (A float16 or bfloat16 model rounds its own
arithmetic differently in batches of different shape, by about 1e-2 nats a token; what is computed from its logits is
float32.)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

MAX_LOGITS = 2**27  # entries of the largest logit block (512 MiB in float32); one long sequence alone may exceed it
CHUNK = {"cpu": 2**19}  # entries of a float32 working block: what a core's cache holds on a CPU ...
LARGE_CHUNK = 2**26  # ... and 256 MiB on an accelerator
# exp(-1e4) is 0 in float32: a logit of −inf is read as this far below the largest one, so that 0 · (−inf) never arises
FLUSH = -1e4


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; every submodule's own mode is restored after, whatever happens."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model's inputs belong."""
    return next(model.parameters()).device


def _text_config(model: torch.nn.Module):
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def vocabulary_size(model: torch.nn.Module) -> int:
    """Number of token ids that the model knows."""
    return int(_text_config(model).vocab_size)


def context_length(model: torch.nn.Module) -> int | None:
    """Longest sequence that the model was built for, or None if it states none."""
    return getattr(_text_config(model), "max_position_embeddings", None)


def token_sequences(name: str, sequences: Sequence, model: torch.nn.Module, empty: bool = False) -> list[NDArray]:
    """Check token ids against the model and return them as a list of one-dimensional int64 arrays.

    Raises `ValueError` naming the sequence: no sequences, an empty one (unless `empty`), an id that is not a whole
    number or not in the model's vocabulary, more tokens than the model's context.
    """
    if isinstance(sequences, (str, bytes)):
        raise ValueError(f"{name} must be a sequence of token-id sequences, got {sequences!r}")
    arrays = []
    vocabulary, context = vocabulary_size(model), context_length(model)
    for i, sequence in enumerate(sequences):
        ids = np.asarray(sequence.cpu() if isinstance(sequence, torch.Tensor) else sequence)
        if ids.size == 0 and ids.ndim == 1:
            if not empty:
                raise ValueError(f"{name}[{i}] is empty; it must have at least one token")
            ids = ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{name}[{i}] must be a flat sequence of whole token ids, got {sequence!r}")
        outside = (ids < 0) | (ids >= vocabulary)
        if outside.any():
            raise ValueError(
                f"{name}[{i}] holds token id {int(ids[outside][0])}, but the model's ids lie in [0, {vocabulary - 1}]: "
                "do tokenizer and model belong together?"
            )
        check_context(f"{name}[{i}]", ids.size, context)
        arrays.append(ids.astype(np.int64))
    if not arrays:
        raise ValueError(f"{name} must hold at least one sequence, got none")
    return arrays


def check_context(name: str, tokens: int, context: int | None) -> None:
    """Raise `ValueError` if `tokens` tokens do not fit into the context (None: unlimited)."""
    if context is not None and tokens > context:
        raise ValueError(f"{name} takes {tokens} tokens, more than the model's context of {context}")


def same_number(first: str, firsts: Sequence, second: str, seconds: Sequence) -> None:
    """Raise `ValueError` unless two lists that are read in pairs have the same length."""
    if len(firsts) != len(seconds):
        raise ValueError(f"{second} must have one entry for each of {first} ({len(firsts)}), got {len(seconds)}")


def broken(what: str) -> FloatingPointError:
    """The error for logits that are no numbers."""
    return FloatingPointError(f"the model gives NaN or infinite logits on {what}: is the checkpoint broken?")


def length_sorted(lengths: NDArray, batch_size: int, vocabulary: int) -> Iterator[NDArray]:
    """Yield index arrays of at most `batch_size` sequences of similar length, longest first.

    Batches shrink where batch × length × vocabulary would exceed `MAX_LOGITS`.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    start = 0
    while start < len(order):
        widest = max(1, int(lengths[order[start]]))
        size = max(1, min(batch_size, MAX_LOGITS // (widest * vocabulary)))
        yield order[start : start + size]
        start += size


def _accepts(model: torch.nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def statistics(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Log p of `targets`, and mean and variance of log p, from float32 logits (r, v) that are overwritten.

    Shifted by the largest logit, so that nothing overflows and a uniform row has variance exactly 0.
    """
    shifted = rows.sub_(rows.amax(-1, keepdim=True))
    chosen = shifted.gather(-1, targets[:, None]).squeeze(-1)
    weights = shifted.clamp_(min=FLUSH).exp()
    total = weights.sum(-1)
    mean = (weights * shifted).sum(-1) / total
    variance = shifted.sub_(mean[:, None]).square_().mul_(weights).sum(-1) / total
    log_total = total.log()
    return chosen - log_total, mean - log_total, variance


def log_probs(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
    """Log p of `targets` alone, from float32 logits (r, v) that are overwritten."""
    shifted = rows.sub_(rows.amax(-1, keepdim=True))
    chosen = shifted.gather(-1, targets[:, None]).squeeze(-1)
    return (chosen - shifted.exp_().sum(-1).log_(),)


def map_suffixes(
    model: torch.nn.Module,
    sequences: list[NDArray],
    starts: NDArray,
    function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    batch_size: int,
    name: str,
) -> list[torch.Tensor]:
    """Apply `function` to the logits that predict tokens starts[i], starts[i] + 1, … of every sequence.

    One forward pass a batch; logits before the earliest start are not even computed where the model allows it.

    Args:
        model: A causal language model, already in evaluation mode.
        sequences: Checked token ids.
        starts: (n,) index of the first predicted token of each sequence, at least 1.
        function: Maps (rows, targets), a private float32 block of logits (r, v) that it may overwrite and the
            realized tokens (r,), to tensors of shape (r,). The first is NaN where the logits are no numbers.
        batch_size: Most sequences a batch.
        name: What the sequences are called, for the error message.

    Returns:
        The outputs of `function`, each flat over all predicted tokens, sequence by sequence, on the CPU.

    Raises:
        FloatingPointError: the model gave NaN logits (or infinite ones).
    """
    device = device_of(model)
    lengths = np.array([len(sequence) for sequence in sequences])
    counts = lengths - starts
    offsets = np.concatenate([[0], np.cumsum(counts)])
    collected: list[tuple[torch.Tensor, ...]] = []
    places: list[NDArray] = []
    for batch in length_sorted(lengths, batch_size, vocabulary_size(model)):
        if not counts[batch].any():
            continue
        # The model reads last tokens too, which predict nothing here: half-precision kernels round by shape, so that
        # one unpadded sequence then gives bit for bit what a plain call of the model does.
        width, first = int(lengths[batch[0]]), int(starts[batch].min()) - 1
        padded = np.zeros((len(batch), width), dtype=np.int64)
        for row, i in enumerate(batch):
            padded[row, : lengths[i]] = sequences[i]
        options = {"use_cache": False, "logits_to_keep": width - first}
        options = {name: value for name, value in options.items() if _accepts(model, name)}
        logits = model(torch.from_numpy(padded).to(device), **options).logits
        logits = logits[:, -(width - first) :].flatten(0, 1)

        rows = np.repeat(np.arange(len(batch)), counts[batch])
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts[batch]) - counts[batch], counts[batch])
        columns = starts[batch][rows] + within
        index = torch.from_numpy(rows * (width - first) + columns - 1 - first).to(device)
        targets = torch.from_numpy(padded[rows, columns]).to(device)
        step = max(1, CHUNK.get(device.type, LARGE_CHUNK) // logits.shape[-1])
        outputs = [
            function(logits[index[s : s + step]].float(), targets[s : s + step]) for s in range(0, len(rows), step)
        ]
        collected.append(tuple(torch.cat(parts) for parts in zip(*outputs, strict=True)))
        if torch.isnan(collected[-1][0]).any():
            culprit = batch[rows[int(torch.isnan(collected[-1][0]).nonzero()[0, 0])]]
            raise broken(f"{name}[{culprit}]")
        places.append(offsets[batch][rows] + within)
    order = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
    return [torch.cat(parts).cpu()[order] for parts in zip(*collected, strict=True)]


def _cache_keyword(model: torch.nn.Module) -> str | None:
    """What the model's forward calls its cache of keys and values (transformers 5 renamed it), or None without one."""
    return next((name for name in ("cache", "past_key_values") if _accepts(model, name)), None)


class Context:
    """A batch of token prefixes that a model has read, with their keys and values, ready to be continued.

    Prefixes of unequal length are padded on the left, under a mask and with positions counted from their first
    token. Made by `read`.

    Attributes:
        logits: (b, v) logits of the next token after each prefix.
    """

    def __init__(self, model: torch.nn.Module, prefixes: list[NDArray]) -> None:
        """Read `prefixes` (checked token ids, none empty); call in evaluation mode."""
        self.model, self.device = model, device_of(model)
        self.keyword, self.cache = _cache_keyword(model), None
        self.keep = {"logits_to_keep": 1} if _accepts(model, "logits_to_keep") else {}
        width = max(len(prefix) for prefix in prefixes)
        tokens = np.zeros((len(prefixes), width), dtype=np.int64)
        real = np.zeros_like(tokens)
        for row, prefix in enumerate(prefixes):
            tokens[row, width - len(prefix) :] = prefix
            real[row, width - len(prefix) :] = 1
        # Equal lengths need no mask: the fast path of attention.
        self.mask = None if real.all() else torch.from_numpy(real[:, :0]).to(self.device)
        self._read(torch.from_numpy(tokens).to(self.device), torch.from_numpy(real).to(self.device))

    def _read(self, tokens: torch.Tensor, real: torch.Tensor) -> None:
        """Read `tokens` (b, d) after what was read before; `real` is 0 at padding."""
        arguments = {self.keyword: self.cache, "use_cache": True, **self.keep}
        if self.mask is not None:
            self.mask = torch.cat([self.mask, real], dim=1)
            positions = (self.mask.cumsum(1) - 1).clamp_(min=0)
            arguments |= {"attention_mask": self.mask, "position_ids": positions[:, -tokens.shape[1] :]}
        output = self.model(tokens, **arguments)
        self.cache, self.logits = getattr(output, self.keyword), output.logits[:, -1]

    def repeat(self, times: int) -> Context:
        """A new context that holds each prefix `times` times in a row; this one stays as it is."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        if times > 1:
            twin.cache.batch_repeat_interleave(times)
        twin.mask = None if self.mask is None else self.mask.repeat_interleave(times, dim=0)
        twin.logits = self.logits.repeat_interleave(times, dim=0)
        return twin

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Continue every prefix by `tokens` (b, d) and return the logits (b, v) of the token after."""
        self._read(tokens.to(self.device), torch.ones_like(tokens, device=self.device))
        return self.logits


class RereadContext:
    """`Context` for a model whose forward takes no cache: it reads the whole prefix again at every step.

    Slower, with the same results; such a model (a wrapper, say) need accept nothing but token ids.
    """

    def __init__(self, model: torch.nn.Module, prefixes: list[NDArray]) -> None:
        """Read `prefixes` (checked token ids, none empty); call in evaluation mode."""
        self.model, self.prefixes = model, prefixes
        self._read()

    def _read(self) -> None:
        last = torch.tensor([len(prefix) - 1 for prefix in self.prefixes])
        padded = np.zeros((len(self.prefixes), int(last.max()) + 1), dtype=np.int64)
        for row, prefix in enumerate(self.prefixes):
            padded[row, : len(prefix)] = prefix
        logits = self.model(torch.from_numpy(padded).to(device_of(self.model))).logits
        self.logits = logits[torch.arange(len(last)), last.to(logits.device)]

    def repeat(self, times: int) -> RereadContext:
        """A new context that holds each prefix `times` times in a row; this one stays as it is."""
        twin = copy.copy(self)
        twin.prefixes = [prefix for prefix in self.prefixes for _ in range(times)]
        twin.logits = self.logits.repeat_interleave(times, dim=0)
        return twin

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Continue every prefix by `tokens` (b, d) and return the logits (b, v) of the token after."""
        following = tokens.cpu().numpy()
        self.prefixes = [np.concatenate(pair) for pair in zip(self.prefixes, following, strict=True)]
        self._read()
        return self.logits


def read(model: torch.nn.Module, prefixes: list[NDArray]) -> Context | RereadContext:
    """Have the model read prefixes (checked token ids, none empty); call in evaluation mode."""
    return (Context if _cache_keyword(model) else RereadContext)(model, prefixes)
