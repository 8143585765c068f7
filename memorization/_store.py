"""Folders of results that are whole or not there: written aside, renamed into place, verified when read.

An entry is a folder of files and a manifest with the SHA-256 of each. A process killed while it writes leaves
only a stray folder that starts with a dot; two processes that write the same entry leave one of the two, whole;
a file that changed afterward no longer matches its manifest, and the entry counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
STRAY_AFTER = 24 * 3600  # seconds after which a half-written folder is nobody's any more


def digest(*parts: bytes | str) -> str:
    """SHA-256 (hex) of the parts, each preceded by its length so that no two lists collide."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


def _intact(entry: Path) -> bool:
    try:
        listed = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(file_digest(entry / name) == expected for name, expected in listed.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def verified(entry: Path) -> bool:
    """Whether the entry is there with every file as it was written; a damaged one is reported by a warning."""
    if _intact(entry):
        return True
    if entry.exists():
        warnings.warn(f"the cached entry {entry.name} is damaged; it is made anew", stacklevel=2)
    return False


def write(entry: Path, fill: Callable[[Path], None], note: dict | None = None) -> bool:
    """Make the entry: `fill(folder)` writes the files, `note` is kept in the manifest beside their hashes.

    Returns False, with a warning, where nothing can be written (a read-only cache): the caller keeps its result.
    """
    aside = _stray(entry)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        warnings.warn(f"the cache cannot be written to ({error}); nothing is kept", stacklevel=2)
        return False
    try:
        fill(aside)
        files = {path.relative_to(aside).as_posix(): file_digest(path) for path in _files(aside)}
        manifest = {**(note or {}), "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
        _put(aside, entry)
        return True
    except OSError as error:
        warnings.warn(f"the cache cannot be written to ({error}); nothing is kept", stacklevel=2)
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        _sweep(entry.parent)


def _stray(entry: Path) -> Path:
    """A name beside the entry that nobody else uses. (`tempfile` would make a folder that only its owner reads.)"""
    return entry.parent / f".{entry.name[:16]}-{os.getpid()}-{secrets.token_hex(4)}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _put(aside: Path, entry: Path) -> None:
    """Rename `aside` to `entry`. An entry that another process put there meanwhile stays; a damaged one goes."""
    for _ in range(100):
        try:
            os.replace(aside, entry)
            return
        except OSError:
            if not entry.exists():
                raise
        if _intact(entry):
            return
        trash = _stray(entry)
        try:
            os.replace(entry, trash)
        except FileNotFoundError:
            continue  # another process moved it first
        shutil.rmtree(trash, ignore_errors=True)
    raise OSError(f"could not put {entry} in place")


def _sweep(folder: Path) -> None:
    """Remove half-written folders that a killed process left long ago."""
    for stray in folder.glob(".*-*"):
        try:
            if time.time() - stray.stat().st_mtime > STRAY_AFTER:
                shutil.rmtree(stray, ignore_errors=True)
        except OSError:
            continue
