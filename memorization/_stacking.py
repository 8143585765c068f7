"""Several runs of `training.fine_tune` as one program over stacked parameters, with `torch.func`.

Every model sees the batches, learning rates and updates of its own separate run, so the results agree with those
within float tolerance. Meant for GPUs, where a small model's kernels are too short to fill the chip.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from tqdm import tqdm

from . import training
from ._snapshots import all_finite


def obstacle(model: nn.Module) -> str:
    """Why several such models cannot run as one program that equals separate runs; empty if they can."""
    rates = [getattr(model.config, name, 0.0) for name in ("attention_dropout", "hidden_dropout", "resid_pdrop")]
    if any(rates) or any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return "it has dropout, which separate runs draw differently"
    if any(p.dtype != torch.float32 or not p.requires_grad for p in model.parameters()):
        return "its parameters are not all trainable and float32"
    return ""


def train_stack(
    make: Callable[[int], nn.Module],
    seeds: Sequence[int],
    data: Sequence[training.Documents],
    settings: training.Hyperparameters,
    device: str | torch.device,
    names: Sequence[str],
    progress: bool = True,
) -> Iterator[tuple[nn.Module, NDArray[np.float64]]]:
    """Train one model per seed at the same time.

    Args:
        make: `make(seed)` gives the initial model (of one architecture, see `obstacle`); it is only read.
        seeds: Seeds of the runs.
        data: What each run trains on.
        settings: Shared by all runs.
        device: Where to train.
        names: What to call each run in an error.
        progress: Show a bar over steps, if standard error is a terminal.

    Yields:
        (model, losses) of each run in turn. The model is one and the same object, loaded with that run's weights
        until the next is asked for.

    Raises:
        FloatingPointError: A loss is not finite.
    """
    template = copy.deepcopy(make(seeds[0])).to(device).train()
    attention = template.config._attn_implementation
    template.set_attn_implementation("eager")  # plain matrix products, each of which can be batched over models
    shapes = {name: p.shape for name, p in template.named_parameters()}
    weights = torch.stack([_flat(make(seed)).to(device) for seed in seeds])

    def loss(vector: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(template, _named(vector, shapes), (inputs,), {"use_cache": False}).logits
        return training.mean_nll(logits, labels)

    gradients = vmap(grad_and_value(loss))
    steps = [settings.steps(documents.total) for documents in data]
    order = [
        training.batch_rows(documents.copies, settings.batch_size, n, seed)
        for documents, n, seed in zip(data, steps, seeds, strict=True)
    ]
    losses = [np.zeros(n) for n in steps]
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in tqdm(range(max(steps)), desc="stacked models", unit="step", disable=None if progress else True):
        running = [i for i, n in enumerate(steps) if step < n]
        batches = {i: data[i].batch(next(order[i])) for i in running}
        inputs, labels = _stack([batches.get(i, batches[running[0]]) for i in range(len(seeds))])
        gradient, values = gradients(weights, inputs.to(device), labels.to(device))
        rates = torch.zeros(len(seeds), 1)  # a finished model has rate 0: nothing moves it any more
        rates[running, 0] = torch.tensor([settings.rate(step, steps[i]) for i in running])
        values = values.tolist()
        for i in running:
            losses[i][step] = values[i]
            if not math.isfinite(values[i]):
                message = training.diverged(f"the loss is {values[i]}", step, steps[i], rates[i].item())
                raise FloatingPointError(f"{names[i]}: {message}")
        _adamw(weights, gradient, first, second, step, rates.to(device), settings)
    del first, second, gradient
    template.set_attn_implementation(attention)
    for i, n in enumerate(steps):
        if not all_finite([weights[i]]):
            message = training.diverged("the weights are not finite after it", n - 1, n, settings.rate(n - 1, n))
            raise FloatingPointError(f"{names[i]}: {message}")
        with torch.no_grad():
            for name, values in _named(weights[i], shapes).items():
                template.get_parameter(name).copy_(values)
        yield template, losses[i]


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _named(vector: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Cut one model's parameter vector into its named tensors."""
    parts = vector.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _stack(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Inputs and labels (models, rows, width) of batches of unequal shapes; nothing is predicted in the padding."""
    rows = max(len(inputs) for inputs, _ in batches)
    width = max(inputs.shape[1] for inputs, _ in batches)

    def padded(tensor: Tensor, filler: int) -> Tensor:
        return F.pad(tensor, (0, width - tensor.shape[1], 0, rows - len(tensor)), value=filler)

    return (
        torch.stack([padded(inputs, 0) for inputs, _ in batches]),
        torch.stack([padded(labels, training.IGNORED) for _, labels in batches]),
    )


def _adamw(
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    rates: Tensor,
    settings: training.Hyperparameters,
) -> None:
    """Update every row in place as `torch.optim.AdamW` does, at its own rate (0 leaves it as it is)."""
    beta1, beta2 = settings.betas
    if settings.max_grad_norm is not None:
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient = gradient * (settings.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(1e-8)
    weights.mul_(1 - rates * settings.weight_decay)
    weights.addcdiv_(first * (rates / (1 - beta1 ** (step + 1))), scale, value=-1.0)
