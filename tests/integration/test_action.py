"""action.yml: its step runs as it stands, writes the summary and ends as the check does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text())


@pytest.fixture
def step(tmp_path):
    (action_step,) = ACTION["runs"]["steps"]

    def run(engine, options):
        summary = tmp_path / "summary.md"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {
            "ENGINE": engine,
            "OPTIONS": options,
            "PACKAGE": "",
            "GITHUB_STEP_SUMMARY": str(summary),
            "PATH": path,
        }
        command = [
            "bash",
            "--noprofile",
            "--norc",
            "-e",
            "-o",
            "pipefail",
            "-c",
            action_step["run"],
        ]  # as GitHub runs it
        ran = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
        return ran.returncode, summary.read_text() if summary.is_file() else "", ran.stderr

    assert set(action_step["env"]) == {"ENGINE", "OPTIONS", "PACKAGE"}
    return run


OPTIONS = "--model llama-tiny --prompt 'hu rin pun | hu' --max-new-tokens 2 --schedule plain"


@pytest.mark.slow
def test_a_pass_is_in_the_summary(step):
    status, summary, errors = step("reference", OPTIONS)
    assert status == 0, errors
    assert summary.startswith("### pass: reference")


@pytest.mark.slow
def test_a_mismatch_fails_the_step(step):
    status, summary, _ = step("", OPTIONS.replace("plain", "prefix-hit"))  # too short a prompt for a block of it
    assert status == 1
    assert "mismatch: reference" in summary.splitlines()[0]


@pytest.mark.slow
def test_an_error_fails_the_step(step):
    status, _, errors = step("nobody", OPTIONS)
    assert status == 2
    assert "H014" in errors
