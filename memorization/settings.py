"""The switches a reader may set in the environment, read here and nowhere else.

`MEMORIZATION_SCALE`   smoke, pocket (default), small or paper: the size of every experiment
`MEMORIZATION_DEVICE`  auto (default), cpu, cuda or mps
`MEMORIZATION_CACHE`   where runs and pocket models are kept (default: the platform's user cache folder)
`MEMORIZATION_DATA`    a local folder holding wikitext-2 (default: the hub, else the standard documentation)
`MEMORIZATION_MODEL`   the published model of the `small` scale: a local folder or hub id
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

from . import _checks

SWITCHES = (
    "MEMORIZATION_SCALE",
    "MEMORIZATION_DEVICE",
    "MEMORIZATION_CACHE",
    "MEMORIZATION_DATA",
    "MEMORIZATION_MODEL",
)
SCALES = ("smoke", "pocket", "small", "paper")
DEVICES = ("auto", "cpu", "cuda", "mps")


def scale() -> str:
    """The scale of every experiment; `ValueError` if the variable names none."""
    return _checks.choice("MEMORIZATION_SCALE", os.environ.get("MEMORIZATION_SCALE") or "pocket", SCALES)


def device() -> str:
    """The device to compute on: "cpu", "cuda" or "mps". `auto` takes the first accelerator that torch sees."""
    name = _checks.choice("MEMORIZATION_DEVICE", os.environ.get("MEMORIZATION_DEVICE") or "auto", DEVICES)
    if name == "cpu":
        return name
    import torch  # only language-model code asks for a device

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next((kind for kind, there in available.items() if there), "cpu")
    if not available[name]:
        raise ValueError(f"MEMORIZATION_DEVICE is {name!r}, but torch sees no such device here; use 'auto' or 'cpu'")
    return name


def data_folder() -> Path | None:
    """The folder named by `MEMORIZATION_DATA`, or None; `ValueError` if it is named but missing."""
    named = os.environ.get("MEMORIZATION_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise ValueError(f"MEMORIZATION_DATA must name a folder, got {named!r}, which is not one")
    return folder


def model_name() -> str | None:
    """The published model of the `small` scale (`MEMORIZATION_MODEL`), or None."""
    return os.environ.get("MEMORIZATION_MODEL") or None


def _user_cache() -> Path:
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "memorization"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "memorization"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memorization"


def cache_folder() -> Path:
    """The cache folder, created if need be.

    Where it cannot be written to (read-only, or no home), a temporary folder serves instead, with a warning:
    the runs of this process are then kept only as long as that folder is.
    """
    named = os.environ.get("MEMORIZATION_CACHE")
    try:
        folder = Path(named).expanduser() if named else _user_cache()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        fallback = Path(tempfile.gettempdir()) / f"memorization-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"
        fallback.mkdir(mode=0o700, parents=True, exist_ok=True)
        warnings.warn(f"cannot write to the cache folder ({error}); using {fallback} instead", stacklevel=2)
        return fallback
