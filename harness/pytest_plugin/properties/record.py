"""Findings of the property suites, as data: for the JUnit file, the terminal and a JSON file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.base.files import write_text

if TYPE_CHECKING:
    from harness.properties.core.findings import PropertyFinding, Rejections
    from harness.properties.core.search import SearchReport

__all__ = ["ATTRIBUTE", "RECORD", "SCHEMA_VERSION", "FindingsFile", "SuiteRecord", "suite_record"]

SCHEMA_VERSION = 1
NOT_CHECKED = "not checked"
"""Key of the properties of a test that say what its adapter leaves unchecked."""
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
        """Note the examples that the adapter said it does not serve."""
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
