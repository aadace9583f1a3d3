"""docs/python-api.md: its files are written, its programs run, and they print what the page says."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..documentation import ROOT, Page, run_python

PAGE = Page("python-api")
PROGRAMS, README_PROGRAMS = PAGE.programs, Page("README").programs


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "cases").symlink_to(ROOT / "cases")
    return PAGE.write_files(tmp_path)


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let this process work in the project, and import its files."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    yield project
    for name in PAGE.files:  # other pages have files of the same names
        sys.modules.pop(Path(name).stem, None)


def run(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return run_python(project, *command, PYTHONPATH=f"{project}{os.pathsep}{ROOT}")


def test_there_are_programs_to_run() -> None:
    assert len(PROGRAMS) == 4
    assert sum(bool(printed) for _, printed in PROGRAMS) == 2
    assert README_PROGRAMS


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_a_program_of_the_page_runs_and_prints_what_stands_under_it(
    index: int, capsys: pytest.CaptureFixture[str]
) -> None:
    program, printed = PROGRAMS[index]
    exec(compile(program, "docs/python-api.md", "exec"), {"__name__": "__main__"})
    if printed:
        assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_the_tests_of_the_page_pass(project: Path) -> None:
    done = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_model.py")
    assert "2 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_bug_in_the_pages_model_is_found_by_its_tests(project: Path) -> None:
    model = project / "my_model.py"
    fixed = model.read_text()
    model.write_text(fixed.replace("h = self.ln2(x)", "h = self.ln2(1.5 * x)"))
    assert model.read_text() != fixed
    done = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_model.py")
    assert "2 failed" in done.stdout, done.stdout
    assert "First divergence: model.layers.0.attn_residual" in done.stdout


@pytest.mark.parametrize("index", range(len(README_PROGRAMS)))
def test_a_program_of_the_readme_runs(project: Path, index: int) -> None:
    program, printed = README_PROGRAMS[index]
    done = run(project, "-c", program)
    assert done.returncode == 0, done.stderr
    if printed:
        assert done.stdout == printed
