"""The pytest plugin: case files are collected as tests, and a fixture serves tests in Python (docs/pytest.md).

pytest imports this in every session of everybody who has the harness installed, so that nothing heavy is imported here:
pydantic waits until a case file is collected, torch and transformers until a case runs.
"""

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from harness.base.environment import refuse_update
from harness.errors import HarnessError
from harness.pytest_plugin.failure import (
    pytest_configure_node,
    pytest_report_from_serializable,
    pytest_report_to_serializable,
)
from harness.pytest_plugin.fixtures import harness_check, pytest_pyfunc_call
from harness.pytest_plugin.items import SECTIONS, CaseFile, CaseNotCollectedWarning, has_marks_of_a_case

__all__ = [
    "harness_check",
    "pytest_addoption",
    "pytest_collect_file",
    "pytest_configure",
    "pytest_configure_node",
    "pytest_load_initial_conftests",
    "pytest_pyfunc_call",
    "pytest_report_from_serializable",
    "pytest_report_to_serializable",
    "pytest_terminal_summary",
]

CASES_FOLDER = "cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the plugin."""
    group = parser.getgroup("inference-harness")
    group.addoption(
        "--golden-update",
        action="store_true",
        help="Rewrite the sketches of the cases' goldens and show what changed. Refused where CI is set.",
    )
    group.addoption(
        "--baseline-update",
        action="store_true",
        help="Make what the cases' profiles need their baselines and show what changed. Refused where CI is set.",
    )
    group.addoption(
        "--captures",
        metavar="DIR",
        help="Folder for the captures of cases with a profile (default: `captures` beside the JUnit file).",
    )
    parser.addini(
        "harness_cases",
        type="linelist",
        default=[],
        help="Case files besides those in folders named `cases`: globs relative to rootdir, `*` matches `/` too.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Declare the options of the property suites if they are asked for."""
    if any("harness.properties" in arg or "harness/properties" in arg for arg in args):
        from harness.pytest_plugin import properties

        early_config.pluginmanager.register(properties, properties.__name__)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to rewrite expectations in continuous integration, and to use a folder without a name."""
    if config.getoption("--captures") == "":
        raise pytest.UsageError("--captures names no folder")
    for option in ("--golden-update", "--baseline-update"):
        if config.getoption(option):
            try:
                refuse_update(option)
            except HarnessError as error:
                raise pytest.UsageError(str(error)) from error


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> CaseFile | None:
    """Collect a case file."""
    if ".toml" not in file_path.name.lower():
        return None
    is_declared = _is_declared(file_path, parent.config)
    if file_path.suffix.lower() == ".toml" and (is_declared or file_path.parent.name == CASES_FOLDER):
        return CaseFile.from_parent(parent, path=file_path, is_declared=is_declared)
    reason: str | None = (
        f"its folder is not called {CASES_FOLDER!r}, and no glob of harness_cases in the configuration names it"
    )
    if file_path.suffix.lower() != ".toml":
        original, ending, _ = file_path.name.rpartition(".toml")
        reason = None if file_path.with_name(original + ending).is_file() else "its name does not end in .toml"
    if reason is not None and has_marks_of_a_case(file_path):
        parent.warn(CaseNotCollectedWarning(f"{file_path} looks like a case, and is not collected: {reason}"))
    return None


def _is_declared(path: Path, config: pytest.Config) -> bool:
    if not path.is_relative_to(config.rootpath):
        return False
    relative = path.relative_to(config.rootpath).as_posix()
    return any(fnmatch(relative, pattern) for pattern in config.getini("harness_cases"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show updates and what was not compared. The texts are in the reports, so that xdist's workers can send them."""
    for section in SECTIONS:
        texts = sorted(_texts(terminalreporter, section))
        if texts:
            terminalreporter.section(section)
        for text in texts:
            terminalreporter.write_line(text)


def _texts(terminalreporter: pytest.TerminalReporter, section: str) -> Iterator[str]:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                yield from (text for title, text in report.sections if title == f"Captured {section} call")
