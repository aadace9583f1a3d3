"""`harness trace memory`: summaries and differences of snapshots, ours or not."""

import json
import pickle
import re

from harness.cli.main import run


def snapshot(path, num_bytes):
    frames = [{"filename": "engine/cache.py", "line": 3, "name": "grow"}]
    block = {
        "address": 8,
        "size": num_bytes,
        "requested_size": num_bytes,
        "state": "active_allocated",
        "frames": frames,
    }
    segment = {"device": 0, "address": 8, "total_size": num_bytes, "blocks": [block]}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}))
    return str(path)


def test_the_summary_in_both_forms(tmp_path, capsys):
    path = snapshot(tmp_path / "a.pickle", 2**20)
    assert run(["trace", "memory", path, "--format", "json"]) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert file["devices"][0]["now"][0]["place"] == "engine/cache.py:3 grow"
    assert run(["trace", "memory", path]) == 0
    assert "reserved 1.00 MiB in 1 segments" in capsys.readouterr().out


def test_the_difference_in_both_forms(tmp_path, capsys):
    paths = [snapshot(tmp_path / f"{size}.pickle", size * 2**20) for size in (1, 3)]
    assert run(["trace", "memory-diff", *paths, "--format", "json"]) == 0
    (change,) = json.loads(capsys.readouterr().out)["now"]
    assert (change["place"], change["added_bytes"]) == ("engine/cache.py:3 grow", 2 * 2**20)
    assert run(["trace", "memory-diff", *paths]) == 0
    assert "in use: +2.00 MiB" in capsys.readouterr().out


def test_the_page_has_the_timeline_and_its_stacks(tmp_path, capsys):
    path = tmp_path / "a.pickle"
    frames = [{"filename": "<b>.py", "line": at, "name": f"grow_{at}"} for at in range(2)]
    trace = [
        {"action": "alloc", "addr": 8 * at, "size": 2**20, "time_us": 10 * at, "frames": frames[at:]} for at in range(2)
    ]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    out = tmp_path / "page.html"
    assert run(["trace", "memory", str(path), snapshot(tmp_path / "b.pickle", 2**20), "--out", str(out)]) == 0
    assert "peak 2.00 MiB after 0.01 ms" in capsys.readouterr().out
    page = out.read_text()
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])
    assert [point[3] for point in data["points"]] == ["0 B", "1 MiB", "2 MiB"]
    assert [data["frames"][at] for at in data["stacks"][data["points"][1][4]]] == [
        "grow_0  <b>.py:0",
        "grow_1  <b>.py:1",
    ]
    assert "<b>" not in page
    assert page.count("data-memory>") == 1, "the other file has no history"
    assert "no history: torch.cuda.memory._record_memory_history() keeps it" in page
    assert run(["trace", "memory", str(path), "--out", str(out)]) == 2
    assert "H030" in capsys.readouterr().err


def test_what_is_no_snapshot_is_bad_input(tmp_path, capsys):
    (tmp_path / "a.pickle").write_bytes(b"nothing")
    assert run(["trace", "memory", str(tmp_path / "a.pickle")]) == 2
    assert "H066" in capsys.readouterr().err


def history(path, *events):
    """Write a history: each event is a time in us, an action, an address, MiB, and the lines of its stack."""
    trace = [
        {
            "action": action, "addr": address, "size": mib * 2**20, "time_us": time_us,
            "frames": [{"filename": "engine.py", "line": line, "name": f"f{line}"} for line in lines],
        }
        for time_us, action, address, mib, lines in events
    ]  # fmt: skip
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    return str(path)


EVENTS = [
    (1000, "alloc", 8, 4, [30, 2, 1]),
    (2000, "alloc", 16, 2, [40, 2, 1]),
    (3000, "free_completed", 8, 4, [5]),
    (4000, "alloc", 24, 1, [60, 50]),
]


def test_what_lives_at_a_time_is_a_tree_of_calls(tmp_path, capsys):
    path = history(tmp_path / "a.pickle", *EVENTS)
    assert run(["trace", "memory", path, "--at", "1.5"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["device", "0", "at", "1.500", "ms:", "6.00", "MiB", "in", "2", "blocks"]
    assert rows[3:] == [  # f1 calls nothing but f2
        ["engine.py:2", "f2", "2", "6.00"],
        ["engine.py:30", "f30", "1", "4.00"],
        ["engine.py:40", "f40", "1", "2.00"],
    ]
    assert run(["trace", "memory", path, "--at", "3", "--format", "json"]) == 0
    (moment,) = json.loads(capsys.readouterr().out)["files"]
    assert {name: child["num_bytes"] for name, child in moment["root"]["children"].items()} == {
        "engine.py:1 f1": 2 * 2**20,
        "engine.py:50 f50": 2**20,
    }


def test_a_time_outside_of_the_history_is_refused(tmp_path, capsys):
    path = history(tmp_path / "a.pickle", *EVENTS)
    for arguments in ([path, "--at", "3.1"], [path, "--at", "nan"], [snapshot(tmp_path / "b.pickle", 8), "--at", "0"]):
        assert run(["trace", "memory", *arguments]) == 2
        assert "--at" in capsys.readouterr().err


def test_small_calls_share_a_row(tmp_path, capsys):
    small = [(2000 + at, "alloc", 1000 + at, 1, [100 + at]) for at in range(3)]
    assert (
        run(["trace", "memory", history(tmp_path / "a.pickle", (1000, "alloc", 8, 400, [1]), *small), "--at", "1.002"])
        == 0
    )
    assert capsys.readouterr().out.splitlines()[-1].split() == ["3", "smaller", "calls", "3", "3.00"]
