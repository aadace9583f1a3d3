"""Options and fixtures of the property suites; registered only where `harness.properties` is asked for.

Everybody who has the harness installed has this plugin: an option named `--engine` in every session would collide with
those of other people's conftests.
"""

import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import Code, HarnessError
from harness.pytest_plugin.failure import failure_text

if TYPE_CHECKING:
    from hypothesis import settings

PROFILE_NAMES = ("dev", "ci", "thorough")

NOT_CHECKED = "not checked"
"""Key of the properties of a test that say which invariants its adapter leaves unchecked."""

_ADAPTERS = {
    "block_manager": "harness.properties.reference.blocks:BlockManager",
    "scheduler": "harness.properties.reference.scheduler:Scheduler",
    "attention": "harness.properties.reference.attention:PagedAttention",
    "engine": "harness.properties.reference.engine:Engine",
    "ops": "harness.properties.reference.ops:Ops",
}
"""By the name of the fixture, what is tested without the option: the reference engine."""

_MOVED = {
    "harness.properties.block_manager": "harness.properties.blocks.adapter",
    "harness.properties.scheduler_adapter": "harness.properties.scheduler.adapter",
    "harness.properties.attention_adapter": "harness.properties.attention.adapter",
    "harness.properties.engine_adapter": "harness.properties.engine.adapter",
    "harness.properties.reference_attention": "harness.properties.reference.attention",
    "harness.properties.reference_whole": "harness.properties.reference.engine",
    "harness.properties.reference_ops": "harness.properties.reference.ops",
}
"""Modules that adapters written before version 0.2 may import, and where they are now."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare one option for each kind of adapter, and the profile."""
    group = parser.getgroup("inference-harness")
    for name, default in _ADAPTERS.items():
        group.addoption(
            f"--{name.replace('_', '-')}",
            metavar="MODULE:NAME",
            help=f"Adapter of the {name.replace('_', ' ')} under test (default: {default}).",
        )
    group.addoption(
        "--properties-profile",
        choices=PROFILE_NAMES,
        default=PROFILE_NAMES[0],
        help="How many examples the property suites try.",
    )


def pytest_configure() -> None:
    """Refuse to start without Hypothesis."""
    try:
        import_module("harness.properties")
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def block_manager(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what `--block-manager` names: a callable that makes a block manager's adapter."""
    yield from _adapter(request)


@pytest.fixture(scope="session")
def scheduler(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what `--scheduler` names: a callable that makes a scheduler's adapter."""
    yield from _adapter(request)


@pytest.fixture(scope="session")
def attention(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what `--attention` names."""
    yield from _adapter(request)


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what `--engine` names."""
    yield from _adapter(request)


@pytest.fixture(scope="session")
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what `--ops` names."""
    yield from _adapter(request)


@pytest.fixture(scope="session")
def property_settings(request: pytest.FixtureRequest) -> "settings":
    """Hypothesis settings of the chosen profile."""
    from harness.properties.core.profiles import PROFILES

    return PROFILES[request.config.getoption("properties_profile")].settings()


def _adapter(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the object that the fixture's option names; its module may lie where pytest was started."""
    name = str(request.fixturename)
    path = request.config.getoption(name) or _ADAPTERS[name]
    from harness.properties.core.adapter import Adapter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(request.config.invocation_params.dir), *sys.path])
        yield Adapter.at(path, load_adapter(path, option=f"--{name.replace('_', '-')}"))


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
        moved_to = _MOVED.get(getattr(error, "name", None) or "")
        raise HarnessError(
            Code.BAD_ADAPTER, f"the adapter cannot be imported: {error}", where=option,
            expected="module:name, importable from where pytest was started", actual=path,
            hint=f"import {moved_to} instead" if moved_to else None,
        ) from error  # fmt: skip
    return target


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show an error of ours, a broken property among them, without a traceback through Hypothesis."""
    report = yield
    failure = failure_text(call.excinfo.value, item.config) if call.excinfo else None
    if failure is not None:
        report.longrepr = failure  # type: ignore[assignment]  # pytest asks for no more than its methods
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where adapters are named, run their suites and no others: nobody waits for the reference engine's."""
    given = {name for name in _ADAPTERS if config.getoption(name)}
    if given:
        kept = [item for item in items if given & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not checked because an adapter does not offer it."""
    lines = sorted(
        {
            str(value)
            for reports in terminalreporter.stats.values()
            for report in reports
            for name, value in getattr(report, "user_properties", ())
            if name == NOT_CHECKED
        }
    )
    if lines:
        terminalreporter.section(NOT_CHECKED)
        for line in lines:
            terminalreporter.write_line(line)
