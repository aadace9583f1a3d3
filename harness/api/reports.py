"""Results of the Python API: they can assert themselves, and a notebook or a terminal can show them."""

from dataclasses import dataclass, fields
from typing import Any

from rich.console import RenderableType

from harness.report.check.json import check_json
from harness.report.check.sentences import extent, subject
from harness.report.check.terminal import check_text
from harness.report.page.html import report_html
from harness.report.profile import profile_json, profile_text
from harness.report.terminal import AnsiText, pre_html
from harness.results.check import CheckResult, Outcome
from harness.results.profile import ProfileResult

_WIDTH = 100


class CheckFailedError(AssertionError):
    """A check that did not pass; its message is the whole diagnosis."""

    def __init__(self, report: "CheckReport") -> None:
        """Keep the report as `report`."""
        self.report = report
        super().__init__(report.text())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport(CheckResult):
    """The result of a check. It is true if the check passed."""

    @classmethod
    def of(cls, result: CheckResult) -> "CheckReport":
        """Return a result as a report."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(result)})

    @property
    def is_ok(self) -> bool:
        """Whether something was compared, and nothing was wrong or missing."""
        return self.outcome is Outcome.PASS

    def __bool__(self) -> bool:
        return self.is_ok

    def assert_ok(self) -> None:
        """Raise CheckFailedError (an AssertionError) with table and first divergence, unless the check passed."""
        __tracebackhide__ = True  # pytest shows the caller's line
        if not self.is_ok:
            raise CheckFailedError(self)

    def text(self, *, width: int = _WIDTH, color: bool = False) -> str:
        """Return what `harness check` prints: verdict, table, first divergence, findings, facts."""
        return check_text(self, width=width, color=color)

    def html(self) -> str:
        """Return the page that `harness check --out` writes: one HTML file that needs no network."""
        return report_html(self)

    def as_dict(self) -> dict[str, Any]:
        """Return what `harness check --format json` prints."""
        return check_json(self)

    def __repr__(self) -> str:
        return f"<CheckReport {self.outcome}: {', '.join((*subject(self), *extent(self)))}>"

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> RenderableType:
        return AnsiText(lambda width: self.text(width=width, color=True))

    def _repr_html_(self) -> str:
        return pre_html(self.text(color=True))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProfileReport(ProfileResult):
    """The cost of an engine, prefill and decode by themselves."""

    @classmethod
    def of(cls, result: ProfileResult) -> "ProfileReport":
        """Return a result as a report."""
        return cls(**{field.name: getattr(result, field.name) for field in fields(result)})

    def text(self) -> str:
        """Return what `harness profile` prints."""
        return profile_text(self)

    def html(self) -> str:
        """Return the page that `harness profile` writes; its links hold in the folder of the profile."""
        return report_html(profile=self)

    def as_dict(self) -> dict[str, Any]:
        """Return what `harness profile --format json` prints."""
        return profile_json(self)

    def __repr__(self) -> str:
        phases = ", ".join(phase.name for phase in self.phases)
        return f"<ProfileReport {self.engine}, {self.model}, {self.dtype}, {self.device}: {phases}>"

    def __str__(self) -> str:
        return self.text()

    def __rich__(self) -> RenderableType:
        return AnsiText(lambda _width: self.text())

    def _repr_html_(self) -> str:
        return pre_html(self.text())
