"""A suite as a JUnit file: one test a case, for the dashboards of continuous integration."""

from xml.etree import ElementTree

from harness.extensions.suite.result import CaseResult, CaseVerdict, SuiteResult
from harness.report.check.sentences import printable

JUNIT_NAME = "junit.xml"
_ELEMENT = {CaseVerdict.MISMATCH: "failure", CaseVerdict.ERROR: "error", CaseVerdict.LOST: "error"}


def suite_junit(result: SuiteResult) -> str:
    """Return the XML; a mismatch is a failure, what was not checked is an error."""
    counts = result.counts
    suite = ElementTree.Element(
        "testsuite",
        name="harness suite",
        tests=str(len(result.cases)),
        failures=str(counts[CaseVerdict.MISMATCH]),
        errors=str(counts[CaseVerdict.ERROR] + counts[CaseVerdict.LOST]),
        time=f"{result.elapsed_s:.3f}",
    )
    for case in result.cases:
        _add(suite, case)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add(suite: ElementTree.Element, case: CaseResult) -> None:
    place = f"{case.labels['model']}.{case.labels['engine']}"
    test = ElementTree.SubElement(
        suite, "testcase", classname=printable(place), name=printable(case.name), time=f"{case.seconds or 0.0:.3f}"
    )
    properties = ElementTree.SubElement(test, "properties")
    facts = {**case.labels, "verdict": case.verdict.value, "node": case.node, "report": case.report}
    for name, value in facts.items():
        if value is not None:
            ElementTree.SubElement(properties, "property", name=name, value=printable(str(value)))
    if case.verdict in _ELEMENT:
        message = printable(f"{case.code or case.verdict}: {case.divergence_text}")
        found = ElementTree.SubElement(test, _ELEMENT[case.verdict], type=case.verdict.value, message=message)
        found.text = printable(case.reason or "")
