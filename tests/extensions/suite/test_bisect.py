"""The script of docs/scale.md for `git bisect run`, over a real git repository, with a stub of the harness."""

import os
import re
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"
HARNESS_STATUSES = {"pass": 0, "mismatch": 1, "bad-input": 2, "nothing-checked": 5}


@pytest.fixture
def first_bad(tmp_path):
    """Return a function that makes a commit of each outcome, bisects, and returns what git says at the end."""
    script = re.search(r"```sh title=judge.sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    (tmp_path / "judge.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    (tmp_path / "repository").mkdir()
    for name, line in {"pip": "! grep -q unbuilt outcome", "harness": "exit $(cat outcome)"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        command = ["git", "-C", str(tmp_path / "repository"), *identity, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    def bisect(*outcomes: str) -> str:
        git("init", "-q")
        for commit, outcome in enumerate(outcomes):
            text = f"{HARNESS_STATUSES.get(outcome, outcome)}\n"
            (tmp_path / "repository" / "outcome").write_text(text)
            git("add", "-A")
            git("commit", "-q", "--allow-empty", "-m", f"{commit}: {outcome}")
        git("bisect", "start", "HEAD", f"HEAD~{len(outcomes) - 1}")
        return git("bisect", "run", "sh", str(tmp_path / "judge.sh"), "case.toml")

    return bisect


def test_the_script_finds_the_first_commit_with_a_mismatch(first_bad):
    said = first_bad("pass", "pass", "pass", "mismatch", "mismatch", "mismatch")
    assert "is the first bad commit" in said
    assert "3: mismatch" in said


@pytest.mark.parametrize("outcome", ["unbuilt", "bad-input", "nothing-checked"])
def test_the_script_skips_a_commit_that_cannot_be_judged(first_bad, outcome):
    assert "only 'skip'ped commits left to test" in first_bad("pass", outcome, "mismatch")
