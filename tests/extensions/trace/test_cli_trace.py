"""`harness trace`: summaries and differences of chrome traces, ours or not."""

import csv
import gzip
import json
from io import StringIO

import pytest

from harness.cli.main import run


def event(name, category, begin, duration, *, thread=1):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": duration, "args": {}}


def trace(path, num_adds, *, compressed=False):
    """A prefill step of 100 us with one product of 60 us that holds a copy of 20 us, and additions of 5 us."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        event("prefill[bs=1 toks=8 kv=0]", "user_annotation", 0, 100),
        event("aten::mm", "cpu_op", 10, 60),
        event("aten::copy_", "cpu_op", 20, 20),
        *(event("aten::add", "cpu_op", 70 + 6 * index, 5) for index in range(num_adds)),
    ]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    return str(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_self_time_is_without_what_lies_inside(tmp_path, capsys, compressed):
    path = trace(tmp_path / ("t.json.gz" if compressed else "t.json"), 2, compressed=compressed)
    assert run(["trace", "summary", path, "--format", "json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    (file,) = summary["files"]
    operators = {row["name"]: row for row in file["operators"]}
    assert operators["aten::mm"]["phase"] == "prefill"
    assert (operators["aten::mm"]["count"], operators["aten::mm"]["total_us"], operators["aten::mm"]["self_us"]) == (
        1,
        60,
        40,
    )
    assert (operators["aten::add"]["count"], operators["aten::add"]["self_us"]) == (2, 10)
    assert file["path"] == path
    assert (file["num_events"], file["duration_us"]) == (6, 100)
    assert {"phases", "operators"} <= file.keys()
    assert operators["aten::mm"].keys() >= {"name", "phase", "count", "total_us", "self_us"}


def test_several_files_in_the_order_given(harness, tmp_path):
    paths = [trace(tmp_path / name, 1) for name in ("b.json", "a.json")]
    files = harness("trace", "summary", *paths, "--format", "json").json["files"]
    assert [file["path"] for file in files] == paths


def test_names_that_would_move_the_cursor_are_shown_harmless(harness, tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event("\x1b[2Jaten::mm\n" + "x" * 500, "cpu_op", 0, 1)]}))
    ran = harness("trace", "summary", path)
    assert ran.status == 0
    assert "\x1b" not in ran.out
    assert max(map(len, ran.out.splitlines()[2:])) < 120


def test_what_changed_is_listed_the_largest_first(tmp_path, capsys):
    before, after = trace(tmp_path / "a.json", 1), trace(tmp_path / "b.json", 4)
    assert run(["trace", "diff", before, after, "--format", "json"]) == 0
    (change, *others) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["name"], change["count_before"], change["count_after"]) == ("aten::add", 1, 4)
    assert (change["self_us_before"], change["self_us_after"]) == (5, 20)
    assert "aten::mm" not in [item["name"] for item in others]
    assert change["phase"] == "prefill"


def test_a_diff_of_a_trace_with_itself_says_so(harness, tmp_path):
    path = trace(tmp_path / "a.json", 2)
    assert harness("trace", "diff", path, path, "--format", "json").json["changes"] == []
    ran = harness("trace", "diff", path, path)
    assert ran.status == 0
    assert "every operator runs as often as before" in ran.out


BAD = {
    "not there": (None, "H070"),
    "cut off": (b'{"traceEvents": [{"ph": "X"', "H071"),
    "cut off.gz": (gzip.compress(b'{"traceEvents": []}')[:-9], "H071"),
    "no JSON": (b"hello", "H072"),
    "gzip in name only.gz": (b"{}", "H073"),
    "no events": (b'{"schemaVersion": 1}', "H074"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_said_with_a_code(harness, tmp_path, name):
    content, code = BAD[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    whole = trace(tmp_path / "whole.json", 1)
    for ran in (harness("trace", "summary", path), harness("trace", "diff", whole, path)):
        assert ran.status == 2
        assert ran.err.startswith(f"{code}: ")
        assert str(path) in ran.err
        assert not ran.out


def test_a_folder_is_no_trace(harness, tmp_path):
    ran = harness("trace", "summary", tmp_path)
    assert ran.status == 2
    assert ran.err.startswith("H070")


def test_a_folder_of_ranks_and_a_pattern_for_phases(harness, tmp_path):
    from ...unit.profiling.cuda_trace import write_ranks

    write_ranks(tmp_path / "ranks")
    told = harness("trace", "summary", tmp_path / "ranks")
    assert told.status == 0
    assert "hidden" in told.out
    assert "Linear" in told.out
    ran = harness("trace", "summary", tmp_path / "ranks", "--phase-pattern", "Linear", "--format", "json")
    assert [file["rank"] for file in ran.json["files"]] == [0, 1]
    assert [file["phases"][0]["name"] for file in ran.json["files"]] == ["Linear", "Linear"]
    unmatched = harness("trace", "summary", tmp_path / "ranks", "--phase-pattern", "Lniear")
    assert (unmatched.status, unmatched.err[:4], unmatched.out) == (2, "H013", "")


def test_a_pattern_that_is_none_and_a_folder_without_traces_are_refused(harness, tmp_path):
    bad = harness("trace", "summary", tmp_path / "x.json", "--phase-pattern", "(")
    assert (bad.status, bad.err[:4]) == (2, "H013")
    empty = harness("trace", "summary", tmp_path)
    assert (empty.status, empty.err[:4]) == (2, "H070")
    assert "the folder holds no trace" in empty.err


def test_the_critical_path_adds_up_and_says_of_what(harness, tmp_path):
    path = trace(tmp_path / "t.json", 2)
    shown = harness("trace", "critical-path", path, "--within", "^prefill", "--format", "json").json
    (path_document,) = shown["files"]
    assert path_document["total_us"] == 100
    links = {(link["kind"], link["name"]): link["total_us"] for link in path_document["links"]}
    assert links == {
        ("operator", "aten::mm"): 40, ("operator", "aten::copy_"): 20, ("operator", "aten::add"): 10,
        ("host", ""): 20, ("unknown", ""): 10,
    }  # fmt: skip
    told = harness("trace", "critical-path", path)
    assert told.status == 0
    assert "aten::copy_" in told.out
    refused = harness("trace", "critical-path", path, "--within", "nothing")
    assert refused.status == 2
    assert "0 events match the step" in refused.err


def test_operators_and_changes_are_rows_of_csv(tmp_path, capsys):
    paths = [trace(tmp_path / f"{num}.json", num) for num in (2, 3)]
    assert run(["trace", "summary", paths[0], "--format", "csv"]) == 0
    rows = {row["name"]: row for row in csv.DictReader(StringIO(capsys.readouterr().out))}
    assert (rows["aten::add"]["path"], rows["aten::add"]["phase"], rows["aten::add"]["count"]) == (
        paths[0],
        "prefill",
        "2",
    )
    assert float(rows["aten::mm"]["self_us"]) == 40
    assert run(["trace", "diff", *paths, "--format", "csv"]) == 0
    (row,) = (row for row in csv.DictReader(StringIO(capsys.readouterr().out)) if row["name"] == "aten::add")
    assert (row["count_before"], row["count_after"]) == ("2", "3")
