"""The text of a failed case, in place of pytest's traceback, also when it comes from an xdist worker."""

import os
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from harness.errors import Code, HarnessError, printable
from harness.results.check import CheckResult

if TYPE_CHECKING:
    from harness.results.gate import GateResult

_KEY = "inference_harness_failure"
"""Entry of a serialised report that holds a `FailureText`."""


class GateFailedError(Exception):
    """Ends a case whose engine is right and needs more than its baseline allows."""

    def __init__(self, result: "GateResult", command: str) -> None:
        self.result = result
        self.command = command
        """Command that accepts the profile as the baseline."""
        change = result.changes[0]
        place = " ".join(part for part in (change.phase, change.operation, change.measure) if part)
        super().__init__(f"{Code.PERFORMANCE_REGRESSION}: {place}: {change.before:,} before, {change.after:,} now")


def summary(result: CheckResult) -> str:
    """Return the first mistake and its schedule in one line."""
    from harness.report.check.sentences import divergence_place

    divergence = result.first_divergence
    if divergence:
        return f"{divergence.code}: {printable(divergence.tap)}, {divergence_place(divergence)}"
    for run in result.runs:
        for finding in run.findings:
            return f"{finding.code}: {printable(finding.message)}, schedule {run.schedule}"
    return f"nothing was compared: {', '.join(run.schedule for run in result.runs) or 'no schedule'}"


class TerminalWriter(Protocol):
    """The part of pytest's terminal writer that is used here; its class is not public."""

    hasmarkup: bool

    def line(self, text: str) -> None:
        """Write `text` and a line's end."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The object that pytest reads for the one-line summary and for the message in a JUnit file."""

    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class FailureText:
    """A failure as pytest shows it (a `longrepr`): with colours at a terminal that has them, without in a file."""

    message: str
    plain: str
    colored: str

    @property
    def reprcrash(self) -> Crash:
        """The failure in one line."""
        return Crash(self.message)

    def toterminal(self, writer: TerminalWriter) -> None:
        """Write the failure at the terminal."""
        writer.line(self.colored if writer.hasmarkup else self.plain)

    def __str__(self) -> str:
        return self.plain


def failure_text(error: BaseException, config: pytest.Config) -> FailureText | None:
    """Return the text of a HarnessError; None for other errors, whose traceback pytest shows."""
    if os.environ.get("HARNESS_TRACEBACK"):
        return None
    from harness.api import CheckFailedError

    if isinstance(error, CheckFailedError):
        width = terminal_width(config)
        plain, colored = (error.report.text(width=width, color=color).rstrip() for color in (False, True))
        return FailureText(summary(error.report), plain, colored)
    if isinstance(error, GateFailedError):
        from harness.report.gate import gate_text

        text = f"{gate_text(error.result)}\n\nif this is meant: {error.command}"
        return FailureText(str(error), text, text)
    if isinstance(error, HarnessError):
        return FailureText(printable(f"{error.code}: {error.what}"), str(error), str(error))
    return None


def terminal_width(config: pytest.Config) -> int:
    """Return the width of the terminal; under xdist, of the one that started the workers."""
    width: int = getattr(config, "workerinput", {}).get("harness_width") or config.get_terminal_writer().fullwidth
    return width


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell an xdist worker, which has no terminal, the width of ours."""
    node.workerinput["harness_width"] = terminal_width(node.config)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(
    report: pytest.CollectReport | pytest.TestReport,
) -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Send a failure from an xdist worker as what it is; pytest would send the text without colours."""
    data = yield
    failure: object = report.longrepr
    if data is not None and isinstance(failure, FailureText):
        data |= {"longrepr": None, _KEY: asdict(failure)}
    return data


@pytest.hookimpl(wrapper=True)
def pytest_report_from_serializable(
    data: dict[str, Any],
) -> Generator[None, pytest.CollectReport | pytest.TestReport | None, pytest.CollectReport | pytest.TestReport | None]:
    """Receive what `pytest_report_to_serializable` sent."""
    failure = data.pop(_KEY, None)
    report = yield
    if report is not None and failure is not None:
        report.longrepr = FailureText(**failure)  # type: ignore[assignment]  # pytest asks for no more than its methods
    return report
