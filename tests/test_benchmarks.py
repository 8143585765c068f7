"""The benchmarks at a tiny size: both ways agree, a disagreement is caught, the table says what was measured.

No test asserts a time.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from memorization import _comparisons, benchmarks, pocket  # noqa: E402

NAMES = ["scores: score", "scores: text", "shadows", "stacking", "certification", "extraction"]


@pytest.fixture(scope="module", params=pocket.FAMILIES)
def comparisons(request, tmp_path_factory):
    """Every comparison of a family, stacking on the CPU, with what each way found."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MEMORIZATION_CACHE", str(tmp_path_factory.mktemp("cache")))
    made = [
        comparison
        for name, make in _comparisons.BENCHMARKS.items()
        for comparison in make(_comparisons.TINY, request.param, **({"device": "cpu"} if name == "stacking" else {}))
    ]
    patch.undo()
    return {name: (each, each.ours(), each.theirs()) for name, each in zip(NAMES, made, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_agree(comparisons, name):
    comparison, ours, theirs = comparisons[name]
    comparison.agree(ours, theirs)
    assert comparison.flops > 0 and comparison.traffic > 0 and comparison.target >= 2


def off_by_a_little(result):
    """The result with its last number moved by 0.1, or its last token by one."""
    if isinstance(result, dict):
        name = sorted(result)[-1]
        return {**result, name: off_by_a_little(result[name])}
    moved = np.array(result)
    moved.flat[-1] += 1 if np.issubdtype(moved.dtype, np.integer) else 0.1
    return moved


@pytest.mark.parametrize("name", NAMES)
def test_a_disagreement_is_caught_before_anything_is_timed(comparisons, name):
    comparison, ours, theirs = comparisons[name]
    calls = []

    def ours_again():
        calls.append("ours")
        return ours

    wrong = dataclasses.replace(comparison, ours=ours_again, theirs=lambda: off_by_a_little(theirs))
    with pytest.raises(AssertionError):
        benchmarks.run(wrong, repeats=3)
    assert calls == ["ours"]


def test_a_search_that_does_not_close_is_caught(comparisons):
    comparison, ours, theirs = comparisons["certification"]
    with pytest.raises(AssertionError, match="did not close"):
        comparison.agree([(mass, False) for mass, _ in ours], theirs)


def test_scores_are_all_the_scores_of_the_package(comparisons):
    _, ours, theirs = comparisons["scores: score"]
    assert set(ours) == set(theirs) == set(_comparisons.SCORES)


def test_the_floor_counts_matrix_products():
    model = torch.nn.Linear(5, 7, bias=False)
    model.register_forward_hook(lambda *_: None)

    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return Output(self.inner(x))

    whole = Model()
    made = _comparisons.Comparison("", lambda: [whole(torch.ones(3, 5)) for _ in range(4)], None, None, 1.0)
    counted = _comparisons._with_work(made, whole)
    assert counted.flops == 4 * 2 * 3 * 5 * 7
    assert counted.traffic == 4 * 4 * (5 * 7 + 2 * 3 * 7)  # bytes: weights once, logits out and in
    whole(torch.ones(1, 5))
    assert not whole._forward_hooks


def test_run_takes_turns_and_counts_repeats():
    calls = []
    comparison = _comparisons.Comparison(
        "x", lambda: calls.append("ours"), lambda: calls.append("theirs"), lambda *_: calls.append("agree"), 2.0
    )
    result = benchmarks.run(comparison, repeats=3)
    assert calls == ["ours", "theirs", "agree", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert len(result.ours) == len(result.theirs) == len(result.ratios) == 3
    with pytest.raises(ValueError, match="repeats"):
        benchmarks.run(comparison, repeats=0)


def test_table_gives_medians_range_and_the_nearer_limit():
    comparison = _comparisons.Comparison("bread", None, None, None, target=3.0, flops=6e9, traffic=1e9)
    result = benchmarks.Result(comparison, ours=(1.0, 2.0, 4.0), theirs=(5.0, 8.0, 8.0))
    assert result.ratios == (5.0, 4.0, 2.0)
    head, by_arithmetic = benchmarks.table([result], {"cpu": (6e9, 4e9)}).splitlines()
    assert by_arithmetic.split() == "bread 2.000s 8.000s 4.0x 2.0 to 5.0 3x 3.0 1.000s 50% arithmetic".split()
    by_memory = benchmarks.table([result], {"cpu": (60e9, 1e9)}).splitlines()[1]
    assert by_memory.split()[-3:] == ["1.000s", "50%", "memory"]
    assert len(head) >= len(by_arithmetic) - len("arithmetic")
    elsewhere = dataclasses.replace(result, comparison=dataclasses.replace(comparison, device="cuda"))
    assert "25%" in benchmarks.table([elsewhere], {"cpu": (6e9, 4e9), "cuda": (12e9, 8e9)})


def test_the_machine_is_measured():
    assert 1e8 < benchmarks.peak_flops(repeats=2) < 1e15
    assert 1e7 < benchmarks.memory_bandwidth(repeats=2) < 1e14
    assert f"torch {torch.__version__}" in benchmarks.machine()


@pytest.fixture
def threads():
    """The command line sets torch's threads; put them back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_command_line_prints_the_table(capsys, threads):
    benchmarks.main(["extraction", "certification", "--size", "tiny", "--repeats", "1", "--threads", str(threads)])
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if "generate" in line or "a node" in line]
    assert len(rows) == 2 and rows[0].startswith("extraction, 3 prompts: generate, one by one")
    assert rows[1].split()[-1] in ("arithmetic", "memory") and "GFLOP/s" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="stacking runs here")
def test_stacking_is_skipped_with_a_line_where_there_is_no_gpu(capsys, threads):
    benchmarks.main(["stacking", "--threads", str(threads)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("stacking: skipped") and "CUDA" in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scroes"], "name must be one of scores, shadows, stacking, certification, extraction, got 'scroes'"),
        (["scores", "--family", "gpt"], "gpt"),
        (["--repeats", "0"], "repeats must be"),
        (["--threads", "0"], "threads must be"),
    ],
)
def test_command_line_refuses_what_it_does_not_know(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmarks.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
