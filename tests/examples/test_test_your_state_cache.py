"""docs/test-your-state-cache.md: its files are written, its command is run, and it finds what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "test-your-state-cache.md").read_text()
FILES = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
COMMAND = next(block for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL) if "--pyargs" in block)
FINDING = re.search(r"```text\n(H092.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *COMMAND.split(), "-p", "no:cacheprovider"]
    environment = os.environ | {"COLUMNS": "120", "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment, check=False)


def test_the_command_finds_what_the_page_shows(project: Path) -> None:
    done = run(project)
    assert done.returncode == 1
    assert FINDING is not None
    assert FINDING[1] in done.stdout
    assert "state cache: no free_list (1, 12)" in done.stdout


def test_the_program_on_the_page_fails_on_its_own(project: Path) -> None:
    assert FINDING is not None
    program = "from adapter" + FINDING[1].partition("from adapter")[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False)
    assert done.stderr.rstrip().endswith("AssertionError")


@pytest.mark.slow
def test_the_fix_on_the_page_passes(project: Path) -> None:
    adapter = project / "adapter.py"
    adapter.write_text(adapter.read_text().replace("from my_states import", "from fixed import"))
    done = run(project)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
