"""`harness check --dry-run`: what a check would cost, and no verdict."""

from pathlib import Path

import pytest

GOLDEN = ["loading", "graph of the model", "continuation"]


@pytest.fixture
def check(harness, workload, tmp_path, monkeypatch):
    """Check a model of three layers, of which two are measured."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return lambda *options: harness("check", "--model", "qwen3-tiny", *workload, *options)


def goldens(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "goldens").glob("*") if path.is_dir()]


def test_an_estimate_is_no_verdict_and_leaves_nothing(check, tmp_path):
    ran = check("--dry-run")
    assert ran.status == 5
    assert ran.out.startswith("H051: nothing was checked: this is what a check would cost\n")
    assert "measured on the first 2 of 3 layers" in ran.out
    assert "pass" not in ran.out
    assert not goldens(tmp_path)


def test_the_disk_of_a_check_is_known_before_it_is_made(check, tmp_path):
    document = check("--dry-run", "--schedule", "plain,prefix-hit", "--format", "json").json
    assert (document["kind"], document["num_layers"], document["num_measured"]) == ("check-cost", 3, 2)
    assert [phase["name"] for phase in document["phases"]] == [*GOLDEN, "comparison, 3 times"]
    assert all(phase["seconds"] > 0 for phase in document["phases"])
    assert document["peak_bytes"] > 10_000_000
    assert document["num_engine_runs"] == 3, "one of them as served"
    assert check("--out", str(tmp_path / "out"), "--schedule", "plain").status == 0
    (golden,) = goldens(tmp_path)
    for folder, expected in ((golden, "golden_bytes"), (tmp_path / "out" / "plain", "recording_bytes")):
        num_bytes = sum(path.stat().st_size for path in folder.glob("step-*"))
        assert document[expected] == pytest.approx(num_bytes, rel=0.1)
    again = check("--dry-run", "--schedule", "plain", "--format", "json").json
    assert [phase["name"] for phase in again["phases"]] == ["loading", "golden from the cache", "comparison, 1 times"]
    assert goldens(tmp_path) == [golden]


@pytest.mark.parametrize("options", [["--out", "new"], ["--dtype", "float32", "--dtype", "float16"]])
def test_what_a_dry_run_does_not_go_with(check, options):
    ran = check("--dry-run", *options)
    assert ran.status == 2
    assert "a dry run estimates one check" in ran.err
