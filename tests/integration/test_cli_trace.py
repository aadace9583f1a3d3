"""`harness trace`: summaries and differences of chrome traces, ours or not."""

import gzip
import json

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


def test_what_changed_is_listed_the_largest_first(tmp_path, capsys):
    before, after = trace(tmp_path / "a.json", 1), trace(tmp_path / "b.json", 4)
    assert run(["trace", "diff", before, after, "--format", "json"]) == 0
    (change, *others) = json.loads(capsys.readouterr().out)["changes"]
    assert (change["name"], change["count_before"], change["count_after"]) == ("aten::add", 1, 4)
    assert (change["self_us_before"], change["self_us_after"]) == (5, 20)
    assert "aten::mm" not in [other["name"] for other in others]


BAD = {
    "not there": None,
    "no JSON": b"hello",
    "cut off": b'{"traceEvents": [{"ph": "X"',
    "gzip in name only": b"{}",
    "no events": b'{"schemaVersion": 1}',
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_said_with_a_code(tmp_path, capsys, name):
    path = tmp_path / ("t.json.gz" if "gzip" in name else "t.json")
    if BAD[name] is not None:
        path.write_bytes(BAD[name])
    assert run(["trace", "summary", str(path)]) == 2
    assert capsys.readouterr().err.startswith("H07")
