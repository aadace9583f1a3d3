"""Sketches: a golden in a few kilobytes, committed beside its case, so that a change of the oracle itself is noticed.

A golden is made where it is needed and never committed. Without a sketch, a new transformers or a bug of our own could
move the truth, and engines would be held to the wrong numbers.
"""

from pathlib import Path

from harness.errors import Code, HarnessError
from harness.oracle.golden import Golden
from harness.oracle.sketch.change import compare, describe
from harness.oracle.sketch.file import read_sketch, sketch_path, write_sketch
from harness.oracle.sketch.projection import make_sketch

__all__ = ["check", "compare", "describe", "make_sketch", "read_sketch", "sketch_path", "update", "write_sketch"]


def check(case_path: Path, golden: Golden, *, command: str) -> None:
    """Compare the golden of a case with the committed sketch.

    Raises:
        HarnessError: SKETCH_MISSING; SKETCH_DIFFERS for the first token or tap; BAD_CASE where the sketch is damaged.
    """
    path = sketch_path(case_path)
    if not path.exists():
        raise HarnessError(Code.SKETCH_MISSING, "the golden's sketch is missing", where=path, hint=command)
    first = compare(read_sketch(path, command=command), make_sketch(golden)).first
    if first:
        raise HarnessError(
            Code.SKETCH_DIFFERS,
            "the golden differs from its sketch",
            where=f"{path}: {first.where}",
            expected=first.expected,
            actual=first.actual,
            hint=command,
        )


def update(case_path: Path, golden: Golden) -> str:
    """Rewrite the sketch of a case and return what changed; one within tolerance stays as it is.

    Raises:
        HarnessError: CANNOT_WRITE; ORACLE_NOT_FINITE.
    """
    path, actual = sketch_path(case_path), make_sketch(golden)
    try:
        change = compare(read_sketch(path), actual) if path.exists() else None
    except HarnessError:  # damaged, by a merge for one
        change = None
    if change is None or change.first:
        write_sketch(path, actual)
    return describe(change) if change else f"new sketch of {len(actual.taps)} taps"
