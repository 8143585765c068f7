"""Snapshots of a training run: weights, optimizer, random state and step in one safetensors file, no pickle."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import _checks

CHECKPOINT_FILE = "training.safetensors"


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds a NaN or an infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash (hex) of the tensors' dtypes, shapes and bytes, in order."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return state.hexdigest()


class Snapshots:
    """One file that always holds a complete state of the run `run` (its settings, as JSON), or does not exist."""

    def __init__(self, folder: Path, run: dict, every_seconds: float, every_steps: int | None) -> None:
        """Write to `folder` every so many seconds (or 20 times what writing takes, if that is longer) and steps."""
        self.file, self.run = folder / CHECKPOINT_FILE, run
        self.every_seconds = _checks.real("checkpoint_seconds", every_seconds, 0.0)
        self.every_steps = None if every_steps is None else _checks.integer("checkpoint_steps", every_steps, 1)
        folder.mkdir(parents=True, exist_ok=True)
        self.due = time.perf_counter() + self.every_seconds

    def restore(
        self, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, losses: NDArray[np.float64]
    ) -> tuple[int, float]:
        """Load the snapshot, if there is one, into the arguments; returns the updates made and their seconds.

        A damaged file is reported by a warning and counts as absent. Raises `ValueError` if it is of another run.
        """
        if not self.file.exists():
            return 0, 0.0
        try:
            with safe_open(self.file, framework="pt") as stored:
                metadata = stored.metadata()
                state = json.loads(metadata["state"])
                tensors = {name: stored.get_tensor(name) for name in sorted(stored.keys())}
            if digest(tensors.values()) != metadata["digest"]:
                raise ValueError("its bytes do not match its digest")
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            warnings.warn(f"{self.file} is damaged ({error}): training starts from the beginning", stacklevel=3)
            return 0, 0.0
        for name, value in self.run.items():
            if state["run"].get(name) != value:
                raise ValueError(
                    f"checkpoint must be of this same run, but in {self.file} {name} is "
                    f"{state['run'].get(name)!r}, here {value!r}: name another folder, or delete that one"
                )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[f"model.{name}"])
                prefix = f"optimizer.{name}."
                optimizer.state[parameter] = {
                    key.removeprefix(prefix): value.to(parameter.device)
                    for key, value in tensors.items()
                    if key.startswith(prefix)
                }
        losses[: state["step"]] = tensors["losses"].numpy()
        torch.set_rng_state(tensors["random.cpu"])
        if parameter.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], parameter.device)
        return state["step"], state["seconds"]

    def after_step(
        self,
        step: int,
        steps: int,
        parameters: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        losses: NDArray[np.float64],
        seconds: float,
    ) -> None:
        """Write a snapshot after update `step` of `steps` if one is due; never one with weights that are not finite."""
        by_steps = self.every_steps is not None and step % self.every_steps == 0
        if not (by_steps or step == steps or time.perf_counter() >= self.due) or not all_finite(parameters.values()):
            return
        began = time.perf_counter()
        tensors = {"losses": torch.from_numpy(losses[:step].copy()), "random.cpu": torch.get_rng_state()}
        for name, parameter in parameters.items():
            tensors[f"model.{name}"] = parameter.detach().contiguous()
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value.detach().contiguous()
        if parameter.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(parameter.device)
        tensors = dict(sorted(tensors.items()))
        state = json.dumps({"step": step, "seconds": seconds, "run": self.run})
        partial = self.file.with_name(f"{self.file.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata={"state": state, "digest": digest(tensors.values())})
            with open(partial, "rb+") as written:
                os.fsync(written.fileno())
            os.replace(partial, self.file)
        finally:
            partial.unlink(missing_ok=True)
        now = time.perf_counter()
        self.due = now + max(self.every_seconds, 20.0 * (now - began))
