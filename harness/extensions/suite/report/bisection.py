"""A bisection for people and for programs."""

from tabulate import tabulate

from harness.extensions.suite.result import Bisection, Revision
from harness.report.check.sentences import number, printable

_SHORT = 12


def bisection_text(found: Bisection) -> str:
    """Return the first bad commit, and the table of all that were tested."""
    first = found.first_bad
    lines = [f"First bad commit: {first.commit}", f"                  {printable(first.subject)}"]
    lines += [f"                  {first.code}: {printable(first.what or '')}", ""]
    headers = ("commit", "subject", "verdict", "first divergence, or why not", "seconds")
    rows = [_row(revision) for revision in found.revisions]
    lines += tabulate(rows, headers, tablefmt="simple", disable_numparse=True).splitlines()
    return "\n".join(lines) + "\n"


def _row(revision: Revision) -> tuple[str, ...]:
    subject, what = printable(revision.subject)[:40], printable(revision.what or "")[:60]
    return revision.commit[:_SHORT], subject, revision.verdict, what, number(revision.seconds)
