"""Gates: what a profile may need, of which machine and work, and what a baseline file must survive."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.gate.baseline import run_gate
from harness.report.profile import profile_document
from harness.results.gate import GateVerdict
from harness.results.profile import ProfileResult

from ..report.profile_examples import phase, profile

NO_PHASES = '{"entries": [{"key": {"steps": "prefill=1"}, "phases": {}}]}'


def folder(path: Path, result: ProfileResult) -> Path:
    """Write a profile as `harness profile` does."""
    path.mkdir(exist_ok=True)
    environment = (("torch", "2.13.0"), ("python", "3.11.7"), ("machine", "x86_64"))
    document = profile_document(replace(result, environment=environment))
    (path / "profile.json").write_text(json.dumps(document))
    return path


def changed(**fields: Any) -> ProfileResult:
    return profile(replace(phase(), **fields))


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """A baseline that the example's profile has become."""
    path = tmp_path / "baselines" / "tiny.json"
    assert run_gate(folder(tmp_path / "old", profile()), path, accept=True).verdict is GateVerdict.ACCEPTED
    return path


def test_the_same_needs_pass(tmp_path: Path, baseline: Path) -> None:
    result = run_gate(folder(tmp_path / "new", profile()), baseline)
    assert (result.verdict, result.changes) == (GateVerdict.PASS, ())


@pytest.mark.parametrize(
    ("field", "after", "verdict"),
    [
        ("peak_bytes", 4 << 20, GateVerdict.PASS),
        ("peak_bytes", int((4 << 20) * 1.004), GateVerdict.PASS),
        ("peak_bytes", int((4 << 20) * 1.006), GateVerdict.REGRESSION),
        ("peak_bytes", int((4 << 20) * 0.99), GateVerdict.IMPROVED),
        ("flops_measured", int(1.01 * 10**8), GateVerdict.REGRESSION),
        ("num_python_calls", 271, GateVerdict.REGRESSION),
        ("num_python_calls", 269, GateVerdict.IMPROVED),
    ],
)
def test_counts_are_exact_and_amounts_nearly(
    tmp_path: Path, baseline: Path, field: str, after: int, verdict: GateVerdict
) -> None:
    assert run_gate(folder(tmp_path / "new", changed(**{field: after})), baseline).verdict is verdict


def test_one_more_operator_is_named_with_phase_and_operation(tmp_path: Path, baseline: Path) -> None:
    (count,) = phase().counts
    copy = replace(count, operator="aten::copy_", count=1, flops=0, bytes_moved=0, bytes_allocated=0)
    result = run_gate(folder(tmp_path / "new", changed(counts=(count, copy))), baseline)
    (change,) = result.changes
    assert (change.phase, change.operation, change.measure) == ("prefill", "attention", "aten::copy_")
    assert (change.before, change.after, change.is_regression) == (0, 1, True)


def test_times_are_no_part_of_it(tmp_path: Path, baseline: Path) -> None:
    assert run_gate(folder(tmp_path / "new", changed(wall_ms=900.0)), baseline).verdict is GateVerdict.PASS


def test_other_work_is_refused_and_named(tmp_path: Path, baseline: Path) -> None:
    with pytest.raises(HarnessError) as caught:
        run_gate(folder(tmp_path / "new", replace(profile(), batch_size=4)), baseline, command="type this")
    assert caught.value.code is Code.OTHER_BASELINE
    assert (caught.value.expected, caught.value.actual) == ("batch_size: 4", "batch_size: 1")
    assert "type this" in str(caught.value)


def test_accepting_other_work_keeps_what_is_there(tmp_path: Path, baseline: Path) -> None:
    larger = folder(tmp_path / "new", replace(profile(), batch_size=4))
    assert run_gate(larger, baseline, accept=True).changes == ()
    assert run_gate(larger, baseline).verdict is GateVerdict.PASS
    assert run_gate(folder(tmp_path / "old", profile()), baseline).verdict is GateVerdict.PASS


def test_accepting_shows_what_changes(tmp_path: Path, baseline: Path) -> None:
    result = run_gate(folder(tmp_path / "new", changed(num_python_calls=300)), baseline, accept=True)
    (change,) = result.changes
    assert (change.measure, change.before, change.after) == ("num_python_calls", 270, 300)
    assert run_gate(tmp_path / "new", baseline).verdict is GateVerdict.PASS


def test_without_a_baseline_nothing_passes(tmp_path: Path) -> None:
    with pytest.raises(HarnessError) as caught:
        run_gate(folder(tmp_path / "new", profile()), tmp_path / "none.json")
    assert caught.value.code is Code.BASELINE_MISSING


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path, baseline: Path) -> None:
    sizes = range(2, 10)
    profiles = [folder(tmp_path / f"new{size}", replace(profile(), batch_size=size)) for size in sizes]
    with ThreadPoolExecutor(len(profiles)) as threads:
        list(threads.map(lambda path: run_gate(path, baseline, accept=True), profiles))
    assert all(run_gate(path, baseline).verdict is GateVerdict.PASS for path in profiles)
    assert [path.name for path in baseline.parent.iterdir()] == [baseline.name]


def test_where_nothing_can_be_written_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError) as caught:
        run_gate(folder(tmp_path / "new", profile()), tmp_path / "file" / "baseline.json", accept=True)
    assert caught.value.code is Code.CANNOT_WRITE


@pytest.mark.parametrize(
    ("text", "accept"),
    [
        (text, accept)
        for text in ("", "{", '{"schema_version": 2}', '{"entries": [{"key": {}}]}', NO_PHASES)
        for accept in (False, True)
    ],
)
def test_a_damaged_baseline_stays_as_it_is(tmp_path: Path, baseline: Path, text: str, accept: bool) -> None:
    baseline.write_text(text)
    with pytest.raises(HarnessError) as caught:
        run_gate(folder(tmp_path / "new", profile()), baseline, accept=accept)
    assert caught.value.code is Code.BAD_BASELINE
    assert baseline.read_text() == text


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"environment": {"python": "3"}, "phases": [7]}'])
def test_what_is_no_profile(tmp_path: Path, baseline: Path, text: str | None) -> None:
    (tmp_path / "new").mkdir()
    if text is not None:
        (tmp_path / "new" / "profile.json").write_text(text)
    with pytest.raises(HarnessError) as caught:
        run_gate(tmp_path / "new", baseline)
    assert caught.value.code is Code.BAD_PROFILE
