"""docs/test-your-*.md: their files are written, their commands are run, and they find what the pages say."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from harness.properties.scheduler.adapter import SchedulerCapabilities

from ..documentation import Page, run_python

PAGES = {name: Page(f"test-your-{name}") for name in ("engine", "state-cache", "scheduler", "attention")}
COMMANDS = {name: [block for block in page.blocks("sh") if "--pyargs" in block] for name, page in PAGES.items()}
FINDINGS = {name: [block for block in page.blocks("text") if block[:4] == "H092"] for name, page in PAGES.items()}


@pytest.fixture
def project(page: str, tmp_path: Path) -> Path:
    return PAGES[page].write_files(tmp_path)


def run(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    line = f"{sys.executable} -m {command.strip()} -p no:cacheprovider"
    return subprocess.run(line, shell=True, cwd=project, capture_output=True, text=True, env=environment, check=False)


def program_of(finding: str) -> str:
    """Return the program of a finding, which follows its heading and an empty line."""
    return finding.partition("\n\n")[2]


def assert_raises(project: Path, program: str) -> None:
    """Assert that a program ends in an assertion that fails."""
    last_line = run_python(project, "-c", program, OMP_NUM_THREADS="1").stderr.rstrip().splitlines()[-1]
    assert last_line.startswith("AssertionError")


@pytest.mark.parametrize(
    ("page", "says"),
    [("engine", "block manager: no free_list (1, 4)"), ("state-cache", "state cache: no free_list (1, 12)")],
)
def test_the_command_finds_what_the_page_shows(project: Path, page: str, says: str) -> None:
    done = run(project, COMMANDS[page][0])
    assert done.returncode == 1
    assert FINDINGS[page][0] in done.stdout
    assert says in done.stdout


@pytest.mark.parametrize("page", ["scheduler"])
def test_the_command_finds_a_program_as_short_as_the_page_shows(project: Path, page: str) -> None:
    done = run(project, COMMANDS[page][0])
    assert done.returncode == 1
    heading = re.sub(r"request \d", r"request \\d", re.escape(FINDINGS[page][0].partition("from adapter")[0]))
    # which of several shortest programs Hypothesis ends with depends on how the harness is installed: it takes
    # constants out of the modules that are not in site-packages
    program = re.search(rf"{heading}(from adapter.*?\nassert [^\n]*\n)", done.stdout, flags=re.DOTALL)
    assert program is not None, done.stdout
    assert_raises(project, program[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", ["attention"])
@pytest.mark.parametrize(
    ("command", "finding"),
    [*zip(COMMANDS["attention"], FINDINGS["attention"], strict=True)],
    ids=["attention", "engine"],
)
def test_each_command_finds_what_the_page_shows(project: Path, command: str, finding: str) -> None:
    done = run(project, command)
    assert done.returncode == 1
    assert finding in done.stdout


@pytest.mark.parametrize("page", ["engine", "state-cache", "scheduler"])
def test_the_program_on_the_page_fails_on_its_own(project: Path, page: str) -> None:
    assert_raises(project, program_of(FINDINGS[page][0]))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["attention"])
@pytest.mark.parametrize("finding", FINDINGS["attention"], ids=["attention", "engine"])
def test_the_program_of_a_finding_shows_it(project: Path, finding: str) -> None:
    assert_raises(project, program_of(finding))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "wrong", "right"),
    [
        ("engine", "from my_blocks import", "from fixed import"),
        ("state-cache", "from my_states import", "from fixed import"),
        ("scheduler", "import Request, Scheduler\n", "import Request\nfrom fixed import Scheduler\n"),
    ],
)
def test_the_fix_on_the_page_passes(project: Path, page: str, wrong: str, right: str) -> None:
    adapter = project / "adapter.py"
    adapter.write_text(adapter.read_text().replace(wrong, right))
    done = run(project, COMMANDS[page][0])
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["attention"])
def test_the_fixed_attention_passes(project: Path, page: str) -> None:
    done = run(project, "pytest --pyargs harness.properties --attention fixed:attend")
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout
    assert "attention: scores that are capped: attend has no parameter softcap" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["scheduler"])
def test_the_known_finding_is_accepted_and_written(project: Path, page: str) -> None:
    done = run(project, COMMANDS[page][1])
    assert done.returncode == 0, done.stdout
    assert "(known, to be fixed in May)" in done.stdout
    assert (project / "findings.json").exists()
    assert (project / "junit.xml").exists()


def test_the_page_lists_everything_that_an_adapter_can_declare() -> None:
    declared = set(re.findall(r"^\| `(\w+)`", PAGES["scheduler"].text, flags=re.MULTILINE))
    assert {field.name for field in fields(SchedulerCapabilities)} <= declared
