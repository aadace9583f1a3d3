"""Options and fixtures of the property suites; registered only where `harness.properties` is asked for.

Everybody who has the harness installed has this plugin: an option named `--engine` in every session would collide with
those of other people's conftests.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.base.files import write_text
from harness.errors import Code, HarnessError

if TYPE_CHECKING:
    from harness.properties.core.findings import PropertyFinding, Rejections
    from harness.properties.core.search import SearchReport

from collections.abc import Generator
from typing import TYPE_CHECKING

from harness.pytest_plugin.failure import failure_text

if TYPE_CHECKING:
    from hypothesis import settings


__all__ = ["ADAPTERS", "load_adapter", "option_of"]

ADAPTERS = {
    "block_manager": "harness.properties.reference.blocks:BlockManagerSubject",
    "scheduler": "harness.properties.reference.scheduler:SchedulerSubject",
    "state_cache": "harness.properties.reference.states:StateCacheSubject",
    "attention": "harness.properties.reference.attention:PagedSubject",
    "engine": "harness.properties.reference.engine:EngineSubject",
    "ops": "harness.properties.reference.ops:Ops",
}
"""The default adapters by the name of the fixture: those of the reference engine."""


def option_of(name: str) -> str:
    """Return the option of a fixture."""
    return f"--{name.replace('_', '-')}"


def _fixture(name: str) -> Any:
    """Return a fixture of the object that the option of the same name names."""

    @pytest.fixture(scope="session", name=name)
    def adapter(request: pytest.FixtureRequest) -> Iterator[Any]:
        yield from _adapter(request)

    return adapter


block_manager, scheduler, state_cache, attention, engine, ops = map(_fixture, ADAPTERS)


def _adapter(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the object that the fixture's option names; its module may lie where pytest was started."""
    from harness.properties.core.falsify import NamedAdapter

    name = str(request.fixturename)
    path = request.config.getoption(name) or ADAPTERS[name]
    if name == "engine" and ":" not in path:
        yield _installed(path, request.config.getoption("engine_model"))
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(request.config.invocation_params.dir), *sys.path])
        yield NamedAdapter.at(path, load_adapter(path, option=option_of(name)))


def _installed(name: str, model: str | None) -> Any:
    """Return the adapter of an engine that is installed for every command of the harness."""
    from harness.properties.core.falsify import NamedAdapter
    from harness.properties.engine.installed import installed_engine

    arguments = repr(name) if model is None else f"{name!r}, {model!r}"
    module = "harness.properties.engine.installed"
    imports = (f"from {module} import installed_engine",)
    return NamedAdapter(installed_engine(name, model), imports, f"installed_engine({arguments})")


def load_adapter(path: str, *, option: str) -> Any:
    """Import `module:name`.

    Raises:
        HarnessError: there is no such module or no such name in it.
    """
    module_name, colon, name = path.partition(":")
    try:
        if not (module_name and colon and name):
            raise ImportError("it is not of the form module:name")
        target: Any = import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise HarnessError(
            Code.BAD_ADAPTER, f"the adapter cannot be imported: {error}", where=option,
            expected="module:name, importable from where pytest was started", actual=path,
        ) from error  # fmt: skip
    return target


__all__ = ["accepted_invariants", "parse_accepted"]

EXPECTED = 'expected numbers and a reason, as in --allow "21,15: the frontend refuses such requests"'


def parse_accepted(texts: Iterable[str]) -> dict[int, str]:
    """Return the reason for each accepted invariant.

    Raises:
        pytest.UsageError: there is no reason, or no such invariant.
    """
    from harness.properties.core.findings import Invariant

    accepted = {}
    for text in texts:
        numbers, _, reason = text.partition(":")
        if not reason.strip():
            raise pytest.UsageError(f"--allow {text!r} gives no reason; {EXPECTED}")
        for number in numbers.split(","):
            if not number.strip().isdecimal() or int(number) not in set(Invariant):
                raise pytest.UsageError(
                    f"--allow {text!r}: {number.strip()!r} is no invariant (1 to {max(Invariant)}); {EXPECTED}"
                )
            accepted[int(number)] = reason.strip()
    return accepted


@pytest.fixture(scope="session")
def accepted_invariants(request: pytest.FixtureRequest) -> Mapping[int, str]:
    """Return the reason for each invariant that `--allow` names."""
    return parse_accepted(request.config.getoption("accepted_invariants"))


__all__ = ["ATTRIBUTE", "RECORD", "SCHEMA_VERSION", "FindingsFile", "SuiteRecord", "suite_record"]

SCHEMA_VERSION = 1
NOT_CHECKED = "not checked"
"""Key of the test properties that list what its adapter leaves unchecked."""
ATTRIBUTE = "harness_properties"
"""Of a report, with a `SuiteRecord` as a dictionary; pytest-xdist sends it along."""


class SuiteRecord:
    """The findings of one test of a suite, and the properties that it did not check."""

    def __init__(self, accepted: Mapping[int, str]) -> None:
        self._accepted = accepted
        self.not_checked: list[str] = []
        self.findings: list[dict[str, Any]] = []
        self.num_examples: int | None = None

    def add_not_checked(self, lines: list[str]) -> None:
        """Note what the adapter leaves unchecked."""
        self.not_checked += lines

    def add_rejections(self, suite: str, rejections: "Rejections") -> None:
        """Note the examples that the adapter rejected."""
        self.not_checked += [f"{suite}: {number} examples: {reason}" for reason, number in rejections.items()]

    def add_search(self, suite: str, report: "SearchReport") -> None:
        """Note what a search of a state machine found."""
        self.num_examples = report.num_examples
        self.add_rejections(suite, report.rejections)
        for finding in report.findings:
            self.add_finding(finding)

    def add_finding(self, finding: "PropertyFinding") -> None:
        """Note a finding, and the reason if it is accepted."""
        number = None if finding.invariant is None else int(finding.invariant)  # workers send plain types only
        self.findings.append(
            {
                "invariant": number,
                "property": finding.property,
                "severity": finding.severity(),
                "what": finding.what,
                "program": finding.program,
                "accepted": self._accepted.get(number or 0),
            }
        )

    @property
    def user_properties(self) -> list[tuple[str, object]]:
        """The same as properties of a test in a JUnit file."""
        findings = [
            (
                "finding" if finding["accepted"] is None else "accepted",
                f"{finding['property']}: {finding['what']}"
                + (f" (accepted: {finding['accepted']})" if finding["accepted"] is not None else ""),
            )
            for finding in self.findings
        ]
        return [*((NOT_CHECKED, line) for line in self.not_checked), *findings]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON has it."""
        return {"num_examples": self.num_examples, "findings": self.findings, "not_checked": self.not_checked}


RECORD = pytest.StashKey[SuiteRecord]()


@pytest.fixture
def suite_record(request: pytest.FixtureRequest, accepted_invariants: Mapping[int, str]) -> SuiteRecord:
    """Return the record of this test."""
    record = request.node.stash[RECORD] = SuiteRecord(accepted_invariants)
    return record


class FindingsFile:
    """Writes what all suites found to the file that `--properties-json` names."""

    def __init__(self, path: Path, adapters: Mapping[str, str | None], profile: str) -> None:
        self._path = path
        self._header = {"schema_version": SCHEMA_VERSION, "profile": profile, "adapters": dict(adapters)}
        self._suites: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the record of a test."""
        record = getattr(report, ATTRIBUTE, None)
        if report.when == "call" and record is not None:
            self._suites.append(
                {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3), **record}
            )

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        text = json.dumps({**self._header, "suites": self._suites}, indent=1, ensure_ascii=False)
        write_text(self._path, text + "\n")


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
    "size_seed",
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
        "--size-seed",
        type=int,
        metavar="N",
        help="Seed of the sizes of attention that change from day to day (default: the date, as 20261129).",
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
    from harness.properties.core.search import PROFILES

    return PROFILES[request.config.getoption("properties_profile")].settings()


@pytest.fixture(scope="session")
def size_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of the sizes that change from day to day."""
    chosen: int | None = request.config.getoption("size_seed")
    return int(f"{datetime.now(UTC):%Y%m%d}") if chosen is None else chosen


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
    """If adapters are named, run only their suites, without those of the reference engine."""
    named = {name for name in ADAPTERS if config.getoption(name)}
    if named:
        kept = [item for item in items if named & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report accepted findings, and what was not checked because an adapter does not offer it."""
    records = list(_records(terminalreporter))
    broken = {finding["invariant"] for record in records for finding in record["findings"]}
    accepted = [
        f"invariant {finding['invariant']}: {finding['what']} ({finding['accepted']})"
        for record in records
        for finding in record["findings"]
        if finding["accepted"] is not None
    ]
    for number, reason in parse_accepted(config.getoption("accepted_invariants")).items():
        if records and number not in broken:
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
