"""A suite in every form: the counts, each cell with its first divergence, and nothing from outside is markup."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite.report import (
    load_suite,
    matrix_of,
    suite_html,
    suite_json,
    suite_junit,
    suite_markdown,
    suite_text,
)
from harness.extensions.suite.result import CaseResult, CaseVerdict, SuiteResult

PLACE = {
    "tap": "model.layers.1.self_attn.q_proj", "request": 0, "position": 7, "schedule": "plain", "step": 2,
    "phase": "decode", "code": "H040", "local_roundings": 12.0, "cause": "bias is left out",
}  # fmt: skip


def case(model: str, engine: str, verdict: str, **more) -> CaseResult:
    labels = {"case": "c", "model": model, "engine": engine, "dtype": "float32", "schedule": "plain"}
    return CaseResult(
        name=f"c[{model},{engine}]", verdict=CaseVerdict(verdict), labels=labels, node="n", seconds=1.0, **more
    )


@pytest.fixture
def suite() -> SuiteResult:
    return SuiteResult(
        cases=(
            case("small", "hf", "pass", figures={"kl_max": 0.25}),
            case("small", "mine", "mismatch", code="H040", first_divergence=PLACE, report="cases/x/report.html"),
            case("large", "hf", "error", code="H136", reason="its interpreter ended by signal SIGSEGV"),
            case("large", "<b>mine</b>", "lost", code="H137", reason="node died", attempts=3),
        ),
        elapsed_s=12.0,
        num_resumed=1,
        num_goldens=2,
        golden_s=3.0,
        num_workers=4,
    )


def test_the_matrix_has_models_down_and_engines_across(suite):
    matrix = matrix_of(suite.cases)
    assert (matrix.models, matrix.engines) == (("small", "large"), ("hf", "mine", "<b>mine</b>"))
    assert [[cell.counts for cell in row] for row in matrix.cells] == [
        ["1 pass", "1 mismatch", ""], ["1 error", "", "1 lost"],
    ]  # fmt: skip
    assert matrix.cells[1][1].verdict is None


def test_the_worst_case_names_the_suite(suite):
    assert suite.verdict is CaseVerdict.MISMATCH
    assert replace(suite, cases=suite.cases[2:]).verdict is CaseVerdict.ERROR
    assert replace(suite, cases=suite.cases[3:]).verdict is CaseVerdict.LOST
    assert replace(suite, cases=suite.cases[:1]).verdict is CaseVerdict.PASS


def test_the_text_has_counts_matrix_and_what_did_not_pass(suite):
    text = suite_text(suite, width=100)
    assert text.startswith("MISMATCH  4 cases · 1 pass · 1 mismatch · 1 error · 1 lost\n")
    assert "c[small,mine]\n         H040: model.layers.1.self_attn.q_proj, request 0, position 7" in text
    assert "H136: its interpreter ended by signal SIGSEGV" in text
    assert "1 case had ended before" in text
    said = " ".join(text.split())
    assert (
        "environment variables, the time, files that were only listed or looked for, and those that a library" in said
    )
    assert "1 case ran more than once" in text
    assert "c[small,hf]" not in text


def test_the_json_has_one_entry_a_case_and_comes_back(suite, tmp_path):
    document = json.loads(json.dumps(suite_json(suite), allow_nan=False))
    assert document["verdict"] == "mismatch"
    assert document["counts"] == {"pass": 1, "mismatch": 1, "error": 1, "lost": 1}
    assert document["num_cases"] == len(document["cases"]) == 4
    assert document["cases"][1]["first_divergence"]["tap"] == PLACE["tap"]
    assert {"name", "verdict", "first_divergence", "node", "seconds", "attempts"} <= document["cases"][0].keys()
    (tmp_path / "suite.json").write_text(json.dumps(document))
    assert load_suite(tmp_path).cases == suite.cases
    assert load_suite(tmp_path / "suite.json").cases == suite.cases


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"schema_version": 9}', '{"schema_version": 1, "cases": 3}']
)
def test_what_is_no_suite_is_said(tmp_path, content):
    if content is not None:
        (tmp_path / "suite.json").write_text(content)
    with pytest.raises(HarnessError) as caught:
        load_suite(tmp_path)
    assert caught.value.code is Code.BAD_SUITE_RESULT


def test_the_page_links_each_cell_to_its_report_and_lets_nothing_become_markup(suite):
    page = suite_html(suite)
    assert '<a href="cases/x/report.html"><code>model.layers.1.self_attn.q_proj</code></a>' in page
    assert "<b>mine</b>" not in page
    assert "&lt;b&gt;mine&lt;/b&gt;" in page
    assert "bias is left out" in page
    assert not re.search(r"https?://|<script", page)


def test_the_markdown_escapes_names_and_links_reports(suite):
    text = suite_markdown(suite)
    assert "](cases/x/report.html)" in text
    assert "<b>" not in text
    assert "1 mismatch<br>model.layers.1.self\\_attn.q\\_proj" in text


def test_the_junit_file_has_a_failure_for_what_is_wrong_and_an_error_for_what_was_not_checked(suite):
    root = ElementTree.fromstring(suite_junit(suite))
    testsuite = root.find("testsuite")
    assert (testsuite.get("tests"), testsuite.get("failures"), testsuite.get("errors")) == ("4", "1", "2")
    kinds = [[child.tag for child in test if child.tag != "properties"] for test in testsuite]
    assert kinds == [[], ["failure"], ["error"], ["error"]]
    assert "q_proj" in testsuite[1].find("failure").get("message")
