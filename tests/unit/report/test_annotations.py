"""Findings as GitHub and code scanning take them."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import Code
from harness.report.annotations import checks_github, checks_sarif, gate_github, gate_sarif
from harness.report.check.dtypes import DtypeChecks
from harness.results.check import Finding, TapSource
from harness.results.gate import GateChange, GateResult

from .examples import build


@pytest.fixture
def mismatch():
    result = build("mismatch")
    finding = Finding(code=Code.OUTPUT_EXISTS, message="50 %,\nwrong", tap="mlp.act")
    source = TapSource(tensor="x", code=f"{Path.cwd()}/engine/model, new.py:12")
    runs = tuple(replace(run, findings=(finding, finding)) for run in result.runs)
    return DtypeChecks(results=[replace(result, runs=runs, sources={"mlp.act": source})])


def test_a_finding_annotates_its_line_once(mismatch, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    (line,) = checks_github(mismatch).splitlines()
    assert line.startswith("::error file=engine/model%2C new.py,line=12,title=H030 OUTPUT_EXISTS::reference, ")
    assert "mlp.act: 50 %25," in line
    assert (tmp_path / "summary.md").read_text().startswith("### mismatch: reference")


def test_sarif_has_each_rule_and_place(mismatch):
    (run,) = checks_sarif(mismatch)["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["H030"]
    (result,) = run["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("engine/model, new.py", 12)


def test_a_pass_is_a_notice_and_nothing_checked_is_an_error(monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    passed = DtypeChecks(results=[build("pass")])
    assert checks_github(passed).startswith("::notice::pass: reference")
    assert checks_sarif(passed)["runs"][0]["results"] == []
    nothing = DtypeChecks(results=[replace(build("pass"), schedules_not_run=("chunked",))])
    assert "H051" in checks_github(nothing)
    assert [row["ruleId"] for row in checks_sarif(nothing)["runs"][0]["results"]] == ["H051"]


def test_a_gate_names_what_needs_more(monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    change = GateChange(phase="decode", operation="mlp", measure="aten::copy_", before=3, after=5, places=("a.b.C.f",))
    key = dict.fromkeys(("engine", "model", "dtype", "device"), "x")
    result = GateResult(key=key, changes=(change, replace(change, before=9)))
    (line,) = gate_github(result).splitlines()
    assert line.endswith("decode mlp aten::copy_: 3 -> 5, in a.b.C.f")
    assert len(gate_sarif(result)["runs"][0]["results"]) == 1
    assert gate_sarif(replace(result, is_accepted=True))["runs"][0]["results"] == []
