"""The paper's claims beside our measurements: `claim`, `check`, `table`.

Every numbered statement of the paper is an entry of `claims.yaml`. A chapter that measures one calls `check`, which
compares, records the result with its provenance, and stops the build where a claim that must hold exactly does not.
The scorecard is `table()`: nothing in it is green unless a measurement made it so.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from . import settings

EXACT_KINDS = ("closed-form", "inequality", "construction")  # must hold whatever the scale
STATUSES = (
    "exact",
    "reproduced",
    "reproduced in shape",
    "known discrepancy",
    "differs",
    "not run at this scale",
    "not measured",
)
_VERSIONED = ("numpy", "scipy", "torch", "transformers", "opacus", "dp-accounting", "scikit-learn")


@dataclass(frozen=True)
class Claim:
    """One checkable statement of the paper; the fields are explained at the top of `claims.yaml`."""

    id: str
    where: str
    kind: str
    claim: str
    value: Any
    tolerance: str
    check: str
    verified: Any
    note: str = ""
    reading_note: int | None = None

    @property
    def must_hold(self) -> bool:
        """Whether a disagreement is an error of ours unless a reading note explains it."""
        return self.kind in EXACT_KINDS and self.reading_note is None


@dataclass(frozen=True)
class Measurement:
    """What one `check` found: the numbers compared, the verdict, and where it came from."""

    id: str
    status: str
    measured: Any
    expected: Any
    interval: tuple[float, float] | None
    note: str
    provenance: Mapping[str, Any]

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" in [{_text(self.interval[0])}, {_text(self.interval[1])}]"
        return f"{self.id}: {self.status} (paper {_text(self.expected)}, here {_text(self.measured)}{interval})"


@lru_cache(maxsize=1)
def _claims() -> dict[str, Claim]:
    try:
        import yaml
    except ImportError:
        raise ImportError('reading the claims needs PyYAML: pip install "memorization[lm]"') from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (Path(__file__).parent / "claims.yaml").read_text(encoding="utf-8")
    return {entry["id"]: Claim(**entry) for entry in yaml.load(text, Loader=loader)}


def claims() -> list[Claim]:
    """Every claim of the paper, in order of appearance."""
    return list(_claims().values())


def claim(id: str) -> Claim:
    """The claim called `id`; `ValueError`, naming the nearest ids, if there is none."""
    try:
        return _claims()[id]
    except KeyError:
        import difflib

        near = ", ".join(difflib.get_close_matches(id, _claims(), n=3)) or "see memorization/claims.yaml"
        raise ValueError(f"id must be a claim of claims.yaml, got {id!r} (nearest: {near})") from None


def check(
    id: str,
    measured: Any,
    expected: Any = None,
    atol: float = 0,
    rtol: float = 0,
    interval: tuple[float, float] | None = None,
    note: str = "",
    *,
    shape: bool | None = None,
    seed: int | None = None,
    device: str = "cpu",
    corpus: str | None = None,
) -> Measurement:
    """Compare a measurement with the paper's value and record it.

    Args:
        id: the claim measured.
        measured: a number, a boolean (the stated property held), a string, or a list or mapping of these.
        expected: what the measurement should equal. Defaults to the paper's value, or to True for a boolean; a claim
            whose value is a formula has to be given its number here, since nothing is evaluated from text.
        atol: absolute tolerance of the comparison.
        rtol: relative tolerance of the comparison, as a share of `expected`.
        interval: confidence interval of a measured number; agreement then also means that it covers `expected`.
        note: one sentence for the scorecard.
        shape: for an experiment at another scale than the paper's: whether direction and ordering hold.
        seed: the seed of the measurement.
        device: the device it ran on.
        corpus: name and hash of the corpus it used.

    Returns:
        The recorded measurement.

    Raises:
        ValueError: there is no such claim, or `expected` is missing or cannot be compared.
        AssertionError: a claim that must hold exactly does not, and no reading note explains it.
    """
    entry = claim(id)
    measured, expected = _plain("measured", measured), _plain("expected", expected)
    if expected is None:
        expected = True if isinstance(measured, bool) else _plain("expected", entry.value)
        if isinstance(expected, str) and not isinstance(measured, str):
            raise ValueError(f"expected must be given for {id}: its value is the formula {expected!r}, not a number")
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        if not (math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, got {tolerance!r}")
    if interval is not None:
        interval = (float(interval[0]), float(interval[1]))
        if not interval[0] <= interval[1]:
            raise ValueError(f"interval must be a (low, high) pair with low <= high, got {interval!r}")
    agrees = _agree(measured, expected, atol, rtol, id)
    if interval is not None and isinstance(expected, (int, float)):
        agrees = agrees or interval[0] <= expected <= interval[1]
    if not agrees and entry.must_hold:
        raise AssertionError(f"{id}: the paper has {expected!r}, measured {measured!r} ({entry.claim})")
    result = Measurement(
        id, _status(entry, agrees, shape), measured, expected, interval, note, _provenance(seed, device, corpus)
    )
    _record(result)
    return result


def not_run(id: str, note: str) -> Measurement:
    """Record that a claim is out of reach at the current scale, and why."""
    entry = claim(id)
    result = Measurement(
        entry.id, "not run at this scale", None, entry.value, None, note, _provenance(None, "none", None)
    )
    _record(result)
    return result


def _status(entry: Claim, agrees: bool, shape: bool | None) -> str:
    if entry.kind == "setting":
        return "exact" if agrees else "not run at this scale"
    if entry.reading_note is not None and not agrees:
        return "known discrepancy"
    if entry.kind in EXACT_KINDS:
        return "exact" if agrees else "differs"
    if entry.kind == "lm-experiment" and settings.scale() != "paper":
        return "reproduced in shape" if (agrees if shape is None else shape) else "differs"
    if agrees:
        return "reproduced"
    return "reproduced in shape" if shape else "differs"


def _plain(name: str, value: Any) -> Any:
    """Numpy values as plain Python, so that records are JSON."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{name} must be numbers, booleans, strings, or lists or mappings of them, got {type(value)}")


def _agree(measured: Any, expected: Any, atol: float, rtol: float, id: str) -> bool:
    if isinstance(expected, dict) and isinstance(measured, dict):
        return measured.keys() == expected.keys() and all(
            _agree(measured[key], expected[key], atol, rtol, id) for key in expected
        )
    if isinstance(expected, list) and isinstance(measured, list):
        return len(measured) == len(expected) and all(
            _agree(one, other, atol, rtol, id) for one, other in zip(measured, expected, strict=True)
        )
    if isinstance(expected, (bool, str)) or expected is None:
        return type(measured) is type(expected) and measured == expected
    if isinstance(expected, (int, float)) and isinstance(measured, (int, float)) and not isinstance(measured, bool):
        return measured == expected or abs(measured - expected) <= atol + rtol * abs(
            expected
        )  # nan agrees with nothing
    raise ValueError(f"expected must be comparable with what was measured for {id}: {expected!r} against {measured!r}")


# --- records ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _sources() -> str:
    """Hash of this package's sources: a measurement made by other code is not shown."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*")):
        if path.suffix in (".py", ".yaml"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _provenance(seed: int | None, device: str, corpus: str | None) -> dict[str, Any]:
    return {
        "scale": settings.scale(),
        "device": device,
        "seed": seed,
        "corpus": corpus,
        "versions": _versions(),
        "sources": _sources(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _folder() -> Path:
    folder = settings.cache_folder() / "ledger" / settings.scale()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _record(result: Measurement) -> None:
    text = json.dumps(result.__dict__, indent=1)
    handle, temporary = tempfile.mkstemp(dir=_folder(), suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, _folder() / f"{result.id}.json")


def measurements() -> dict[str, Measurement]:
    """The measurements recorded at the current scale by the package as it is now, by claim id."""
    found = {}
    for path in sorted(_folder().glob("*.json")):
        try:
            record = Measurement(**json.loads(path.read_text(encoding="utf-8")))
            current = record.provenance["sources"] == _sources() and record.status in STATUSES
        except (OSError, ValueError, TypeError, KeyError):
            continue  # a damaged record is no measurement; its chapter writes it anew
        if current and record.id in _claims():
            found[record.id] = record
    return found


# --- tables -------------------------------------------------------------------------------------------------------


class Table:
    """Claims beside measurements; a notebook shows it as HTML, a terminal as text. Rows are plain dictionaries."""

    columns = ("status", "where", "claim", "paper", "here", "interval", "note")

    def __init__(self, rows: list[dict[str, str]]) -> None:
        """Hold `rows`, each with the keys of `columns` and an `id`."""
        self.rows = rows

    def counts(self) -> dict[str, int]:
        """Number of claims by status, in the order of `STATUSES`."""
        found = Counter(row["status"] for row in self.rows)
        return {status: found[status] for status in STATUSES}

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return "\n".join(f"{row['id']}: paper {row['paper']}, here {row['here']}, {row['status']}" for row in self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in self.columns)
        body = "\n".join(
            f'<tr id="claim-{html.escape(row["id"])}" class="{row["status"].replace(" ", "-")}">'
            + "".join(f"<td>{html.escape(row[column])}</td>" for column in self.columns)
            + "</tr>"
            for row in self.rows
        )
        return f'<div class="ledger"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def table(ids: Iterable[str] | None = None) -> Table:
    """The scorecard: the claims called `ids` (default: all of the paper's), each with its measurement if it has one."""
    chosen = claims() if ids is None else [claim(id) for id in ids]
    found = measurements()
    return Table([_row(entry, found.get(entry.id)) for entry in chosen])


def _row(entry: Claim, result: Measurement | None) -> dict[str, str]:
    row = {"id": entry.id, "where": entry.where, "claim": entry.claim, "paper": _text(entry.value)}
    if result is None:
        return row | {"here": "", "interval": "", "status": "not measured", "note": ""}
    note = result.note
    if result.status == "known discrepancy":
        note = f"{note} (reading note {entry.reading_note})".strip()
    interval = "" if result.interval is None else "[" + ", ".join(map(_text, result.interval)) + "]"
    return row | {"here": _text(result.measured), "interval": interval, "status": result.status, "note": note}


def _text(value: Any) -> str:
    """A value for a table cell: at most six significant digits, yes and no for booleans."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_text, value))
    return str(value)
