"""DP-Adam fine-tuning through Opacus, record by record: clipped, noised, accounted for (see `accounting`).

One record is one document: a corpus block, or one copy of a planted document. Every step draws a Poisson sample of
the records, clips each record's gradient, adds Gaussian noise and hands the result to Adam, so a run is
(ε, δ)-differentially private under add/remove of one record (Abadi et al. 2016). Per-sample gradients come from
Opacus's hooks; layers that it has no rule for (Qwen2's RMSNorm) go through `torch.func`, and tied embeddings are
summed. `per_sample_gradients` shows them, for comparison with one record at a time.

The noise is reproducible from its seed. That suits an experiment and would be a leak in a deployment, where noise must
come from a secret source.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from tqdm import tqdm

from . import _checks, training
from .accounting import Accounting, calibrate

# --- per-sample gradients --------------------------------------------------------------------------------------------


def record_losses(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each record (b,): the mean NLL in nats over its own predicted tokens, in float32."""
    logits = model(input_ids=inputs, use_cache=False).logits.float()
    nll = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=training.IGNORED, reduction="none")
    return nll.sum(1) / (labels != training.IGNORED).sum(1)


class _Hooked:
    """A model with Opacus's per-sample hooks on it, all traces of which go when the block is left."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.modes = model, [(module, module.training) for module in model.modules()]

    def __enter__(self) -> GradSampleModule:
        self.model.train()
        try:
            # The loss is summed over records, so that each record's gradient is that of its own loss.
            self.hooked = GradSampleModule(self.model, batch_first=True, loss_reduction="sum", strict=True)
        except NotImplementedError as error:
            self._restore()
            raise ValueError(f"model must have layers that Opacus can clip record by record: {error}") from None
        return self.hooked

    def __exit__(self, *_: object) -> None:
        self.hooked.to_standard_module()
        for parameter in self.model.parameters():
            parameter.grad = None
            for name in ("grad_sample", "summed_grad", "_current_grad_sample", "_forward_counter"):
                parameter.__dict__.pop(name, None)
        for module in self.model.modules():
            for name in ("activations", "max_batch_len"):
                module.__dict__.pop(name, None)
        self._restore()

    def _restore(self) -> None:
        for module, mode in self.modes:
            module.training = mode


def _backward(hooked: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The records' losses, after a backward pass of their sum."""
    losses = record_losses(hooked, inputs, labels)
    with warnings.catch_warnings():
        # Token ids have no gradient, which the embedding's hook does not need.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        losses.sum().backward()
    return losses.detach()


def per_sample_gradients(model: nn.Module, records: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Each record's gradient by Opacus's hooks: for every trained parameter, a tensor (records, *its shape).

    These are what `private_fine_tune` clips. A layer that Opacus gets wrong would show here, against a loop over
    single records.
    """
    data = training.documents(None, records, 1, model.config.vocab_size)
    training.check_context(model, data)
    device = next(model.parameters()).device
    with _Hooked(model) as hooked:
        inputs, labels = data.batch(torch.arange(len(data.tokens)))
        _backward(hooked, inputs.to(device), labels.to(device))
        return {name: p.grad_sample.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# --- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivateRecord:
    """What a private run did.

    Attributes:
        accounting: its privacy.
        losses: (steps,) mean NLL in nats of each step's records before its update, NaN for an empty batch. Not
            private: an experiment's instrument, not part of the release.
        batch_sizes: (steps,) records drawn at each step.
        seconds: wall time.
    """

    accounting: Accounting
    losses: NDArray[np.float64]
    batch_sizes: NDArray[np.int64]
    seconds: float


def private_fine_tune(
    model: nn.Module,
    blocks: ArrayLike | None,
    *,
    planted: Sequence[Sequence[int]] | None = None,
    copies: int | Sequence[int] = 1,
    epsilon: float,
    delta: float | None = None,
    size: int | None = None,
    epochs: int = 3,
    batch_size: int = 64,
    physical_batch: int = 8,
    learning_rate: float = 5e-5,
    betas: tuple[float, float] = (0.9, 0.999),
    max_grad_norm: float | None = 1.0,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = True,
    description: str = "private training",
) -> PrivateRecord:
    """Train `model` in place by DP-Adam; every copy of a planted document is a record of its own.

    Args:
        model: a transformers causal language model without layers that mix records; its mode is restored at the end.
        blocks: corpus blocks, token ids of shape (n, length); None or empty to train on planted documents alone.
        planted: extra documents, token sequences of 2 tokens up to the model's context.
        copies: records of each planted document: one count, or one per document.
        epsilon: target ε in nats under add/remove of one record; `inf` for the same loop without noise.
        delta: δ; None for 1/(10 · size), Appendix F's.
        size: the public number of records, from which sample rate, steps and δ follow. Neighboring datasets differ in
            their size, so it must not be counted from the data where add/remove privacy is claimed; None takes the
            number given here.
        epochs: steps are epochs · size / batch_size, rounded up: so often a record is drawn, on average.
        batch_size: expected records a step (Appendix F prints the physical batch alone).
        physical_batch: most records a forward pass; the update does not depend on it, memory does (a gradient each).
        learning_rate: Adam's, constant.
        betas: Adam's decay of the first and second moment.
        max_grad_norm: the L2 norm that each record's gradient is clipped to. None for no clipping, which needs ε = ∞
            (Appendix F's non-private configuration).
        seed: fixes batches, noise and any dropout on one device; the caller's random state is left alone.
        device: where to train (the model is moved there); None for where the model is.
        progress: show a bar with an estimate of the time left, if standard error is a terminal.
        description: the bar's label.

    Raises:
        ValueError: on arguments out of range, documents beyond the context or the vocabulary, a finite ε without
            clipping or one out of the accountant's reach, layers that Opacus cannot clip, or weights not finite.
        FloatingPointError: as soon as a loss is not finite, before it reaches the weights.
    """
    settings = training.Hyperparameters(
        epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, betas=betas, max_grad_norm=max_grad_norm
    )
    _checks.integer("physical_batch", physical_batch, 1)
    _checks.integer("seed", seed)
    data = training.documents(blocks, planted, copies, model.config.vocab_size)
    training.check_context(model, data)
    size = data.total if size is None else _checks.integer("size", size, 1)
    if batch_size > size:
        raise ValueError(f"batch_size must be at most the number of records, {size}, got {batch_size}")
    if max_grad_norm is None and not math.isinf(epsilon):
        raise ValueError(
            f"max_grad_norm must be a number unless epsilon is infinite, got None with epsilon {epsilon:g}"
        )
    accounting = calibrate(
        epsilon, 1.0 / (10.0 * size) if delta is None else delta, batch_size / size, settings.steps(size)
    )
    if device is not None:
        model.to(device)
    device = next(model.parameters()).device
    training.check_finite_weights({name: p for name, p in model.named_parameters() if p.requires_grad})

    draws, noise = (torch.Generator(where) for where in ("cpu", device))
    draws.manual_seed(seed)
    noise.manual_seed(seed + 2**32)  # a stream of its own
    losses, sizes = np.full(accounting.steps, np.nan), np.zeros(accounting.steps, np.int64)
    began, cuda = time.perf_counter(), [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        tqdm(total=accounting.steps, desc=description, unit="step", disable=None if progress else True) as bar,
    ):
        torch.manual_seed(seed)
        trainer = (_Plain if max_grad_norm is None else _Clipping)(model, settings, accounting, noise)
        with trainer:
            for step, rows in enumerate(poisson_rows(data, accounting.sample_rate, accounting.steps, draws)):
                total, sizes[step] = 0.0, len(rows)
                for chunk in rows.split(physical_batch) if len(rows) else ():
                    inputs, labels = data.batch(chunk)
                    total += float(trainer.accumulate(inputs.to(device), labels.to(device)).sum())
                if not math.isfinite(total):
                    raise FloatingPointError(
                        training.diverged(f"the loss is {total}", step, accounting.steps, learning_rate)
                    )
                losses[step] = total / len(rows) if len(rows) else np.nan
                trainer.step()
                bar.update()
    return PrivateRecord(accounting, losses, sizes, time.perf_counter() - began)


def poisson_rows(data: training.Documents, rate: float, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The documents of each step's batch: every copy joins with probability `rate`, independently of all else.

    Shortest first, so that physical batches hold documents of like length.
    """
    records = torch.repeat_interleave(data.copies)
    records = records[torch.argsort(data.lengths[records], stable=True)]
    for _ in range(steps):
        yield records[torch.rand(len(records), generator=generator, dtype=torch.float64) < rate]


class _Plain:
    """Adam on the sum of the records' losses over the expected batch: neither clipping nor noise."""

    def __init__(
        self, model: nn.Module, settings: training.Hyperparameters, accounting: Accounting, noise: torch.Generator
    ) -> None:
        self.model, self.expected = model, settings.batch_size
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.adam = torch.optim.Adam(self.parameters, lr=settings.learning_rate, betas=tuple(settings.betas))
        self.modes = [(module, module.training) for module in model.modules()]

    def __enter__(self) -> None:
        self.model.train()

    def __exit__(self, *_: object) -> None:
        self.adam.zero_grad()
        for module, mode in self.modes:
            module.training = mode

    def accumulate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        losses = record_losses(self.model, inputs, labels)
        (losses.sum() / self.expected).backward()
        return losses.detach()

    def step(self) -> None:
        for parameter in self.parameters:  # after an empty batch, too, Adam moves on
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.adam.step()
        self.adam.zero_grad()


class _Clipping:
    """Opacus's optimizer around Adam: clip each record, sum, add noise, divide by the expected batch."""

    def __init__(
        self, model: nn.Module, settings: training.Hyperparameters, accounting: Accounting, noise: torch.Generator
    ) -> None:
        self.hooks = _Hooked(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = DPOptimizer(
            torch.optim.Adam(self.parameters, lr=settings.learning_rate, betas=tuple(settings.betas)),
            noise_multiplier=accounting.noise_multiplier,
            max_grad_norm=settings.max_grad_norm,
            expected_batch_size=settings.batch_size,
            generator=noise,
        )

    def __enter__(self) -> None:
        self.hooked = self.hooks.__enter__()

    def __exit__(self, *details: object) -> None:
        self.hooks.__exit__(*details)

    def accumulate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        losses = _backward(self.hooked, inputs, labels)
        self.optimizer.signal_skip_step(do_skip=True)
        self.optimizer.step()  # clips and sums, no more
        self.optimizer.zero_grad()
        return losses

    def step(self) -> None:
        for parameter in self.parameters:  # no further record: what is summed up so far gets its noise
            parameter.grad_sample = torch.zeros((0, *parameter.shape), dtype=parameter.dtype, device=parameter.device)
        self.optimizer.step()
        self.optimizer.zero_grad()
