"""The ledger says what was measured, refuses what cannot be compared, and is green for nothing else."""

import dataclasses
import json
import math

import numpy as np
import pytest

from memorization import ledger


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORIZATION_CACHE", str(tmp_path))
    monkeypatch.setenv("MEMORIZATION_SCALE", "smoke")


def test_claims_are_complete_and_unique():
    claims = ledger.claims()
    ids = [claim.id for claim in claims]
    assert len(claims) == 326 == len(set(ids))
    assert {claim.kind for claim in claims} == {
        "closed-form", "inequality", "construction", "mechanism-experiment", "lm-experiment", "setting",
    }  # fmt: skip
    assert all(claim.where and claim.claim and claim.value is not None for claim in claims)


def test_a_claim_off_is_an_error_unless_a_reading_note_explains_it():
    with pytest.raises(AssertionError, match="lem4.4-k2-eps1"):
        ledger.check("lem4.4-k2-eps1", {"eta_2": 0.7, "tanh_1": 0.762}, atol=5e-4)
    assert "lem4.4-k2-eps1" not in ledger.measurements()
    result = ledger.check("s8.1-fig6-h-star", math.log2(math.e) + math.log2(40), atol=5e-3)
    assert result.status == "known discrepancy"
    (row,) = ledger.table(["s8.1-fig6-h-star"]).rows
    assert row["status"] == "known discrepancy" and "reading note 1" in row["note"]


@pytest.mark.parametrize(
    ("id", "measured", "options", "status"),
    [
        ("thm4.1-eta-pure", np.float64(0.5), {"expected": 0.5}, "exact"),
        ("thm4.1-bound", True, {}, "exact"),
        ("s8.1-fig6-measured-k2", 0.6312, {"atol": 1e-3}, "reproduced"),
        ("s8.1-fig6-measured-k2", 0.7, {"interval": (0.6, 0.8)}, "reproduced"),
        ("s8.1-fig6-measured-k2", 0.7, {"atol": 1e-3}, "differs"),
        ("s8.1-fig6-measured-k2", 0.7, {"shape": True}, "reproduced in shape"),
        ("s8.2-trigger-rho", 1.0, {"shape": True}, "reproduced in shape"),
        ("s8.2-trigger-rho", 0.98, {}, "reproduced in shape"),  # equal numbers, but not the paper's scale
        ("s8.2-trigger-rho", 0.1, {"shape": False}, "differs"),
        ("appF-block-size", 48, {}, "exact"),
        ("appF-block-size", 32, {}, "not run at this scale"),
    ],
)
def test_status(id, measured, options, status):
    assert ledger.check(id, measured, **options).status == status
    assert ledger.measurements()[id].status == status


def test_at_the_papers_scale_a_language_model_result_is_reproduced(monkeypatch):
    monkeypatch.setenv("MEMORIZATION_SCALE", "paper")
    assert ledger.check("s8.2-trigger-rho", 0.98).status == "reproduced"


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_agrees_with_nothing(nothing):
    with pytest.raises(AssertionError):
        ledger.check("thm4.1-eta-pure", nothing, 0.5, atol=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("thm4.1-eta-pur", 1.0), "nearest: thm4.1-eta-pure"),
        (("thm4.1-eta-pure", 0.46), "expected must be given"),
        (("thm4.1-eta-pure", 0.46, 0.46, -1.0), "atol must be"),
        (("thm4.1-eta-pure", 0.46, 0.46, 0, math.nan), "rtol must be"),
        (("thm4.1-eta-pure", 0.46, 0.46, 0, 0, (1.0, 0.0)), "interval must be"),
        (("thm4.1-eta-pure", "0.46", 0.46), "comparable"),
        (("thm4.1-eta-pure", object(), 0.46), "measured must be"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        ledger.check(*arguments)


def test_a_boolean_is_not_a_number():
    with pytest.raises(ValueError, match="comparable"):
        ledger.check("thm4.1-eta-pure", True, 1.0)
    with pytest.raises(AssertionError):
        ledger.check("thm4.1-bound", False)


def test_nothing_is_green_by_default():
    counts = ledger.table().counts()
    assert counts["not measured"] == 326 and sum(counts.values()) == 326


def test_records_of_other_code_and_damaged_ones_do_not_count(tmp_path):
    ledger.check("thm4.1-bound", True)
    ledger.check("thm4.1-eta-pure", 0.5, 0.5)
    path = tmp_path / "ledger" / "smoke" / "thm4.1-bound.json"
    record = json.loads(path.read_text())
    record["provenance"]["sources"] = "another"
    path.write_text(json.dumps(record))
    (tmp_path / "ledger" / "smoke" / "thm4.1-eta-pure.json").write_text('{"id": ')
    assert ledger.measurements() == {}
    ledger.check("thm4.1-eta-pure", 0.5, 0.5)
    assert list(ledger.measurements()) == ["thm4.1-eta-pure"]


def test_the_record_says_where_it_comes_from():
    result = ledger.check("thm4.1-eta-pure", 0.5, 0.5, seed=7, note="a note", device="cuda", corpus="toy 12ab")
    found = ledger.measurements()["thm4.1-eta-pure"]
    assert dataclasses.asdict(found) == dataclasses.asdict(result)
    assert found.provenance["seed"] == 7 and found.provenance["scale"] == "smoke"
    assert found.provenance["device"] == "cuda" and found.provenance["versions"]["numpy"] == np.__version__


def test_tables_escape_what_they_show():
    ledger.check("thm4.1-eta-pure", 0.5, 0.5, note="<b>&")
    shown = ledger.table(["thm4.1-eta-pure", "thm4.1-bound"])._repr_html_()
    assert "&lt;b&gt;&amp;" in shown and "<b>" not in shown
    assert "not measured" in shown and 'id="claim-thm4.1-bound"' in shown


def test_not_run_is_recorded_with_its_reason():
    assert ledger.not_run("appF-lm-hardware", "no GPU here").status == "not run at this scale"
    (row,) = ledger.table(["appF-lm-hardware"]).rows
    assert row["status"] == "not run at this scale" and row["note"] == "no GPU here"
