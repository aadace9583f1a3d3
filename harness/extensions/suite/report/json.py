"""A suite for programs: keys that are always there, in finite numbers; and such a document read back."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.base.files import parse_json, read_text
from harness.errors import Code, HarnessError
from harness.extensions.suite.result import CaseResult, SuiteResult
from harness.report.document import plain

SCHEMA_VERSION = 1
SUITE_NAME = "suite.json"
"""Name of the document in a suite's folder."""
_CASES = TypeAdapter(tuple[CaseResult, ...])


def suite_json(result: SuiteResult) -> dict[str, Any]:
    """Return a suite as plain dicts, lists, strings and finite numbers."""
    document: dict[str, Any] = plain(result)
    cases = document.pop("cases")
    head = {"schema_version": SCHEMA_VERSION, "verdict": result.verdict.value, "counts": result.counts}
    return {**head, "num_cases": len(cases), **document, "cases": cases}


def load_suite(path: Path) -> SuiteResult:
    """Read a suite's document, or that of a suite's folder.

    Raises:
        HarnessError: BAD_SUITE_RESULT.
    """
    file = path / SUITE_NAME if path.is_dir() else path
    try:
        document = parse_json(read_text(file))
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version {document['schema_version']} is not known")
        cases = _CASES.validate_python(document["cases"])
        told = {name: document.get(name) for name in ("label", "begun_at")}
        if not all(value is None or isinstance(value, str) for value in told.values()):
            raise ValueError("label and begun_at are texts")
        return SuiteResult(cases=cases, elapsed_s=float(document["elapsed_s"]), **told)
    except (OSError, ValueError, KeyError, TypeError, ValidationError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise HarnessError(
            Code.BAD_SUITE_RESULT,
            f"the file is no suite's result: {reason}",
            where=file,
            expected=f"{SUITE_NAME}, or the folder that `harness suite --out` made",
        ) from error
