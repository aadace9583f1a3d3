"""Options and fixtures of the property suites; registered only where `harness.properties` is asked for.

Everybody who has the harness installed has this plugin: an option named `--engine` in every session would collide with
those of other people's conftests.
"""

from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import HarnessError
from harness.pytest_plugin.failure import failure_text
from harness.pytest_plugin.properties.accepted import accepted_invariants, parse_accepted
from harness.pytest_plugin.properties.adapters import (
    ADAPTERS,
    attention,
    block_manager,
    engine,
    load_adapter,
    ops,
    option_of,
    scheduler,
    state_cache,
)
from harness.pytest_plugin.properties.record import ATTRIBUTE, RECORD, FindingsFile, suite_record

if TYPE_CHECKING:
    from hypothesis import settings

__all__ = [
    "accepted_invariants",
    "attention",
    "block_manager",
    "engine",
    "load_adapter",
    "ops",
    "property_settings",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
    "scheduler",
    "state_cache",
    "suite_record",
]

PROFILE_NAMES = ("dev", "ci", "thorough")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare one option for each kind of adapter, the profile, what is accepted, and the file of the findings."""
    group = parser.getgroup("inference-harness")
    for name, default in ADAPTERS.items():
        group.addoption(
            option_of(name),
            metavar="MODULE:NAME",
            help=f"Adapter of the {name.replace('_', ' ')} under test (default: {default or 'none'}).",
        )
    group.addoption("--engine-model", metavar="PATH", help="Checkpoint of --engine NAME (default: qwen3-tiny).")
    group.addoption(
        "--properties-profile",
        choices=PROFILE_NAMES,
        default=PROFILE_NAMES[0],
        help="How many examples the property suites try.",
    )
    group.addoption(
        "--allow",
        metavar='"NUMBERS: REASON"',
        action="append",
        default=[],
        dest="accepted_invariants",
        help="Accept broken invariants of block manager or scheduler, for a reason. May be given several times.",
    )
    group.addoption("--properties-json", metavar="FILE", help="Write all findings of the property suites to this file.")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start without Hypothesis, or with options that make no sense."""
    try:
        import_module("harness.properties")
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error
    parse_accepted(config.getoption("accepted_invariants"))
    for name in ADAPTERS:
        if config.getoption(name) == "":
            raise pytest.UsageError(f"{option_of(name)} names no adapter")
    if config.getoption("engine_model") == "":
        raise pytest.UsageError("--engine-model names no checkpoint")
    path = config.getoption("properties_json")
    if path is not None and not hasattr(config, "workerinput"):
        if not path:
            raise pytest.UsageError("--properties-json names no file")
        named = {name: config.getoption(name) for name in ADAPTERS if config.getoption(name)}
        findings_file = FindingsFile(Path(path), named or ADAPTERS, config.getoption("properties_profile"))
        config.pluginmanager.register(findings_file, "harness_findings_file")


@pytest.fixture(scope="session")
def property_settings(request: pytest.FixtureRequest) -> "settings":
    """Hypothesis settings of the chosen profile."""
    from harness.properties.core.profiles import PROFILES

    return PROFILES[request.config.getoption("properties_profile")].settings()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show an error of ours, a broken property among them, without a traceback through Hypothesis."""
    report = yield
    failure = failure_text(call.excinfo.value, item.config) if call.excinfo else None
    if failure is not None:
        report.longrepr = failure  # type: ignore[assignment]  # pytest asks for no more than its methods
    record = item.stash.get(RECORD, None)
    if record is not None and call.when == "call":
        error = call.excinfo.value if call.excinfo else None
        for finding in getattr(error, "findings", ()) if not record.findings else ():
            record.add_finding(finding)
        item.user_properties += record.user_properties  # a JUnit file has those of the report of the teardown
        setattr(report, ATTRIBUTE, record.as_dict())
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If adapters are named, run their suites and no others: those of the reference engine are left out."""
    given = {name for name in ADAPTERS if config.getoption(name)}
    if given:
        kept = [item for item in items if given & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which findings were accepted, and what was not checked because an adapter does not offer it."""
    records = list(_records(terminalreporter))
    found = {finding["invariant"] for record in records for finding in record["findings"]}
    accepted = [
        f"invariant {finding['invariant']}: {finding['what']} ({finding['accepted']})"
        for record in records
        for finding in record["findings"]
        if finding["accepted"] is not None
    ]
    for number, reason in parse_accepted(config.getoption("accepted_invariants")).items():
        if records and number not in found:
            accepted.append(f"invariant {number} is accepted and not broken ({reason})")
    not_checked = sorted({line for record in records for line in record["not_checked"]})
    for title, lines in (("accepted", accepted), ("not checked", not_checked)):
        if lines:
            terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)


def _records(terminalreporter: pytest.TerminalReporter) -> Iterator[dict[str, Any]]:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, ATTRIBUTE) and report.when == "call":
                yield getattr(report, ATTRIBUTE)
