"""One training loop, for pretraining the pocket bases and for fine-tuning on planted documents.

The defaults are Appendix F's: AdamW at 5e-5, batches of 8 blocks of 48 tokens, 3 epochs. The schedule, warm-up,
weight decay and precision are not stated there; here the rate is constant, weight decay is PyTorch's default and
the model keeps the dtype it comes in. A run is a function of its arguments: on the same machine, with the same number
of threads, the same seed gives the same weights bit for bit on a CPU, interrupted or not. (GPU kernels may add in
any order; `torch.use_deterministic_algorithms(True)` asks for the ones that do not.)

Measured on two cores with a pocket model (4 layers of 128, 2,048 tokens, batches of 8): 45 ms a step on one thread,
33 ms on two, of which 28 ms are matrix products at 85% of the peak of one core. A second thread therefore helps
one run a little, while two runs of one thread each finish almost twice as much (`lira.train_shadows` does that).
The number of threads is the caller's: `threads`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from tqdm import tqdm

from . import _batches, _checks
from ._snapshots import Snapshots, all_finite, digest

SCHEDULES = ("constant", "cosine")
IGNORED = -100  # the label that cross-entropy skips


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch on `count` CPU threads, then on as many as before: sums are split by thread, so another number gives other
    last bits. Raises ValueError if `count` is no positive integer."""
    count, before = _checks.integer("count", count, 1), torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class TrainingRecord:
    """What a run did: `losses` (mean NLL in nats of each step's batch), `steps`, `seconds`, `tokens` predicted.

    `seconds` adds up over interruptions, and `resumed_at` is the step this call started from (0 for a fresh run).
    """

    losses: NDArray[np.float64]
    steps: int
    seconds: float
    tokens: int
    resumed_at: int = 0


@dataclass(frozen=True)
class Hyperparameters:
    """The optimizer's side of a run, checked; `fine_tune` says what each means."""

    epochs: int = 3
    max_steps: int | None = None
    batch_size: int = 8
    learning_rate: float = 5e-5
    schedule: str = "constant"
    warmup: int = 0
    final_rate: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` naming what is out of range."""
        _checks.choice("schedule", self.schedule, SCHEDULES)
        _checks.integer("epochs", self.epochs, 1)
        _checks.integer("batch_size", self.batch_size, 1)
        _checks.integer("warmup", self.warmup)
        _checks.finite("learning_rate", self.learning_rate, 0.0, low_open=True)
        _checks.real("final_rate", self.final_rate, 0.0, self.learning_rate)
        _checks.finite("weight_decay", self.weight_decay, 0.0)
        if self.max_steps is not None:
            _checks.integer("max_steps", self.max_steps, 1)
        if self.max_grad_norm is not None:
            _checks.finite("max_grad_norm", self.max_grad_norm, 0.0, low_open=True)
        if np.shape(self.betas) != (2,):
            raise ValueError(f"betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            _checks.real("betas", beta, 0.0, 1.0, high_open=True)

    def steps(self, documents: int) -> int:
        """Updates of a run on this many documents an epoch (copies counted)."""
        return self.max_steps or self.epochs * -(-documents // self.batch_size)

    def rate(self, step: int, steps: int) -> float:
        """The rate of update `step` (from 0): linear warm-up, then constant, or half a cosine to `final_rate`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        share = 0.5 * (1.0 + math.cos(math.pi * (step - self.warmup) / (steps - self.warmup)))
        return self.final_rate + (self.learning_rate - self.final_rate) * share


@dataclass(frozen=True)
class Documents:
    """Token sequences padded on the right to one matrix, each with the number of times it is trained on per epoch."""

    tokens: Tensor  # (n, longest) int64
    lengths: Tensor  # (n,)
    copies: Tensor  # (n,)

    @property
    def total(self) -> int:
        """Documents an epoch, copies counted."""
        return int(self.copies.sum())

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and next-token labels (both `len(rows)` x longest of them), `IGNORED` where nothing is predicted.

        No attention mask goes along: padding is on the right, where causal attention never looks back from a token.
        """
        lengths = self.lengths[rows]
        inputs = self.tokens[rows, : int(lengths.max())]
        labels = F.pad(inputs[:, 1:], (0, 1), value=IGNORED)
        if int(lengths.min()) < inputs.shape[1]:
            labels = labels.masked_fill(torch.arange(1, inputs.shape[1] + 1) >= lengths[:, None], IGNORED)
        return inputs, labels


def documents(
    blocks: ArrayLike | None, planted: Sequence[Sequence[int]] | None, copies: int | Sequence[int], vocabulary: int
) -> Documents:
    """Corpus blocks (n, length), once each, followed by the planted documents at their `copies`.

    Raises:
        ValueError: if a token lies outside the vocabulary, a document has fewer than two tokens (nothing to
            predict), `copies` does not fit `planted`, or there is nothing to train on.
    """
    blocks = np.zeros((0, 2), np.int64) if blocks is None else np.asarray(blocks)
    if blocks.ndim != 2 or (blocks.size and not np.issubdtype(blocks.dtype, np.integer)):
        raise ValueError(
            f"blocks must be whole numbers of shape (n, length), got shape {blocks.shape}, dtype {blocks.dtype}"
        )
    sequences = [np.asarray(document).reshape(-1) for document in planted or ()]
    times = np.asarray(copies) if np.size(copies) else np.zeros(0, np.int64)  # an empty list would be floats
    times = np.broadcast_to(times, len(sequences)) if times.ndim == 0 else times
    if times.shape != (len(sequences),) or not np.issubdtype(times.dtype, np.integer) or (times < 0).any():
        raise ValueError(f"copies must be one count, or one per planted document ({len(sequences)}), got {copies!r}")
    lengths = np.array([blocks.shape[1]] * len(blocks) + [len(sequence) for sequence in sequences], np.int64)
    if not len(lengths) or not len(blocks) + times.sum():
        raise ValueError("there must be something to train on, got no blocks and no planted documents")
    if lengths.min() < 2:
        raise ValueError(f"every document must have at least 2 tokens, got one of {lengths.min()}")
    matrix = np.zeros((len(lengths), lengths.max()), np.int64)
    matrix[: len(blocks), : blocks.shape[1]] = blocks
    for row, sequence in enumerate(sequences, start=len(blocks)):
        if not np.issubdtype(sequence.dtype, np.integer):
            raise ValueError(f"planted documents must be sequences of token ids, got {sequence[:5]!r} ...")
        matrix[row, : len(sequence)] = sequence
    if matrix.min() < 0 or matrix.max() >= vocabulary:
        raise ValueError(f"tokens must lie in [0, {vocabulary - 1}], got values from {matrix.min()} to {matrix.max()}")
    counts = np.concatenate([np.ones(len(blocks), np.int64), times.astype(np.int64)])
    return Documents(torch.from_numpy(matrix), torch.from_numpy(lengths), torch.from_numpy(counts))


def batch_rows(copies: Tensor, batch_size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """The rows of each of `steps` batches: every epoch is a fresh shuffle of all copies, its last batch may be short.

    The order depends on the arguments alone, on no device and no global state.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.repeat_interleave(copies)
    left = steps
    while left > 0:
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        epoch = shuffled.split(batch_size)[:left]
        left -= len(epoch)
        yield from epoch


def mean_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats over the labels that count, in float32 whatever the model's dtype."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def fine_tune(
    model: nn.Module,
    blocks: ArrayLike | None,
    *,
    planted: Sequence[Sequence[int]] | None = None,
    copies: int | Sequence[int] = 1,
    epochs: int = 3,
    max_steps: int | None = None,
    batch_size: int = 8,
    learning_rate: float = 5e-5,
    schedule: str = "constant",
    warmup: int = 0,
    final_rate: float = 0.0,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    max_grad_norm: float | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 60.0,
    checkpoint_steps: int | None = None,
    progress: bool = True,
    description: str = "training",
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingRecord:
    """Train `model` in place with AdamW on next-token prediction, every real token after a document's first once.

    Args:
        model: a transformers causal language model, trained in its own dtype; its mode is restored at the end.
        blocks: corpus blocks, token ids of shape (n, length); None or empty to train on planted documents alone.
        planted: extra documents, token sequences of 2 tokens up to the model's context.
        copies: how often each planted document occurs per epoch: one count, or one per document.
        epochs: passes over blocks and copies, each in a fresh order.
        max_steps: stop after this many updates instead of after `epochs`, beginning new passes where needed.
        batch_size: documents an update; the last batch of an epoch may be smaller.
        learning_rate: AdamW's rate after warm-up.
        schedule: "constant", or "cosine" (half a cosine, towards `final_rate` at the last step).
        warmup: updates over which the rate rises linearly.
        final_rate: where the cosine ends.
        weight_decay: AdamW's decoupled decay.
        betas: AdamW's decay of the first and second moment.
        max_grad_norm: clip the gradient to this norm; None for no clipping.
        seed: fixes the order of the documents and any dropout; the caller's random state is left alone.
        device: where to train (the model is moved there); None for where the model is.
        checkpoint: folder for an atomic snapshot of weights, optimizer, random state and step (safetensors, no
            pickle). A call with the same arguments and the same initial model resumes from it exactly.
        checkpoint_seconds: seconds between snapshots; longer where writing them would take over 5% of the time.
        checkpoint_steps: also write one every so many updates.
        progress: show a bar with an estimate of the time left, if standard error is a terminal.
        description: the bar's label.
        on_step: called as `on_step(updates made, loss)` after every update.

    Returns:
        A `TrainingRecord`.

    Raises:
        ValueError: on arguments out of range, documents beyond the context or the vocabulary, weights that are not
            finite to begin with, or a checkpoint of another run.
        FloatingPointError: as soon as a loss is not finite, before it reaches the weights; snapshots stay usable.
    """
    settings = Hyperparameters(
        epochs=epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        schedule=schedule,
        warmup=warmup,
        final_rate=final_rate,
        weight_decay=weight_decay,
        betas=betas,
        max_grad_norm=max_grad_norm,
    )
    _checks.integer("seed", seed)
    data = documents(blocks, planted, copies, model.config.vocab_size)
    check_context(model, data)
    steps = settings.steps(data.total)
    if device is not None:
        model.to(device)
    device = next(model.parameters()).device
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_finite_weights(parameters)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=learning_rate, betas=tuple(betas), weight_decay=weight_decay, fused=True
    )

    losses = np.zeros(steps)
    snapshots, start, earlier_seconds = None, 0, 0.0
    if checkpoint is not None:
        run = {
            **{name: value for name, value in asdict(settings).items() if name not in ("epochs", "max_steps")},
            "betas": list(betas),
            "steps": steps,
            "seed": seed,
            "documents": digest([data.tokens, data.lengths, data.copies]),
            "initial model": digest(parameters.values()),
        }
        snapshots = Snapshots(Path(checkpoint), run, checkpoint_seconds, checkpoint_steps)

    modes = [(module, module.training) for module in model.modules()]
    tokens, began = 0, time.perf_counter()
    cuda = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        tqdm(total=steps, desc=description, unit="step", disable=None if progress else True) as bar,
    ):
        torch.manual_seed(seed)
        if snapshots is not None:
            start, earlier_seconds = snapshots.restore(parameters, optimizer, losses)
            bar.update(start)
            bar.unpause()
        model.train()
        try:
            for step, rows in enumerate(batch_rows(data.copies, batch_size, steps, seed)):
                tokens += int((data.lengths[rows] - 1).sum())
                if step < start:
                    continue
                rate = settings.rate(step, steps)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                inputs, labels = data.batch(rows)
                loss = mean_nll(model(input_ids=inputs.to(device), use_cache=False).logits, labels.to(device))
                losses[step] = value = loss.item()
                if not math.isfinite(value):
                    raise FloatingPointError(diverged(f"the loss is {value}", step, steps, rate))
                loss.backward()
                if max_grad_norm is not None:
                    norm = nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm).item()
                    if not math.isfinite(norm):
                        raise FloatingPointError(diverged(f"the gradient's norm is {norm}", step, steps, rate))
                optimizer.step()
                optimizer.zero_grad()
                bar.set_postfix_str(f"loss {value:.3f}", refresh=False)
                bar.update()
                if snapshots is not None:
                    seconds = earlier_seconds + time.perf_counter() - began
                    snapshots.after_step(step + 1, steps, parameters, optimizer, losses, seconds)
                if on_step is not None:
                    on_step(step + 1, value)
            if not all_finite(parameters.values()):  # the last update is seen by no later loss
                raise FloatingPointError(diverged("the weights are not finite after it", steps - 1, steps, rate))
        finally:
            optimizer.zero_grad()
            for module, mode in modes:
                module.training = mode
    seconds = earlier_seconds + time.perf_counter() - began
    return TrainingRecord(losses, steps, seconds, tokens, start)


def perplexity(model: nn.Module, blocks: ArrayLike, batch_size: int = 64) -> float:
    """exp of the mean NLL per predicted token of token blocks (n, length), in evaluation mode (restored after)."""
    data = documents(blocks, None, 1, model.config.vocab_size)
    check_context(model, data)
    _checks.integer("batch_size", batch_size, 1)
    device, total = next(model.parameters()).device, 0.0
    with _batches.evaluation(model), torch.inference_mode():
        for rows in torch.arange(len(data.tokens)).split(batch_size):
            inputs, labels = data.batch(rows)
            logits = model(input_ids=inputs.to(device), use_cache=False).logits
            total += float(mean_nll(logits, labels.to(device))) * len(rows)
    mean = total / len(data.tokens)
    return math.exp(mean) if mean < 709.0 else math.inf


def check_context(model: nn.Module, data: Documents) -> None:
    """Raise `ValueError` if a document is longer than the model's context."""
    context = getattr(model.config, "max_position_embeddings", None)
    longest = data.tokens.shape[1]
    if context is not None and longest > context:
        raise ValueError(f"documents must have at most {context} tokens, the model's context, got {longest}")


def check_finite_weights(parameters: dict[str, Tensor]) -> None:
    """Raise `ValueError` naming a parameter that holds NaN or infinity."""
    for name, parameter in parameters.items():
        if not all_finite([parameter]):
            raise ValueError(f"model must have finite weights, but {name} holds NaN or infinity: is its file damaged?")


def diverged(what: str, step: int, steps: int, rate: float) -> str:
    """The message of a `FloatingPointError`."""
    return (
        f"training diverged at step {step + 1} of {steps} (learning rate {rate:g}): {what}. The model now holds the "
        f"weights of that moment: discard it, and train again from the start with a lower learning_rate, a warmup "
        f"or max_grad_norm"
    )
