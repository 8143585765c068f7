"""Many models at once: shadow models on random halves of a corpus, each target planted in half of them.

A shadow is an ordinary run of `training.fine_tune`; `plan` says on which data and from which seed, so any of them
can be repeated alone. How several are trained side by side was chosen by measurement, for pocket models
(4 layers of 128, batches of 8 blocks of 48 tokens):

- CPU: processes of one thread each, one a core. Arithmetic is the limit there (matrix products run at about 85% of a
  core's peak), and stacking the parameters of several models into one tensor program gains nothing (0.9 to 1.1 times
  one model after another), nor do compiled steps (30 s to compile, then as fast as before). What does gain is to let
  no core wait for another (a second thread in one run saves a third of its time, not half), and to keep freed memory
  in the process instead of having the kernel clear it anew every step.
- GPU: small models leave most of the chip idle, one kernel launch after another, so they are stacked: one program
  runs all of them. Models of more than `STACKABLE` parameters fill the chip by themselves and are trained in turn.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import joblib
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from . import _checks, _stacking, models, training

METHODS = ("auto", "processes", "stacked", "sequential")
STACKABLE = 50_000_000  # parameters of one model: beyond, one alone keeps a GPU busy
STACK_SHARE = 0.5  # of a GPU's free memory, for the weights, gradients and moments of one stack

Statistic = Callable[[nn.Module], ArrayLike]


@dataclass(frozen=True)
class Plan:
    """Which data each shadow trains on, and from which seed.

    Attributes:
        halves: (shadows, n // 2) rows of the corpus, sorted: independent random halves.
        members: (targets, shadows) bool: whether the shadow trains on the target. Each target is in exactly half of
            them (one more or one less, at random, if their number is odd), independently of the others.
        seeds: (shadows,) seeds of the runs.
    """

    halves: NDArray[np.int64]
    members: NDArray[np.bool_]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Shadows:
    """What the shadows say about each target.

    Attributes:
        statistics: (targets, shadows) the statistic under each shadow.
        members: (targets, shadows) bool: whether the shadow trained on the target.
        losses: The losses of each shadow's run, step by step (nats a token).
    """

    statistics: NDArray[np.float64]
    members: NDArray[np.bool_]
    losses: tuple[NDArray[np.float64], ...]

    @property
    def in_stats(self) -> NDArray[np.float64]:
        """The statistics of shadows trained on the target, NaN elsewhere: for `lira.lira_scores`."""
        return np.where(self.members, self.statistics, np.nan)

    @property
    def out_stats(self) -> NDArray[np.float64]:
        """The statistics of shadows trained without the target, NaN elsewhere."""
        return np.where(self.members, np.nan, self.statistics)


def plan(blocks: int, targets: int, n_shadows: int, seed: int) -> Plan:
    """The data and seeds of every shadow, from a corpus of `blocks` blocks; a function of the arguments alone.

    Raises:
        ValueError: fewer than 2 blocks or shadows, or no target.
    """
    _checks.integer("blocks", blocks, 2)
    _checks.integer("targets", targets, 1)
    _checks.integer("n_shadows", n_shadows, 2)
    rng = np.random.default_rng(_checks.integer("seed", seed))
    halves = np.array([np.sort(rng.choice(blocks, blocks // 2, replace=False)) for _ in range(n_shadows)])
    counts = n_shadows // 2 + (rng.integers(0, 2, targets) if n_shadows % 2 else 0)
    members = rng.random((targets, n_shadows)).argsort(axis=1).argsort(axis=1) < np.reshape(counts, (-1, 1))
    seeds = tuple(int(value) for value in rng.integers(0, 2**31, n_shadows))
    return Plan(halves, members, seeds)


def mean_log_prob(model: nn.Module, sequences: Sequence[Sequence[int]], batch_size: int = 64) -> NDArray[np.float64]:
    """Mean log-probability (nats) of each sequence's tokens after its first: the default statistic."""
    data = training.documents(None, sequences, 1, model.config.vocab_size)
    device, means = next(model.parameters()).device, []
    with torch.inference_mode():
        for rows in torch.arange(len(data.tokens)).split(batch_size):
            inputs, labels = data.batch(rows)
            logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
            nll = F.cross_entropy(
                logits.transpose(1, 2), labels.to(device), ignore_index=training.IGNORED, reduction="none"
            )
            means.append(-nll.double().sum(1).cpu() / (data.lengths[rows] - 1))
    return torch.cat(means).numpy()


def train_shadows(
    model: nn.Module | Callable[[int], nn.Module],
    blocks: ArrayLike,
    targets: Sequence[Sequence[int]],
    *,
    n_shadows: int = 16,
    copies: int | Sequence[int] = 1,
    statistic: Statistic | None = None,
    seed: int = 0,
    method: str = "auto",
    jobs: int | None = None,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
    keep: str | Path | None = None,
    progress: bool = True,
    **hyperparameters,
) -> Shadows:
    """Train shadow models on halves of the corpus with each target in or out, and take a statistic of each.

    Args:
        model: The base model that every shadow starts from (left as it is), or a function from a seed to a fresh one,
            for shadows trained from scratch.
        blocks: The corpus, token ids (n, length); every shadow trains on its own random half.
        targets: Token-id sequences, each in half of the shadows.
        n_shadows: Shadows, at least 2 (the paper: 16).
        copies: How often a target occurs per epoch where it is in: one count, or one for each target.
        statistic: `statistic(model)` returns one number a target, on the trained shadow in evaluation mode. None for
            the mean log-probability of each target's tokens. With processes, it must be picklable by joblib (a
            function of a module, or `functools.partial` of one, with arrays).
        seed: Fixes halves, memberships and the order of every run.
        method: "processes" (CPU), "stacked" (parameters of several shadows in one program), "sequential", or "auto":
            processes on a CPU, stacked on a GPU for models of at most `STACKABLE` parameters, else sequential. They
            agree within float tolerance; sequential runs are `training.fine_tune` to the bit.
        jobs: Shadows at once: processes (default: one a core), or models in a stack (default: all, or what half of a
            GPU's free memory holds at 20 bytes a parameter; activations come on top).
        device: Where to train; None for where the model is.
        checkpoint: Folder for snapshots, one subfolder a shadow: the same call resumes after an interruption, and
            finished shadows are not trained again. Not for stacked training.
        keep: Folder to save every trained shadow in (`shadow-00`, …, as transformers does). Memory holds one model a
            process, or one stack, at any time.
        progress: Show a bar over shadows (or steps of a stack), if standard error is a terminal.
        **hyperparameters: Settings of `training.fine_tune`: epochs, max_steps, batch_size, learning_rate, schedule,
            warmup, final_rate, weight_decay, betas, max_grad_norm.

    Returns:
        `Shadows`, whose `in_stats` and `out_stats` go to `lira.lira_scores`.

    Raises:
        ValueError: Arguments out of range, or a method that does not fit the device or the other arguments.
        FloatingPointError: A shadow's loss is not finite (its number is named).
    """
    _checks.choice("method", method, METHODS)
    settings = training.Hyperparameters(**hyperparameters)
    blocks = np.asarray(blocks)
    if blocks.ndim != 2:
        raise ValueError(f"blocks must be whole numbers of shape (n, length), got shape {blocks.shape}")
    shadows = plan(len(blocks), len(targets), n_shadows, seed)
    make = model if not isinstance(model, nn.Module) else lambda _: model
    first = make(shadows.seeds[0])
    times = np.broadcast_to(np.asarray(copies), len(targets)) if np.ndim(copies) == 0 else np.asarray(copies)
    data = training.documents(blocks, targets, times, first.config.vocab_size)  # all of it, checked before any starts
    training.check_context(first, data)
    training.check_finite_weights(dict(first.named_parameters()))
    device = torch.device(device) if device is not None else next(first.parameters()).device
    method = _choose(method, first, device, checkpoint)
    jobs = _jobs(jobs, method, first, device, n_shadows)
    task = _Task(blocks, [list(map(int, target)) for target in targets], times, shadows, settings, str(device))
    task.statistic = statistic or partial(mean_log_prob, sequences=task.targets)
    task.keep = None if keep is None else str(keep)
    task.checkpoint = None if checkpoint is None else str(checkpoint)
    if method == "stacked":
        results = _stacked(make, task, jobs, progress)
    elif method == "processes":
        results = _processes(model, task, jobs)
    else:
        results = ((s, *_train_one(copy.deepcopy(make(shadows.seeds[s])), s, task)) for s in range(n_shadows))
    statistics, losses = np.empty((len(targets), n_shadows)), [np.empty(0)] * n_shadows
    with (
        contextlib.closing(results),
        tqdm(
            total=n_shadows, desc="shadows", unit="shadow", disable=None if progress and method != "stacked" else True
        ) as bar,
    ):
        for s, values, history in results:
            statistics[:, s], losses[s] = values, history
            bar.update()
    return Shadows(statistics, shadows.members, tuple(losses))


# --- one shadow ------------------------------------------------------------------------------------------------------


@dataclass
class _Task:
    """Everything a shadow needs besides its initial model."""

    blocks: NDArray
    targets: list[list[int]]
    copies: NDArray[np.int64]
    plan: Plan
    settings: training.Hyperparameters
    device: str
    statistic: Statistic | None = None
    keep: str | None = None
    checkpoint: str | None = None

    def data(self, s: int) -> tuple[NDArray, list[list[int]], list[int]]:
        """Blocks, planted targets and their copies of shadow s."""
        chosen = np.flatnonzero(self.plan.members[:, s])
        return self.blocks[self.plan.halves[s]], [self.targets[i] for i in chosen], self.copies[chosen].tolist()


def _train_one(model: nn.Module, s: int, task: _Task) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Train shadow s in place; its statistics and losses."""
    blocks, planted, copies = task.data(s)
    try:
        record = training.fine_tune(
            model,
            blocks,
            planted=planted,
            copies=copies,
            seed=task.plan.seeds[s],
            device=task.device,
            checkpoint=None if task.checkpoint is None else Path(task.checkpoint) / f"shadow-{s:02d}",
            progress=False,
            **vars(task.settings),
        )
    except FloatingPointError as error:
        raise FloatingPointError(f"shadow {s}: {error}") from None
    return _finish(model, s, task), record.losses


def _finish(model: nn.Module, s: int, task: _Task) -> NDArray[np.float64]:
    """Save shadow s if asked to, and take its statistic."""
    if task.keep is not None:
        with models._quiet():
            model.save_pretrained(Path(task.keep) / f"shadow-{s:02d}")
    model.eval()
    values = np.asarray(task.statistic(model), dtype=np.float64)
    if values.shape != (len(task.targets),):
        raise ValueError(f"statistic must return shape ({len(task.targets)},), one number a target, got {values.shape}")
    return values


def _choose(method: str, model: nn.Module, device: torch.device, checkpoint: str | Path | None) -> str:
    obstacle = (
        "checkpoint is given, and a stack has no snapshots" if checkpoint is not None else _stacking.obstacle(model)
    )
    if method == "auto":
        if device.type == "cpu":
            return "processes" if isinstance(model, PreTrainedModel) else "sequential"
        small = sum(p.numel() for p in model.parameters()) <= STACKABLE
        return "stacked" if small and not obstacle else "sequential"
    if method == "processes" and device.type != "cpu":
        raise ValueError(f"method must be 'stacked' or 'sequential' on {device.type}, got 'processes'")
    if method == "stacked" and obstacle:
        raise ValueError(f"method must not be 'stacked' for this model: {obstacle}")
    return method


def _jobs(jobs: int | None, method: str, model: nn.Module, device: torch.device, n_shadows: int) -> int:
    if jobs is not None:
        return min(_checks.integer("jobs", jobs, 1), n_shadows)
    if method == "processes":
        return min(joblib.cpu_count(), n_shadows)
    if method == "stacked" and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        each = 20 * sum(p.numel() for p in model.parameters())  # weights, gradients, two moments and one spare
        return max(1, min(n_shadows, int(STACK_SHARE * free / each)))
    return n_shadows


# --- processes -------------------------------------------------------------------------------------------------------


def _processes(
    model: nn.Module | Callable[[int], nn.Module], task: _Task, jobs: int
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Shadows from worker processes, as they finish. Models travel as folders of safetensors and JSON, unpickled."""
    with tempfile.TemporaryDirectory(prefix="shadows-", ignore_cleanup_errors=True) as parent:

        def calls() -> Iterator:
            if isinstance(model, nn.Module):
                base = _Saved(model, Path(parent) / "base")
            for s, seed in enumerate(task.plan.seeds):
                saved = base if isinstance(model, nn.Module) else _Saved(model(seed), Path(parent) / str(s))
                yield joblib.delayed(_work)(saved, s, task)

        with joblib.parallel_config("loky", inner_max_num_threads=1):
            yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(calls())


class _Saved:
    """A model on disk: its folder, dtype and attention implementation, which a config does not keep."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"model must be a transformers model when method is 'processes', got {type(model)}")
        with models._quiet():
            model.save_pretrained(folder)
        self.folder, self.dtype = str(folder), str(model.dtype).removeprefix("torch.")
        self.attention = model.config._attn_implementation

    def load(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=getattr(torch, self.dtype), attn_implementation=self.attention, local_files_only=True
        )


def _work(saved: _Saved, s: int, task: _Task) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Train shadow s on one thread, in a worker; in the caller's own process where there is one job."""
    _keep_freed_memory()
    with models._quiet():
        model = saved.load()
    with training.threads(1):
        return s, *_train_one(model, s, task)


def _keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next one, instead of a page fault for every 4 KiB of every step."""
    trim_threshold, map_at_most = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**30)
        mallopt(map_at_most, 0)
    except (AttributeError, OSError, TypeError):
        pass  # another C library: nothing to tune


# --- stacked ---------------------------------------------------------------------------------------------------------


def _stacked(
    make: Callable[[int], nn.Module], task: _Task, jobs: int, progress: bool
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Shadows in stacks of `jobs`."""
    for start in range(0, len(task.plan.seeds), jobs):
        seeds = task.plan.seeds[start : start + jobs]
        vocabulary = make(seeds[0]).config.vocab_size
        data = [training.documents(*task.data(start + i), vocabulary) for i in range(len(seeds))]
        names = [f"shadow {start + i}" for i in range(len(seeds))]
        trained = _stacking.train_stack(make, seeds, data, task.settings, task.device, names, progress)
        for i, (model, losses) in enumerate(trained):
            yield start + i, _finish(model, start + i, task), losses
