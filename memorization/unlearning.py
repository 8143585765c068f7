"""Approximate unlearning: gradient difference and negative preference optimization, until a verifier is satisfied.

Both push the likelihood of the forget documents down and hold that of a retain set: gradient difference by plain
ascent, which nothing bounds, NPO (Zhang, Lin, Bai and Mei 2024) by ascent that fades once a document is less likely
than under a frozen reference. What either achieves is what the verifier asks about, and nothing else (Corollary 6.3).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from tqdm import tqdm

from . import _batches, _checks, training
from ._snapshots import all_finite

METHODS = ("grad-diff", "npo")

Verifier = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Unlearning:
    """What a run of `unlearn` did. Entry r of the first three arrays is after round r, entry 0 before the first.

    Attributes:
        verifier: (rounds + 1,) the verifier's values.
        perplexity: (rounds + 1,) perplexity of the probe blocks.
        forget_nll: (rounds + 1,) mean NLL of a forget document, summed over its tokens (nats).
        forget_loss: (rounds,) the method's forget term, averaged over the round's updates: the mean NLL a token for
            gradient difference (which raises it), the NPO loss for NPO (which lowers it).
        retain_loss: (rounds,) mean NLL a token of the retain batches (nats), NaN where the retain weight is 0.
        passed_at: the first round after which the verifier was below its threshold, or None if none was.
        seconds: of the whole run, verification included.
    """

    verifier: NDArray[np.float64]
    perplexity: NDArray[np.float64]
    forget_nll: NDArray[np.float64]
    forget_loss: NDArray[np.float64]
    retain_loss: NDArray[np.float64]
    passed_at: int | None
    seconds: float

    @property
    def rounds(self) -> int:
        """Rounds made."""
        return len(self.forget_loss)


# ---------------------------------------------------------------------------------------------------------- losses


def _tensor(value: ArrayLike | Tensor) -> Tensor:
    """A tensor as it is, numbers in double precision."""
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value, dtype=np.float64))


def npo_loss(nll: ArrayLike | Tensor, reference_nll: ArrayLike | Tensor, beta: float) -> Tensor:
    """The NPO loss of each forget document: (2/β)·softplus(−β(nll − reference_nll)) (Zhang et al. 2024, equation 3).

    Its gradient is that of −nll times 2σ(−β(nll − reference_nll)): gradient ascent at β → 0, and weaker the further
    the document has already been pushed below the reference.

    Args:
        nll: NLL of each document under the model, summed over its tokens (nats).
        reference_nll: the same under the frozen reference; no gradient flows into it. Broadcast against `nll`.
        beta: β, the inverse temperature, above 0.

    Returns:
        A tensor of the broadcast shape, at least 0, finite for finite input.

    Raises:
        ValueError: β is not above 0, or the shapes do not broadcast.
    """
    beta = _checks.finite("beta", beta, 0.0, low_open=True)
    nll, reference_nll = _tensor(nll), _tensor(reference_nll).detach()
    try:
        excess = nll - reference_nll.to(nll.device)
    except RuntimeError:
        raise ValueError(
            f"reference_nll must broadcast against nll, got shapes {tuple(reference_nll.shape)}, {tuple(nll.shape)}"
        ) from None
    return -(2.0 / beta) * F.logsigmoid(beta * excess)


def grad_diff_loss(forget: ArrayLike | Tensor, retain: ArrayLike | Tensor, alpha: float = 1.0) -> Tensor:
    """Gradient difference: alpha·retain − forget, unbounded below.

    Args:
        forget: loss on the forget set (nats), to be raised.
        retain: loss on the retain set (nats), to be kept low.
        alpha: weight of the retain set, at least 0; 0 is plain gradient ascent.
    """
    alpha = _checks.finite("alpha", alpha, 0.0)
    return alpha * _tensor(retain) - _tensor(forget)


def document_nll(model: nn.Module, data: training.Documents, rows: Tensor) -> Tensor:
    """NLL of documents `rows` summed over the tokens after the first (nats, float32): shape (rows,), with gradient."""
    inputs, labels = data.batch(rows)
    device = _batches.device_of(model)
    logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
    nll = F.cross_entropy(logits.transpose(1, 2), labels.to(device), ignore_index=training.IGNORED, reduction="none")
    return nll.sum(1)


def _all_nll(model: nn.Module, data: training.Documents, batch_size: int) -> Tensor:
    """`document_nll` of every document, in evaluation mode, on the CPU."""
    batches = torch.arange(len(data.lengths)).split(batch_size)
    with _batches.evaluation(model):
        return torch.cat([document_nll(model, data, rows).cpu() for rows in batches])


# ------------------------------------------------------------------------------------------------------ unlearning


def unlearn(
    model: nn.Module,
    forget: Sequence[Sequence[int]],
    retain: ArrayLike | None,
    *,
    method: str,
    verifier: Verifier,
    planted: Sequence[Sequence[int]] | None = None,
    copies: int | Sequence[int] = 1,
    probe: ArrayLike | None = None,
    reference: nn.Module | None = None,
    beta: float = 0.1,
    alpha: float = 1.0,
    threshold: float = 0.15,
    max_rounds: int = 14,
    extra_rounds: int = 1,
    batch_size: int = 8,
    learning_rate: float = 7e-6,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    max_grad_norm: float | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = True,
    description: str = "unlearning",
) -> Unlearning:
    """Unlearn the forget documents in place, round by round, until the verifier reports them forgotten.

    A round is one pass over the forget documents in a fresh order; every update takes one batch of them and one of as
    many retain documents. The defaults are Appendix F's where it states them (learning rate, 14 rounds, threshold,
    one more round after the first pass); β, the retain weight, the optimizer and what a round is are ours.

    Args:
        model: a transformers causal language model, trained in its own dtype; its mode is restored at the end.
        forget: token sequences of 2 tokens up to the model's context.
        retain: corpus blocks to keep, token ids of shape (n, length); None if `planted` is all there is to keep.
        method: "grad-diff" (on the mean NLL a token) or "npo" (on the NLL summed over a document).
        verifier: `verifier(model)`, called in evaluation mode before the first round and after each; the content counts
            as forgotten where its value lies below `threshold`.
        planted: further documents of the retain set.
        copies: how often each of `planted` occurs in it: one count, or one for each.
        probe: blocks (n, length) whose perplexity is recorded; None for `retain`.
        reference: NPO's reference; None for the model as it comes in. It is read once, before the first round, and
            never changed.
        beta: NPO's β.
        alpha: weight of the retain loss, in both methods; 0 is unlearning without a retain set.
        threshold: the verifier's value below which the content counts as forgotten.
        max_rounds: rounds at most.
        extra_rounds: rounds made after the first that passes.
        batch_size: forget documents, and retain documents, an update.
        learning_rate: AdamW's rate, constant.
        weight_decay: AdamW's decoupled decay.
        betas: AdamW's decay of the first and second moment.
        max_grad_norm: clip the gradient to this norm; None for no clipping.
        seed: fixes both orders and any dropout; the caller's random state is left alone.
        device: where to train (the model is moved there); None for where the model is.
        progress: show a bar with an estimate of the time left, if standard error is a terminal.
        description: the bar's label.

    Raises:
        ValueError: on arguments out of range, documents beyond the context or the vocabulary, weights that are not
            finite to begin with, a verifier that gives no number.
        FloatingPointError: as soon as a loss is not finite, before it reaches the weights.
    """
    _checks.choice("method", method, METHODS)
    training.Hyperparameters(  # checks them
        epochs=_checks.integer("max_rounds", max_rounds, 1),
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        betas=betas,
        max_grad_norm=max_grad_norm,
    )
    _checks.finite("beta", beta, 0.0, low_open=True)
    _checks.finite("alpha", alpha, 0.0)
    _checks.finite("threshold", threshold)
    _checks.integer("extra_rounds", extra_rounds)
    order, retained_order = np.random.default_rng(_checks.integer("seed", seed)).integers(2**62, size=2).tolist()
    if not callable(verifier):
        raise ValueError(f"verifier must be a function of the model, got {verifier!r}")
    vocabulary = model.config.vocab_size
    targets = training.documents(None, forget, 1, vocabulary)
    kept = training.documents(retain, planted, copies, vocabulary)
    for data in (targets, kept):
        training.check_context(model, data)
    probe = retain if probe is None else probe
    if probe is None:
        raise ValueError("probe must be given where retain is None: there are no blocks to take the perplexity of")
    if device is not None:
        model.to(device)
    device = _batches.device_of(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    training.check_finite_weights(parameters)

    began = time.perf_counter()
    reference_nll = _all_nll(model if reference is None else reference, targets, batch_size)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=learning_rate, betas=tuple(betas), weight_decay=weight_decay, fused=True
    )
    per_round = -(-targets.total // batch_size)
    steps = per_round * max_rounds
    batches = zip(  # the two orders are drawn apart: the retain set does not change that of the forget documents
        training.batch_rows(targets.copies, batch_size, steps, order),
        training.batch_rows(kept.copies, batch_size, steps, retained_order),
        strict=True,
    )

    def measure() -> tuple[float, float, float]:
        """The verifier's value, the probe's perplexity and the mean NLL of a forget document, now."""
        with _batches.evaluation(model):
            value = _checks.real("the verifier's value", verifier(model))
        forget_nll = _all_nll(model, targets, batch_size).mean().item()
        return value, training.perplexity(model, probe, batch_size), forget_nll

    def terms(rows: Tensor, kept_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of an update, and its forget and retain terms."""
        retained = torch.zeros((), device=device)
        if alpha:
            inputs, labels = kept.batch(kept_rows)
            logits = model(input_ids=inputs.to(device), use_cache=False).logits
            retained = training.mean_nll(logits, labels.to(device))
        nll = document_nll(model, targets, rows)
        if method == "npo":
            forgotten = npo_loss(nll, reference_nll[rows], beta).mean()
            return forgotten + alpha * retained, forgotten, retained
        forgotten = nll.sum() / int((targets.lengths[rows] - 1).sum())
        return grad_diff_loss(forgotten, retained, alpha), forgotten, retained

    measured, losses = [measure()], []
    passed_at = 0 if measured[0][0] < threshold else None
    modes = [(module, module.training) for module in model.modules()]
    cuda = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda),
        tqdm(total=max_rounds, desc=description, unit="round", disable=None if progress else True) as bar,
    ):
        torch.manual_seed(seed)
        try:
            while len(losses) < max_rounds and (passed_at is None or len(losses) < passed_at + extra_rounds):
                model.train()
                within = []
                for step in range(len(losses) * per_round, (len(losses) + 1) * per_round):
                    loss, forgotten, retained = terms(*next(batches))
                    if not math.isfinite(loss.item()):
                        raise FloatingPointError(
                            training.diverged(f"the loss is {loss.item()}", step, steps, learning_rate)
                        )
                    loss.backward()
                    if max_grad_norm is not None:
                        nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    within.append((forgotten.item(), retained.item() if alpha else math.nan))
                if not all_finite(parameters.values()):
                    raise FloatingPointError(
                        training.diverged("the weights are not finite after it", step, steps, learning_rate)
                    )
                losses.append(np.mean(within, axis=0))
                measured.append(measure())
                if passed_at is None and measured[-1][0] < threshold:
                    passed_at = len(losses)
                bar.set_postfix_str("verifier {:.2f}, perplexity {:.1f}".format(*measured[-1]), refresh=False)
                bar.update()
        finally:
            optimizer.zero_grad()
            for module, mode in modes:
                module.training = mode
    seconds = time.perf_counter() - began
    return Unlearning(*np.array(measured).T, *np.reshape(losses, (-1, 2)).T, passed_at, seconds)
