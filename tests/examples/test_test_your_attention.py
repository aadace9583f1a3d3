"""docs/test-your-attention.md: its files are written, its commands are run, and they find what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "test-your-attention.md").read_text()
FILES = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMANDS = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) if "--pyargs" in block]
FINDINGS = re.findall(r"```text\n(H092.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("command", "finding"), [*zip(COMMANDS, FINDINGS, strict=True)])
def test_the_command_finds_what_the_page_shows(project: Path, command: str, finding: str) -> None:
    done = run(project, "-m", *command.split(), "-p", "no:cacheprovider")
    assert done.returncode == 1
    assert finding in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("finding", FINDINGS)
def test_the_program_of_a_finding_shows_it(project: Path, finding: str) -> None:
    program = "\n".join(finding.splitlines()[3:])
    assert run(project, "-c", program).stderr.rstrip().splitlines()[-1].startswith("AssertionError")


@pytest.mark.slow
def test_the_fix_on_the_page_passes(project: Path) -> None:
    done = run(
        project,
        "-m",
        "pytest",
        "--pyargs",
        "harness.properties",
        "--attention",
        "fixed:attend",
        "-p",
        "no:cacheprovider",
    )
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout
    assert "attention: scores that are capped: attend has no parameter softcap" in done.stdout
