"""Bisection over a real git repository; a script stands in for the check, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite import bisect as module
from harness.extensions.suite.bisect import Bisector
from harness.extensions.suite.report.bisection import bisection_text

JUDGE = """
import json, os, sys
import toy
with open(os.environ["TOY_LOG"], "a") as log:
    log.write(f"{toy.DOES} {' '.join(sys.argv[1:])}\\n")
if toy.DOES == "crash":
    os.abort()
if toy.DOES == "refuse":
    print(json.dumps({"error": {"code": "H017", "message": "the engine raised"}}))
    sys.exit(2)
place = {"tap": toy.DOES, "request": 0, "position": 3, "schedule": "batched", "code": "H040"}
verdict = "pass" if toy.DOES == "sound" else "mismatch"
print(json.dumps({"verdict": verdict, "first_divergence": None if verdict == "pass" else place, "findings": []}))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return a function that makes a repository with a commit for each thing that the toy does."""
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(module, "_CHECK", [sys.executable, "-c", JUDGE])
    folder = tmp_path / "repository"
    (folder / "src" / "harness").mkdir(parents=True)
    (folder / "src" / "harness" / "__init__.py").write_text("raise SystemExit('the harness of the revision')")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(folder), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def make(*does: str) -> Path:
        git("init", "-q")
        for at, what in enumerate(does):
            (folder / "src" / "toy.py").write_text(f"DOES = {what!r}\nAT = {at}\n")
            git("add", "-A")
            git("commit", "-qm", f"{at}: {what}")
            git("tag", f"c{at}")
        return folder

    make.git = git
    return make


def found_by(folder: Path, good: str = "c0", bad: str = "HEAD", **options):
    return Bisector(case=Path("case.toml"), import_from="src", **options).run(folder, good=good, bad=bad)


def test_the_first_bad_commit_is_found_in_few_checks(repository):
    folder = repository(*["sound"] * 9, *["q_proj"] * 7)
    found = found_by(folder)
    assert found.first_bad.commit == repository.git("rev-parse", "c9")
    assert (found.first_bad.subject, found.first_bad.code) == ("9: q_proj", "H040")
    assert found.first_bad.what == "q_proj, request 0, position 3"
    assert len(found.revisions) <= 2 + 4
    assert bisection_text(found).startswith(f"First bad commit: {found.first_bad.commit}\n")


def test_the_users_checkout_is_not_touched(repository):
    folder = repository("sound", "sound", "q_proj")
    (folder / "src" / "toy.py").write_text("half done")
    found_by(folder)
    assert (folder / "src" / "toy.py").read_text() == "half done"
    assert repository.git("worktree", "list").count("\n") == 0
    assert not (folder / ".git" / "BISECT_START").exists()


def test_only_the_schedule_is_run_that_failed_first(repository, tmp_path):
    found_by(repository("sound", "q_proj"))
    first, *rest = (tmp_path / "log").read_text().splitlines()
    assert "--schedule" not in first
    assert all(line.endswith("--schedule batched") for line in rest)


def test_what_cannot_be_tested_is_skipped(repository):
    folder = repository("sound", "crash", "sound", "refuse", "sound", "k_proj", "k_proj")
    found = found_by(folder)
    assert found.first_bad.subject == "5: k_proj"


def test_a_crash_that_is_looked_for_is_no_reason_to_skip(repository):
    found = found_by(repository("sound", "refuse", "sound", "crash", "crash"))
    assert found.first_bad.subject == "3: crash"
    assert found.first_bad.what == "the check ended with signal 6"


def test_candidates_are_named_where_the_first_one_cannot_be_told(repository):
    with pytest.raises(HarnessError, match="one of several") as caught:
        found_by(repository("sound", "refuse", "k_proj"))
    assert "1: refuse (error: the engine raised)" in caught.value.actual
    assert "2: k_proj (mismatch: " in caught.value.actual


def test_the_engine_is_built_at_each_revision(repository, tmp_path):
    build = "grep -q sound src/toy.py || grep -q q_proj src/toy.py || { echo will not build; exit 1; }"
    found = found_by(repository("sound", "sound", "nothing", "sound", "q_proj"), build=build)
    assert found.first_bad.subject == "4: q_proj"
    with pytest.raises(HarnessError, match="the case does not fail at the bad revision") as caught:
        found_by(tmp_path / "repository", bad="c2", build=build)
    assert caught.value.actual == "unbuilt: will not build"


@pytest.mark.parametrize(
    ("does", "good", "bad", "says"),
    [
        (["sound", "sound"], "c0", "c1", "the case does not fail at the bad revision"),
        (["q_proj", "q_proj"], "c0", "c1", "the case does not pass at the good revision"),
        (["sound", "q_proj"], "nowhere", "c1", "there is no revision 'nowhere'"),
        (["sound", "q_proj"], "--help", "c1", "there is no revision '--help'"),
        (["q_proj", "sound"], "c1", "c0", "git cannot go on|git bisect failed"),
    ],
)
def test_a_range_that_makes_no_sense_is_said(repository, does, good, bad, says):
    with pytest.raises(HarnessError, match=says) as caught:
        found_by(repository(*does), good=good, bad=bad)
    assert caught.value.code is Code.BAD_BISECTION


def test_a_folder_without_a_repository_is_said(tmp_path):
    with pytest.raises(HarnessError, match="the folder is no git repository") as caught:
        found_by(tmp_path)
    assert caught.value.code is Code.BAD_BISECTION


def test_a_check_that_hangs_is_ended(repository, monkeypatch):
    folder = repository("sound", "q_proj")
    monkeypatch.setattr(module, "_CHECK", [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(HarnessError, match=r"error: not done in 0\.2 s"):
        found_by(folder, limit_s=0.2)
