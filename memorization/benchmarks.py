"""How much faster than the plain way, and how far from the machine's limit: `python -m memorization.benchmarks`.

Every benchmark runs the package's code and a plain reference loop on the same inputs in one process, in turns, so that
whatever else the machine does falls on both; a first run of both checks that they agree. Printed are the times,
the median and the range of the ratios, and the floor: the seconds that the machine's measured peak of matrix products
(or its memory bandwidth, if that takes longer) would need for our side. The reference loops:

- scores: one text at a time, with one forward pass a score (as mimir's attacks are used) or one pass for all of them
  (as min-k%++ is published);
- shadows: transformers' Trainer, one model after another, on all cores; stacking: the same on a GPU;
- certification: best-first search that expands one node at a time, the prefix's keys and values kept;
- extraction: transformers' `generate`, one prompt at a time.

Ratios depend on the machine and on what else runs there (two threads that wait for each other suffer most from
neighbors; `--threads 1` is steadier); no test asserts one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import joblib
import torch
from transformers.utils import logging

from . import _checks, pocket
from ._comparisons import BENCHMARKS, QUICK, TINY, Comparison

SIZES = {"quick": QUICK, "tiny": TINY}


@dataclass(frozen=True)
class Result:
    """Times in seconds of the repeats of one comparison."""

    comparison: Comparison
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times longer the plain way took, repeat by repeat."""
        return tuple(theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True))


def run(comparison: Comparison, repeats: int) -> Result:
    """Check that both ways agree (which warms them up), then time them in turns.

    Raises:
        AssertionError: the two ways disagree.
    """
    _checks.integer("repeats", repeats, 1)
    comparison.agree(comparison.ours(), comparison.theirs())
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for repeat in range(repeats):
        for way in ("ours", "theirs") if repeat % 2 == 0 else ("theirs", "ours"):
            gc.collect()  # nobody pays for what the other left behind
            began = time.perf_counter()
            getattr(comparison, way)()
            times[way].append(time.perf_counter() - began)
    return Result(comparison, tuple(times["ours"]), tuple(times["theirs"]))


# --- the machine, and the table --------------------------------------------------------------------------------------


def peak_flops(device: str = "cpu", repeats: int = 20) -> float:
    """Floating-point operations a second of the device's best float32 matrix product, on all threads."""
    size = 1024 if device == "cpu" else 8192
    a, b = torch.rand(2, size, size, device=device)
    return 2.0 * size**3 / _best_seconds(lambda: a @ b, device, repeats)


def memory_bandwidth(device: str = "cpu", repeats: int = 10) -> float:
    """Bytes a second that a copy larger than the caches reads and writes, on all threads."""
    source = torch.ones(2**25 if device == "cpu" else 2**30, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / _best_seconds(lambda: target.copy_(source), device, repeats)


def _best_seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = math.inf
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - began)
    return best


def machine() -> str:
    """Processor, cores, versions and load, in one line."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("torch", "transformers"))
    if torch.cuda.is_available():
        name = f"{name}, {torch.cuda.get_device_name()}"
    return f"{name}, {joblib.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}, {versions}"


def table(results: Sequence[Result], limits: Mapping[str, tuple[float, float]]) -> str:
    """One line a comparison: times, ratios, target, and the share of the machine's limit that our side reaches.

    Args:
        results: What was measured.
        limits: `peak_flops` and `memory_bandwidth` of each device.
    """
    lines = [
        f"{'our way, against':44} {'ours':>8} {'theirs':>8} {'ratio':>7} {'range':>13} {'target':>7} "
        f"{'GFLOP/s':>8} {'floor':>8} {'reached':>8}  limit"
    ]
    for result in results:
        ours, theirs = statistics.median(result.ours), statistics.median(result.theirs)
        low, high = min(result.ratios), max(result.ratios)
        flops, bandwidth = limits[result.comparison.device]
        arithmetic, memory = result.comparison.flops / flops, result.comparison.traffic / bandwidth
        floor, limit = max((arithmetic, "arithmetic"), (memory, "memory"))
        lines.append(
            f"{result.comparison.name:44} {ours:7.3f}s {theirs:7.3f}s {statistics.median(result.ratios):6.1f}x "
            f"{f'{low:.1f} to {high:.1f}':>13} {result.comparison.target:6.0f}x "
            f"{result.comparison.flops / ours / 1e9:8.1f} {floor:7.3f}s {floor / ours:8.0%}  {limit}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m memorization.benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"{', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--repeats", type=int, default=5, help="times that each side runs, in turns (default: 5)")
    parser.add_argument("--family", choices=pocket.FAMILIES, default=pocket.FAMILIES[0])
    parser.add_argument("--size", choices=SIZES, default="quick", help="tiny says nothing about speed (default: quick)")
    parser.add_argument("--threads", type=int, default=joblib.cpu_count(), help="default: one a core")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"name must be one of {', '.join(BENCHMARKS)}, got {name!r}")
    for name in ("repeats", "threads"):
        if vars(options)[name] < 1:
            parser.error(f"{name} must be at least 1, got {vars(options)[name]}")
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    print(machine())
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    limits = {device: (peak_flops(device), memory_bandwidth(device)) for device in devices}
    for device, (flops, bandwidth) in limits.items():
        print(
            f"{device}: matrix products at {flops / 1e9:.0f} GFLOP/s, memory at {bandwidth / 1e9:.0f} GB/s (measured)"
        )
    results = []
    for name in options.names or BENCHMARKS:
        if name == "stacking" and "cuda" not in devices:
            print("stacking: skipped, there is no CUDA device (on a CPU it gains nothing: see memorization.shadows)")
            continue
        for comparison in BENCHMARKS[name](SIZES[options.size], options.family):
            results.append(run(comparison, options.repeats))
            print(f"  {comparison.name}: {statistics.median(results[-1].ratios):.1f}x", file=sys.stderr)
    if not results:
        return
    print(f"\n{table(results, limits)}")
    with contextlib.suppress(OSError, AttributeError):
        load = os.getloadavg()[0]
        print(
            f"\nload average {load:.1f}"
            + (": something else ran too, read the ranges" if load > 1.5 * joblib.cpu_count() else "")
        )


if __name__ == "__main__":
    main()
