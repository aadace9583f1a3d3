"""How far a profile is, and what is said of it where there is no terminal."""

from types import SimpleNamespace

import pytest

from harness.command import progress
from harness.profiling.load import CaptureSchedule, dry_run, window
from harness.profiling.timing import ProfileProgress, plan_parts


def test_the_parts_of_a_profile_go_on_from_one_to_the_next():
    told = []
    estimate = ProfileProgress(lambda *said: told.append(said), {"a": 1.0, "b": 3.0})
    estimate.begin("a")
    estimate.part_done(0.5)
    estimate.begin("b")
    estimate.part_done(1.0)
    assert told == [
        ("profile: a", 0, 4000), ("profile: a", 500, 4000), ("profile: b", 1000, 4000), ("profile: b", 4000, 4000)
    ]  # fmt: skip


def test_each_pass_of_each_phase_is_a_part(reference, load):
    steps = dry_run(reference, load)
    windows = [window(phase, load, steps, CaptureSchedule()) for phase in ("prefill", "decode")]
    parts = plan_parts(windows, {load: 10.0}, 5)
    assert parts["timing 0"] == 50
    for name in ("trace", "memory", "counters"):
        assert parts[f"prefill, {name}"] > 0
        assert 0 < parts[f"decode, {name}"] <= 4 * 10
    assert parts["prefill, trace"] == 3 * 1.5 / 2 * parts["prefill, memory"], "three whole runs"


def lines_at(monkeypatch, *told):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    lines = progress.Lines()
    for now, label, done in told:
        clock.now = now
        lines(label, done, 8)


def test_where_there_is_no_terminal_a_line_is_written_now_and_then(monkeypatch, capsys):
    told = [(1, "profile: trace", 0), (10, "profile: trace", 1), (21, "profile: trace", 2), (30, "profile: trace", 3)]
    lines_at(monkeypatch, *told, (45, "profile: trace", 4))
    said = capsys.readouterr().err.splitlines()
    assert said == ["profile: trace: 25%, about 60 s left", "profile: trace: 50%, about 44 s left"]


@pytest.mark.parametrize(("label", "left"), [("profile: other part", 210), ("other work", 0)])
def test_only_another_work_begins_anew(monkeypatch, capsys, label, left):
    lines_at(monkeypatch, (0, "profile: part", 0), (30, label, 1))
    assert capsys.readouterr().err == f"{label}: 12%, about {left} s left\n"
