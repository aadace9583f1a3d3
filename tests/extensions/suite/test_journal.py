"""The journal: what was done is known after a driver's end, also one in the middle of a line."""

import json

import pytest

from harness.base.files_read import file_digest
from harness.errors import Code, HarnessError
from harness.extensions.suite.journal import Journal
from harness.extensions.suite.result import CaseResult, CaseVerdict
from harness.extensions.suite.task import StoredGolden


def result(name: str, verdict: CaseVerdict = CaseVerdict.PASS) -> CaseResult:
    return CaseResult(name=name, verdict=verdict, labels={"model": "m"}, figures={"kl_max": 0.5}, seconds=1.5)


@pytest.fixture
def journal(tmp_path, make_case):
    begun = Journal.begin(tmp_path)
    for name in ("a", "b"):
        begun.add_case(make_case(name), result(name), {})
    begun.add_golden("digest", [StoredGolden(name="n", index="i")], 2.0)
    begun.close()
    return begun.path


def test_what_was_written_comes_back(journal, make_case):
    again = Journal.resume(journal.parent)
    assert again.result_of(make_case("a")) == result("a")
    assert again.goldens == {"digest": (StoredGolden(name="n", index="i"),)}


def test_a_line_that_was_cut_off_is_not_there_and_spoils_none_behind_it(journal, make_case):
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    again = Journal.resume(journal.parent)
    assert again.result_of(make_case("a")) is not None
    assert again.result_of(make_case("b")) is None
    again.add_case(make_case("b"), result("b"), {})
    again.close()
    assert Journal.resume(journal.parent).result_of(make_case("b")) == result("b")


def test_a_lost_case_is_not_done_and_a_later_result_counts(journal, make_case):
    again = Journal.resume(journal.parent)
    again.add_case(make_case("c"), result("c", CaseVerdict.LOST), {})
    assert again.result_of(make_case("c")) is None
    again.add_case(make_case("c"), result("c"), {})
    again.close()
    assert Journal.resume(journal.parent).result_of(make_case("c")) == result("c")


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda file: None, True),
        (lambda file: file.write_text("WRONG = 1"), False),
        (lambda file: file.unlink(), False),
    ],
    ids=["nothing", "changed", "gone"],
)
def test_a_result_is_kept_while_the_files_that_were_read_are_the_same(journal, make_case, tmp_path, change, is_kept):
    module = tmp_path / "engine.py"
    module.write_text("WRONG = 0")
    again = Journal.resume(journal.parent)
    again.add_case(make_case("c"), result("c"), {str(module): file_digest(str(module))})
    again.close()
    change(module)
    assert (Journal.resume(journal.parent).result_of(make_case("c")) is not None) == is_kept


def test_a_suite_of_other_versions_is_not_gone_on_with(journal):
    lines = journal.read_text().splitlines()
    head = json.loads(lines[0])
    head["versions"]["torch"] = "1.0"
    journal.write_text("\n".join([json.dumps(head), *lines[1:]]))
    with pytest.raises(HarnessError) as caught:
        Journal.resume(journal.parent)
    assert caught.value.code is Code.BAD_SUITE_RESULT
    assert caught.value.actual["torch"] == "1.0"


def test_a_suite_that_still_runs_is_not_gone_on_with(journal):
    running = Journal.resume(journal.parent)
    with pytest.raises(HarnessError, match="another process runs the suite in this folder") as caught:
        Journal.resume(journal.parent)
    assert caught.value.code is Code.BAD_SUITE_RESULT
    running.close()
    Journal.resume(journal.parent).close()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\n", b'{"record": "suite", "schema_version": 9}'])
def test_what_is_no_journal_is_said(tmp_path, content):
    if content is not None:
        (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(HarnessError) as caught:
        Journal.resume(tmp_path)
    assert caught.value.code is Code.BAD_SUITE_RESULT
