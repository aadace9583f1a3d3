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
