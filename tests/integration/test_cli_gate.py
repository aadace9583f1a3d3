"""`harness gate`: from a first profile to a regression, and exit statuses on the way."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from harness.cli.main import run
from harness.profiling import profile
from harness.profiling.gate import against
from harness.profiling.gate.against import paired_ratio
from harness.profiling.gate.versions import installed_version
from harness.results.gate import Clock, PhaseTime

SMALL = ["--prompt-tokens", "16", "--max-new-tokens", "5", "--runs", "1", "--phase", "decode"]


@pytest.fixture(scope="module")
def profiled(llama, tmp_path_factory):
    """A profile of the smallest model, which nobody changes."""
    folder = tmp_path_factory.mktemp("gate") / "profile"
    small = partial(profile.measure_ceilings, num_bytes=1 << 16, matrix_size=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "measure_ceilings", small)
        assert run(["profile", "--model", str(llama), *SMALL, "--out", str(folder)]) == 0
    return folder


def fewer_sums(baseline: Path) -> None:
    """Make the baseline one of an engine that adds less often."""
    document = json.loads(baseline.read_text())
    document["entries"][0]["phases"]["decode"]["operators"]["attn_residual"]["aten::add"] -= 1
    baseline.write_text(json.dumps(document))


def test_from_the_first_profile_to_a_regression(harness, profiled, tmp_path):
    baseline = tmp_path / "baseline.json"
    missing = harness("gate", profiled, baseline)
    assert missing.status == 2
    assert missing.err.startswith("H075")
    assert "--accept" in missing.err
    assert harness("gate", profiled, baseline, "--accept").status == 0
    assert harness("gate", profiled, baseline, "--format", "json").json["verdict"] == "pass"

    fewer_sums(baseline)
    worse = harness("gate", profiled, baseline, "--format", "json")
    assert worse.status == 4
    (change,) = worse.json["changes"]
    assert (change["phase"], change["operation"], change["measure"]) == ("decode", "attn_residual", "aten::add")
    assert change["is_regression"]
    told = harness("gate", profiled, baseline)
    assert told.status == 4
    assert "H078" in told.out
    accepted = harness("gate", profiled, baseline, "--accept")
    assert accepted.status == 0
    assert "+1" in accepted.out
    assert harness("gate", profiled, baseline).status == 0


def test_a_baseline_of_another_kind_of_machine_is_refused(harness, profiled, tmp_path):
    baseline = tmp_path / "baseline.json"
    harness("gate", profiled, baseline, "--accept")
    document = json.loads(baseline.read_text())
    machine = document["entries"][0]["key"]["machine"]
    document["entries"][0]["key"]["machine"] = "sparc64"
    baseline.write_text(json.dumps(document))
    ran = harness("gate", profiled, baseline)
    assert ran.status == 2
    assert ran.err.startswith("H077")
    assert f"expected: machine: {machine}\n  actual:   machine: sparc64\n" in ran.err
    assert json.loads(baseline.read_text()) == document


@pytest.mark.parametrize(
    ("block", "verdict", "status"),
    [
        ([(1.0, 1.2, 1.2, 1.0)], "slower", 4),
        ([(1.0, 1.0, 1.0, 1.0)], "same", 0),
        ([(1.0, 1.3, 1.3, 1.0), (1.0, 0.9, 0.9, 1.0)], "inconclusive", 0),
    ],
)
@pytest.mark.parametrize("clock", Clock)
def test_text_json_and_exit_status_say_the_same(
    harness, profiled, tmp_path, monkeypatch, block, verdict, status, clock
):
    def time_against(version, document, *, length, tolerance, **_options):
        assert (version, document["engine"], length.num_blocks) == ("main", "reference", 8)
        decisive, even = paired_ratio(block * 8, tolerance=tolerance), paired_ratio([(1.0,) * 4] * 8)
        ratios = {"cpu": decisive, "wall": even} if clock is Clock.CPU else {"cpu": even, "wall": decisive}
        return {"decode": PhaseTime(clock=clock, **ratios)}

    monkeypatch.setattr(against, "time_against", time_against)
    baseline = tmp_path / "baseline.json"
    harness("gate", profiled, baseline, "--accept")
    command = ("gate", profiled, baseline, "--against", "main", "--blocks", "8")
    ran = harness(*command)
    assert ran.status == status
    assert ran.out.splitlines()[-1].split()[-1] == verdict
    assert ran.out.startswith("REGRESSION" if status else "PASS")
    assert f"time: {verdict}" in ran.out
    shown = harness(*command, "--format", "json")
    assert shown.status == status
    assert shown.json["verdict"] == ("regression" if status else "pass")
    assert shown.json["subjects"]["time"] == shown.json["times"]["decode"]["verdict"] == verdict
    assert shown.json["times"]["decode"]["clock"] == clock


def test_accepting_is_refused_in_continuous_integration(harness, profiled, tmp_path, monkeypatch):
    monkeypatch.setenv("CI", "true")
    ran = harness("gate", profiled, tmp_path / "baseline.json", "--accept")
    assert ran.status == 2
    assert ran.err.startswith("H034")
    assert not (tmp_path / "baseline.json").exists()


def test_a_revision_that_is_not_there_is_refused(harness, profiled, tmp_path):
    baseline = tmp_path / "baseline.json"
    harness("gate", profiled, baseline, "--accept")
    ran = harness("gate", profiled, baseline, "--against", "no-such-revision")
    assert ran.status == 2
    assert "--against" in ran.err


def test_what_changes_is_named_by_the_function_that_calls_it(harness, profiled, tmp_path):
    baseline = tmp_path / "baseline.json"
    harness("gate", profiled, baseline, "--accept")
    document = json.loads(baseline.read_text())
    needs = document["entries"][0]["phases"]["decode"]
    (place,) = needs["places"]["attn_residual"]["aten::add"]
    needs["operators"]["attn_residual"]["aten::add"] -= 1
    needs["places"]["attn_residual"]["aten::add"][place] -= 1
    baseline.write_text(json.dumps(document))
    worse = harness("gate", profiled, baseline, "--format", "json")
    assert worse.json["changes"][0]["places"] == [place]
    assert place.startswith("reference_engine.")
    assert place in harness("gate", profiled, baseline).out


def test_an_option_of_the_timing_alone_is_refused(harness, profiled, tmp_path):
    ran = harness("gate", profiled, tmp_path / "baseline.json", "--against-package", "mine")
    assert ran.status == 2
    assert "there is nothing to time against" in ran.err


@pytest.mark.slow
def test_the_engine_is_timed_in_turn_with_another_version_of_itself(harness, profiled, tmp_path):
    root = installed_version(("harness", "reference_engine")).root
    for package in ("harness", "reference_engine"):
        shutil.copytree(root / package, tmp_path / "old" / package)
    command = ("gate", profiled, tmp_path / "baseline.json", "--against", tmp_path / "old", "--blocks", "5")
    harness("gate", profiled, tmp_path / "baseline.json", "--accept")
    same = harness(*command)
    assert same.status == 2
    assert same.err.startswith("H065: both versions have the same code")
    with (tmp_path / "old" / "reference_engine" / "engine.py").open("a") as file:
        file.write("# another version\n")
    ran = harness(*command, "--format", "json")
    assert ran.status in (0, 4), ran.err
    times = ran.json["times"]["decode"]
    assert times["num_blocks"] == 5
    assert times["verdict"] in ("same", "slower", "faster", "inconclusive")
    assert times["ratio"]["low"] <= times["ratio"]["median"] <= times["ratio"]["high"]
