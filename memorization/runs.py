"""Run a function over many configurations: in parallel, with progress, each result kept and never made twice.

A result is found again by what it depends on: the function's source and the parts of this package it reaches, the
configuration, library versions, scale, device and corpus. It is kept as JSON, npz and safetensors (never a pickle),
written whole or not at all, and verified when it is read; so a killed sweep loses the runs in flight alone, a
damaged file costs one run, and processes that share a cache at worst do the same work twice.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import _checks, _fingerprint, _store, settings

BACKENDS = ("loky", "threading", "dask")
ARRAY, TENSOR = "__array__", "__tensor__"  # keys that stand for an array or a tensor in the stored JSON


def run(
    function: Callable[..., Any],
    configurations: Iterable[dict],
    *,
    cache: str | Path | bool | None = None,
    jobs: int = 1,
    backend: str = "loky",
    seed: int | None = None,
    sources: Sequence = (),
    progress: bool = True,
) -> list[Any]:
    """The results of `function(**configuration)`, in the order of the configurations.

    Args:
        function: what to run; its result is made of dictionaries, lists, numbers, strings, numpy arrays and torch
            tensors (tuples come back as lists). Global values that it uses count by their content.
        configurations: the keyword arguments of each run, as plain values: numbers, strings, lists, dictionaries.
        cache: the folder of kept results; None for `runs` in the cache folder, False to keep nothing.
        jobs: runs at a time; -1 for as many as there are cores.
        backend: what runs them where `jobs` is not 1: "loky" (processes), "threading", or "dask" (the active
            `dask.distributed` client's workers).
        seed: if given, a configuration without a "seed" gets one derived from this and from itself, so that adding
            or reordering configurations changes no other's.
        sources: further modules or files that the results depend on.
        progress: show a bar with an estimate of the time left, if standard error is a terminal.

    Raises:
        ValueError: a configuration or a result that is not of the allowed kinds, or a function that uses a global
            value without comparable content.
        Exception: whatever the function raises, with the configuration noted; results made by then are kept.
    """
    _checks.choice("backend", backend, BACKENDS)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs == 0 or jobs < -1:
        raise ValueError(f"jobs must be a whole number of at least 1, or -1, got {jobs!r}")
    configurations = [_configuration(place, given, seed) for place, given in enumerate(configurations)]
    folder, dependence, note = None, "", {}
    if cache is not False:
        folder = settings.cache_folder() / "runs" if cache is None or cache is True else Path(cache).expanduser()
        dependence, note = _fingerprint.of_function(function, sources)
    label = re.sub(r"\W+", "-", _fingerprint.name_of(function).rpartition(".")[2]).strip("-")

    results: dict[str, Any] = {}
    waiting: dict[str, tuple[dict, Path | None]] = {}  # by key: equal configurations run once
    keys = []
    for configuration in configurations:
        key = _store.digest(dependence, json.dumps(configuration, sort_keys=True))
        keys.append(key)
        if key in results or key in waiting:
            continue
        entry = folder / f"{label}-{key[:32]}" if folder else None
        found, result = _read(entry) if entry else (False, None)
        if found:
            results[key] = result
        else:
            waiting[key] = (configuration, entry)
    description = f"{label} ({len(results)} kept)" if results else label
    with _bar(len(waiting), description, progress) as bar:
        for key, result in _results(function, waiting, note, jobs, backend):
            results[key] = result
            bar.update()
    return [results[key] for key in keys]


def _bar(total: int, description: str, progress: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError('running a sweep needs tqdm: pip install "memorization[lm]"') from None
    return tqdm(total=total, desc=description, unit="run", disable=None if progress and total else True)


def _configuration(place: int, given: dict, seed: int | None) -> dict:
    if not isinstance(given, dict):
        raise ValueError(f"configurations[{place}] must be a dictionary, got a {type(given).__name__}")
    configuration = _fingerprint.plain(f"configurations[{place}]", given)
    if seed is not None and "seed" not in configuration:
        _checks.integer("seed", seed)
        derived = _store.digest(str(seed), json.dumps(configuration, sort_keys=True))
        configuration["seed"] = int(derived[:8], 16)
    return configuration


# ------------------------------------------------------------------------------------------------------- running


def _results(function: Callable, waiting: dict, note: dict, jobs: int, backend: str) -> Iterable[tuple[str, Any]]:
    """Pairs of key and result as they come in."""
    if jobs == 1 or len(waiting) <= 1 and backend == "loky":
        for key, (configuration, entry) in waiting.items():
            yield key, _one(function, configuration, entry, note)
        return
    joblib = _joblib(backend)
    switches = {name: os.environ[name] for name in settings.SWITCHES if name in os.environ}
    with joblib.parallel_config(backend=backend, n_jobs=jobs):
        tasks = (
            joblib.delayed(_elsewhere)(switches, key, function, configuration, entry, note)
            for key, (configuration, entry) in waiting.items()
        )
        yield from joblib.Parallel(return_as="generator_unordered", batch_size=1)(tasks)


def _joblib(backend: str) -> Any:
    try:
        import joblib

        if backend == "dask":
            import distributed  # noqa: F401, joblib's own message is about a missing client
    except ImportError as error:
        extra = "pip install dask distributed" if error.name == "distributed" else 'pip install "memorization[lm]"'
        raise ImportError(f"running in parallel needs {error.name}: {extra}") from None
    return joblib


def _elsewhere(switches: dict[str, str], key: str, *task: Any) -> tuple[str, Any]:
    """A run in a worker, which may have started under other switches than its caller's."""
    for name in settings.SWITCHES:
        if name in switches:
            os.environ[name] = switches[name]
        else:
            os.environ.pop(name, None)
    return key, _one(*task)


def _one(function: Callable, configuration: dict, entry: Path | None, note: dict) -> Any:
    """Make one result and keep it. What is returned went through the stored form, as a kept result would have."""
    began = time.perf_counter()
    try:
        result = function(**json.loads(json.dumps(configuration)))
        tree, arrays, tensors = _pack(result)
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11 and later
            error.add_note(f"in the run of {_fingerprint.name_of(function)} with {configuration!r}")
        raise
    if entry is not None:
        kept = {**note, "configuration": configuration, "seconds": round(time.perf_counter() - began, 3)}
        _store.write(entry, lambda folder: _save(folder, tree, arrays, tensors), kept)
    return _unpack(tree, arrays, tensors)


# ------------------------------------------------------------------------------------------------------- storing


def _pack(result: Any) -> tuple[Any, dict[str, np.ndarray], dict[str, Any]]:
    """A result as JSON values, numpy arrays and torch tensors, the latter two by the name that stands for them."""
    arrays: dict[str, np.ndarray] = {}
    tensors: dict[str, Any] = {}
    torch = sys.modules.get("torch")

    def walk(where: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufcSUmM":
                raise ValueError(f"{where} must be an array of numbers or strings, got dtype {value.dtype}")
            arrays[str(len(arrays))] = np.array(value)
            return {ARRAY: str(len(arrays) - 1)}
        if torch is not None and isinstance(value, torch.Tensor):
            # A copy of its own: tied weights share memory, which safetensors refuses.
            tensors[str(len(tensors))] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {TENSOR: str(len(tensors) - 1)}
        if isinstance(value, dict):
            if not all(isinstance(key, str) and key not in (ARRAY, TENSOR) for key in value):
                raise ValueError(f"{where} must have strings as keys, got {list(value)!r}")
            return {key: walk(f"{where}[{key!r}]", part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(f"{where}[{place}]", part) for place, part in enumerate(value)]
        return _fingerprint.plain(where, value)

    return walk("result", result), arrays, tensors


def _unpack(tree: Any, arrays: Any, tensors: Any) -> Any:
    """The inverse of `_pack`."""
    if isinstance(tree, dict):
        if ARRAY in tree:
            return arrays[tree[ARRAY]]
        if TENSOR in tree:
            return tensors[tree[TENSOR]]
        return {key: _unpack(part, arrays, tensors) for key, part in tree.items()}
    if isinstance(tree, list):
        return [_unpack(part, arrays, tensors) for part in tree]
    return tree


def _save(folder: Path, tree: Any, arrays: dict[str, np.ndarray], tensors: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(tree), encoding="utf-8")
    if arrays:
        np.savez(folder / "arrays.npz", **arrays)
    if tensors:
        from safetensors.torch import save_file

        save_file(tensors, folder / "tensors.safetensors")


def _read(entry: Path) -> tuple[bool, Any]:
    """Whether the entry holds a result, and the result."""
    if not _store.verified(entry):
        return False, None
    try:
        arrays: dict[str, np.ndarray] = {}
        tensors: dict[str, Any] = {}
        if (entry / "arrays.npz").is_file():
            with np.load(entry / "arrays.npz", allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        if (entry / "tensors.safetensors").is_file():
            from safetensors.torch import load_file

            tensors = load_file(entry / "tensors.safetensors")
        tree = json.loads((entry / "result.json").read_text(encoding="utf-8"))
        return True, _unpack(tree, arrays, tensors)
    except (OSError, ValueError, KeyError) as error:
        warnings.warn(f"the kept result {entry.name} cannot be read ({error}); it is made anew", stacklevel=3)
        return False, None
