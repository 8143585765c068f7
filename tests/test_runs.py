from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from memorization import _fingerprint, _store, bounds, runs, stats

CALLS: list[dict] = []  # by this test module only; `calls` below hides it from the fingerprint


def _record(**configuration):
    sys.modules[__name__].CALLS.append(configuration)


@pytest.fixture(autouse=True)
def fresh_calls():
    CALLS.clear()
    yield


def square(x, scale=1.0):
    _record(x=x, scale=scale)
    return {"value": x * x * scale, "row": np.arange(x), "pair": (x, None)}


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


# ------------------------------------------------------------------------------------------------------- results


def test_results_are_kept_in_order_and_each_is_made_once(tmp_path):
    configurations = [{"x": 3}, {"x": 1}, {"x": 3}, {"x": 2, "scale": 0.5}]
    first = runs.run(square, configurations, cache=tmp_path)
    assert [result["value"] for result in first] == [9.0, 1.0, 9.0, 2.0]
    assert len(CALLS) == 3  # the repeated configuration ran once
    again = runs.run(square, configurations[::-1], cache=tmp_path)
    assert [result["value"] for result in again] == [2.0, 9.0, 1.0, 9.0]
    assert len(CALLS) == 3
    assert len(entries(tmp_path)) == 3


def test_without_a_cache_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path))
    runs.run(square, [{"x": 2}], cache=False)
    runs.run(square, [{"x": 2}], cache=False)
    assert len(CALLS) == 2
    assert not entries(tmp_path)
    runs.run(square, [{"x": 2}])
    assert entries(tmp_path / "runs")


def everything():
    tied = torch.arange(6.0).reshape(2, 3)
    return {
        "half": 0.1 + 0.2,
        "infinite": -np.inf,
        "nan": float("nan"),
        "count": np.int64(7),
        "flag": np.bool_(True),
        "text": "ε",
        "nothing": None,
        "nested": [{"array": np.array([[1.5, np.nan]], dtype=np.float32)}, (1, 2)],
        "names": np.array(["a", "bc"]),
        "scalar array": np.array(3.0),
        "state": {"a": tied, "b": tied, "bf16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "t": tied.T},
    }


def test_every_kind_of_result_comes_back_the_same_made_or_kept(tmp_path):
    made = runs.run(everything, [{}], cache=tmp_path)[0]
    kept = runs.run(everything, [{}], cache=tmp_path)[0]
    for result in (made, kept):
        assert result["half"] == 0.1 + 0.2 and result["infinite"] == -np.inf and result["nan"] != result["nan"]
        assert type(result["count"]) is int and result["flag"] is True and result["text"] == "ε"
        assert result["nothing"] is None
        assert result["nested"][1] == [1, 2]
        assert result["nested"][0]["array"].dtype == np.float32
        np.testing.assert_array_equal(result["nested"][0]["array"], [[1.5, np.nan]])
        np.testing.assert_array_equal(result["names"], ["a", "bc"])
        assert result["scalar array"].shape == ()
        assert torch.equal(result["state"]["a"], torch.arange(6.0).reshape(2, 3))
        assert torch.equal(result["state"]["t"], torch.arange(6.0).reshape(2, 3).T)
        assert result["state"]["bf16"].dtype == torch.bfloat16
    (entry,) = entries(tmp_path)
    assert {file.suffix for file in entry.iterdir()} == {".json", ".npz", ".safetensors"}


@pytest.mark.parametrize(
    "configuration", [{"x": np.arange(3)}, {"x": {1: 2}}, {"x": object()}, {"x": {2, 3}}, {"x": b"a"}, [("x", 1)]]
)
def test_configurations_that_json_cannot_hold_are_refused(tmp_path, configuration):
    with pytest.raises(ValueError, match=r"configurations\[0\]"):
        runs.run(square, [configuration], cache=tmp_path)


def test_numpy_scalars_and_tuples_in_a_configuration_are_the_plain_values(tmp_path):
    runs.run(square, [{"x": np.int32(3), "scale": np.float64(0.5)}], cache=tmp_path)
    assert type(CALLS[0]["x"]) is int and type(CALLS[0]["scale"]) is float
    runs.run(square, [{"x": 3, "scale": 0.5}], cache=tmp_path)
    assert len(CALLS) == 1


@pytest.mark.parametrize("result", [{1: 2}, {"a": object()}, {"a": np.array([None])}, {"__array__": 1}, {"a": {1}}])
def test_results_that_cannot_be_kept_are_refused(tmp_path, result):
    with pytest.raises(ValueError, match="result"):
        runs._pack(result)


@pytest.mark.parametrize("name, value", [("jobs", 0), ("jobs", -2), ("jobs", True), ("backend", "ssh")])
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=name):
        runs.run(square, [{"x": 1}], **{name: value})


def draw(seed, n=1):
    return {"seed": seed, "n": n}


def test_seeds_depend_on_the_configuration_and_not_on_its_place(tmp_path):
    forward = runs.run(draw, [{"n": 1}, {"n": 2}, {"seed": 5}], seed=0, cache=False)
    backward = runs.run(draw, [{"n": 3}, {"n": 2}, {"n": 1}], seed=0, cache=False)
    assert forward[0] == backward[2] and forward[1] == backward[1]
    assert forward[2]["seed"] == 5
    assert len({result["seed"] for result in forward + backward}) == 4
    assert runs.run(draw, [{"n": 1}], seed=1, cache=False)[0]["seed"] != forward[0]["seed"]


def test_the_manifest_says_where_a_result_comes_from(tmp_path):
    runs.run(square, [{"x": 2}], cache=tmp_path)
    note = json.loads((entries(tmp_path)[0] / _store.MANIFEST).read_text())
    assert note["configuration"] == {"x": 2}
    assert note["function"].endswith("square")
    assert note["versions"]["numpy"] == np.__version__
    assert set(note["files"]) == {"result.json", "arrays.npz"}


# ------------------------------------------------------------------------------------------------ what is trusted


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no manifest", "bad manifest"])
def test_a_damaged_entry_is_made_anew(tmp_path, damage):
    runs.run(square, [{"x": 4}, {"x": 5}], cache=tmp_path)
    entry = next(e for e in entries(tmp_path) if json.loads((e / "result.json").read_text())["value"] == 16.0)
    array = entry / "arrays.npz"
    if damage == "flip":
        data = bytearray(array.read_bytes())
        data[len(data) // 2] ^= 1
        array.write_bytes(data)
    elif damage == "truncate":
        (entry / "result.json").write_text("")
    elif damage == "delete":
        array.unlink()
    elif damage == "no manifest":
        (entry / _store.MANIFEST).unlink()
    else:
        (entry / _store.MANIFEST).write_text("[1]")
    CALLS.clear()
    with pytest.warns(UserWarning, match="damaged"):
        results = runs.run(square, [{"x": 4}, {"x": 5}], cache=tmp_path)
    assert [result["value"] for result in results] == [16.0, 25.0]
    assert [call["x"] for call in CALLS] == [4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.run(square, [{"x": 4}], cache=tmp_path)
    assert len(CALLS) == 1


def fails_at(x, at):
    _record(x=x)
    if x == at:
        raise ZeroDivisionError("this one")
    return {"x": x}


def test_a_failure_keeps_its_type_names_the_configuration_and_loses_nothing_made_before(tmp_path):
    configurations = [{"x": x, "at": 2} for x in range(4)]
    with pytest.raises(ZeroDivisionError) as caught:
        runs.run(fails_at, configurations, cache=tmp_path)
    if sys.version_info >= (3, 11):
        assert "'x': 2" in "".join(caught.value.__notes__)
    assert len(entries(tmp_path)) == 2
    CALLS.clear()
    runs.run(fails_at, [{"x": x, "at": 2} for x in (0, 1, 3)], cache=tmp_path)
    assert [call["x"] for call in CALLS] == [3]


def test_a_read_only_cache_serves_what_it_has_and_keeps_nothing(tmp_path, monkeypatch):
    runs.run(square, [{"x": 4}], cache=tmp_path)
    CALLS.clear()

    def refuse(self, *args, **kwargs):
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.warns(UserWarning, match="cannot be written"):
        results = runs.run(square, [{"x": 4}, {"x": 5}], cache=tmp_path)
    assert [result["value"] for result in results] == [16.0, 25.0]
    assert [call["x"] for call in CALLS] == [5]
    assert len(entries(tmp_path)) == 1


def test_an_entry_is_whole_or_absent_if_writing_fails_midway(tmp_path):
    def fill(folder):
        (folder / "a").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.warns(UserWarning, match="No space"):
        assert not _store.write(tmp_path / "entry", fill)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError):
        _store.write(tmp_path / "entry", lambda folder: (_ for _ in ()).throw(RuntimeError))
    assert list(tmp_path.iterdir()) == []


def test_old_strays_are_swept_and_young_ones_left(tmp_path):
    old, young = tmp_path / ".old-1-2", tmp_path / ".young-1-2"
    for stray in (old, young):
        stray.mkdir()
    os.utime(old, (time.time() - 2 * _store.STRAY_AFTER,) * 2)
    _store.write(tmp_path / "entry", lambda folder: (folder / "a").write_text("x"))
    assert not old.exists() and young.exists()


# ------------------------------------------------------------------------------------------- processes and kills

SLOW = """
import os, sys, time
from pathlib import Path
from memorization import runs

def slow(x, log, seconds):
    with open(log, "a") as file:
        file.write(f"{x}\\n")
    time.sleep(seconds)
    return {"x": x, "pad": [x] * 1000}

if __name__ == "__main__":
    log, seconds = sys.argv[2], float(sys.argv[3])
    made = runs.run(slow, [{"x": x, "log": log, "seconds": seconds} for x in range(12)], cache=sys.argv[1])
    assert [result["x"] for result in made] == list(range(12))
"""


def _start(tmp_path, cache, log, seconds):
    script = tmp_path / "sweep.py"
    script.write_text(SLOW)
    return subprocess.Popen([sys.executable, str(script), str(cache), str(log), str(seconds)])


def test_kill_nine_loses_at_most_the_run_in_flight(tmp_path):
    cache, log = tmp_path / "cache", tmp_path / "log"
    process = _start(tmp_path, cache, log, 0.1)
    deadline = time.monotonic() + 60
    while (not log.exists() or len(log.read_text().split()) < 5) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    started = len(log.read_text().split())
    assert 5 <= started < 12
    assert started - 1 <= len(entries(cache)) <= started
    assert _start(tmp_path, cache, log, 0.1).wait() == 0
    assert len(entries(cache)) == 12
    assert len(log.read_text().split()) <= 13  # one run was made twice at most
    assert all(_store.verified(entry) for entry in entries(cache))


def test_two_processes_at_once_leave_whole_entries(tmp_path):
    cache = tmp_path / "cache"
    processes = [_start(tmp_path, cache, tmp_path / f"log-{n}", 0.0) for n in range(2)]
    # The log's name is part of the configuration, so both write 12 of their own; a third pair shares every entry.
    assert [process.wait() for process in processes] == [0, 0]
    shared = [_start(tmp_path, cache, tmp_path / "log", 0.0) for _ in range(2)]
    assert [process.wait() for process in shared] == [0, 0]
    assert len(entries(cache)) == 36
    assert all(_store.verified(entry) for entry in entries(cache))
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def _write_many(folder, content):
    for _ in range(60):
        _store.write(Path(folder) / "entry", lambda aside: (aside / "data").write_text(content * 2000))
        if content == "a":
            with contextlib.suppress(FileNotFoundError):  # the other writer is just replacing it
                Path(folder, "entry", "data").write_text("damaged")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_writers_that_race_for_one_damaged_entry_end_with_a_whole_one(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(str(tmp_path), content)) for content in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    _store.write(tmp_path / "entry", lambda aside: (aside / "data").write_text("last"))
    assert _store.verified(tmp_path / "entry")
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def where(x):
    return {"x": x, "process": os.getpid(), "scale": os.environ.get("MEMORIZATION_SCALE")}


def test_workers_share_the_cache_and_the_switches_of_the_caller(tmp_path, monkeypatch):
    pytest.importorskip("joblib")
    monkeypatch.setenv("MEMORIZATION_SCALE", "smoke")
    made = runs.run(where, [{"x": x} for x in range(4)], cache=tmp_path, jobs=2)
    assert [result["x"] for result in made] == list(range(4))
    assert os.getpid() not in {result["process"] for result in made}
    monkeypatch.setenv("MEMORIZATION_SCALE", "pocket")  # the same workers serve again
    other = runs.run(where, [{"x": x} for x in range(4)], cache=tmp_path, jobs=2)
    assert {result["scale"] for result in made} == {"smoke"}
    assert {result["scale"] for result in other} == {"pocket"}
    assert runs.run(where, [{"x": x} for x in range(4)], cache=tmp_path) == other
    assert len(entries(tmp_path)) == 8


def test_a_failure_in_a_worker_reaches_the_caller(tmp_path):
    pytest.importorskip("joblib")
    with pytest.raises(ZeroDivisionError, match="this one"):
        runs.run(fails_at, [{"x": x, "at": 1} for x in range(3)], cache=tmp_path, jobs=2)


# -------------------------------------------------------------------------------------- what a result depends on


def define(source: str, **names) -> types.FunctionType:
    """A function `f` of a module of its own, written to no file."""
    module = types.ModuleType("reader")
    module.__dict__.update(names)
    lines = textwrap.dedent(source)
    exec(compile(lines, "<reader>", "exec"), module.__dict__)
    return module.f


def dependence(function) -> str:
    return _fingerprint.of_function(function)[0]


SOURCE = "def f(x):\n    return helper(x) + CONSTANT\n"
HELPER = "def f(x):\n    return x + {}\n"


def test_constants_helpers_arrays_and_models_seen_by_a_function_count():
    base = dependence(define(SOURCE, CONSTANT=1, helper=define(HELPER.format(1))))
    assert base == dependence(define(SOURCE, CONSTANT=1, helper=define(HELPER.format(1))))
    assert base != dependence(define(SOURCE, CONSTANT=2, helper=define(HELPER.format(1))))
    assert base != dependence(define(SOURCE, CONSTANT=1, helper=define(HELPER.format(2))))
    assert base != dependence(define(SOURCE.replace("+ C", "- C"), CONSTANT=1, helper=define(HELPER.format(1))))
    values = [np.arange(3), np.arange(3.0), np.arange(4), torch.arange(3), torch.nn.Linear(2, 1), {"a": [1]}, "x", None]
    hashes = [dependence(define(SOURCE, CONSTANT=value, helper=abs)) for value in values]
    assert len(set(hashes)) == len(values)
    model = torch.nn.Linear(2, 1)
    before = dependence(define(SOURCE, CONSTANT=model, helper=abs))
    with torch.no_grad():
        model.bias += 1
    assert dependence(define(SOURCE, CONSTANT=model, helper=abs)) != before


def test_names_that_the_function_does_not_see_do_not_count():
    function = define(SOURCE, CONSTANT=1, helper=abs, UNSEEN=object())
    assert dependence(function) == dependence(define(SOURCE, CONSTANT=1, helper=abs, UNSEEN=3))


def test_a_global_without_content_is_refused_by_name():
    function = define(SOURCE, CONSTANT=np.random.default_rng(0), helper=abs)
    with pytest.raises(ValueError, match="CONSTANT"):
        dependence(function)


def test_closures_defaults_partials_and_tables_of_functions_count():
    def outer(value):
        def inner(x, more=value):
            return x + value

        return inner

    one, two = outer(1), outer(2)
    assert dependence(one) == dependence(outer(1)) != dependence(two)
    assert dependence(functools.partial(one, more=3)) != dependence(functools.partial(one, more=4))
    table = "def f(x):\n    return TABLE[x]()\n"
    tables = [{"a": define(HELPER.format(n))} for n in (1, 2)]
    assert dependence(define(table, TABLE=tables[0])) != dependence(define(table, TABLE=tables[1]))
    lambdas = [lambda x: x + 1, lambda x: x + 2]
    assert dependence(lambdas[0]) != dependence(lambdas[1])


class Doubler:
    def __init__(self, factor):
        self.factor = factor

    @property
    def fingerprint(self):
        return str(self.factor)


def test_an_object_that_states_its_fingerprint_counts_by_it():
    calls = "def f(x):\n    return OBJECT.factor\n"
    first, second = (dependence(define(calls, OBJECT=Doubler(n))) for n in (1, 2))
    assert first != second


def test_comments_docstrings_and_layout_do_not_count():
    plain = 'def f(x):\n    return {"a": x}\n'
    dressed = 'def f(x):\n    """Says a."""\n    # why\n    return {\n        "a": x,\n    }\n'
    assert _fingerprint.normalized(plain) == _fingerprint.normalized(dressed)
    assert _fingerprint.normalized(plain) != _fingerprint.normalized(plain.replace('"a"', '"b"'))


def uses_stats(x):
    return {"auc": stats.auc([x], [0.0])}


def uses_bounds_inside(x):
    from memorization.bounds import extraction_bound

    return {"bound": extraction_bound(x, 0.1)}


def test_the_modules_of_this_package_that_a_function_reaches_count(monkeypatch):
    reached = _fingerprint._Trace()
    reached.value("function", uses_stats)
    assert "memorization.stats" in reached.modules and "memorization.bounds" not in reached.modules
    inside = _fingerprint._Trace()
    inside.value("function", uses_bounds_inside)
    assert {"memorization.bounds", "memorization.tradeoff"} <= inside.modules  # bounds imports tradeoff
    before = {f: dependence(f) for f in (square, uses_stats, uses_bounds_inside)}

    real = _fingerprint._package_module

    def edited(path, stamp):
        digest, imported = real(path, stamp)
        return (digest + "edited" if path.name == "tradeoff.py" else digest), imported

    monkeypatch.setattr(_fingerprint, "_package_module", edited)
    assert dependence(uses_bounds_inside) != before[uses_bounds_inside]
    assert dependence(uses_stats) == before[uses_stats]


def test_a_named_function_of_this_package_is_run_by_its_module(tmp_path):
    made = runs.run(bounds.k_copy_advantage, [{"epsilon": 1.0, "k": 2}], cache=tmp_path)
    assert made[0] == pytest.approx(1 - np.exp(-1.0))


def test_scale_versions_and_stated_sources_count(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMORIZATION_SCALE", "smoke")
    smoke = dependence(square)
    monkeypatch.setenv("MEMORIZATION_SCALE", "pocket")
    assert dependence(square) != smoke
    source = tmp_path / "table.txt"
    source.write_text("1")
    first = _fingerprint.of_function(square, [source])[0]
    source.write_text("2")
    assert _fingerprint.of_function(square, [source])[0] != first
    now = dependence(square)
    monkeypatch.setattr(_fingerprint.importlib.metadata, "version", lambda name: "0")
    assert dependence(square) != now


def test_an_edited_script_recomputes_and_an_edited_comment_does_not(tmp_path):
    script, log = tmp_path / "study.py", tmp_path / "log"
    code = """
        import sys
        from memorization import runs
        FACTOR = 2
        def study(x):
            open({log!r}, "a").write("ran ")
            return {{"y": FACTOR * x}}
        print(runs.run(study, [{{"x": 3}}], cache={cache!r})[0]["y"])
    """
    code = textwrap.dedent(code).format(log=str(log), cache=str(tmp_path / "cache"))
    outputs = []
    for text in (
        code,
        code,
        code.replace("def study", "# a comment\ndef study"),
        code.replace("FACTOR = 2", "FACTOR = 5"),
    ):
        script.write_text(text)
        outputs.append(subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout)
    assert [output.strip() for output in outputs] == ["6", "6", "6", "15"]
    assert log.read_text().split() == ["ran", "ran"]
