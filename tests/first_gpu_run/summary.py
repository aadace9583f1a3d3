"""A page of what ran, what failed and what was measured, and where the figures go."""

from collections.abc import Sequence
from pathlib import Path

from .steps import Step
from .work import NOT_STARTED, TOO_LONG, kept_result

_WORDS = {0: "ok", TOO_LONG: "too long", NOT_STARTED: "not started"}


def write_summary(steps: Sequence[Step], out: Path) -> None:
    """Write summary.md: a line for each step, then the last lines of each command."""
    lines = ["# First run on a GPU", "", "| step | ended | seconds | figures go to |", "|---|---|---|---|"]
    for step in steps:
        result = kept_result(step.name, out)
        if result is None:
            ended, seconds = "not run", ""
        else:
            ended = result.left_out or ", ".join(_WORDS.get(status, f"status {status}") for status in result.statuses)
            seconds = f"{result.seconds:g}"
        lines.append(f"| {step.name} | {ended} | {seconds} | {step.fills} |")
    for step in steps:
        for path in sorted(out.glob(f"{step.name}-[0-9]*.txt")):
            lines += ["", f"## {path.name}", "", "```text", *_ends(path), "```"]
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _ends(path: Path, number: int = 12) -> list[str]:
    """Return a command and the last lines that it printed."""
    command, *printed = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [command[:400], *(line[:200] for line in printed[-number:])]
