"""The history that a monitor keeps of a training run: a JSON line for each comparison."""

from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from harness.base.files import read_text
from harness.errors import Code, HarnessError
from harness.extensions.rollout.result import GapHistory, GapStep

_STEP = TypeAdapter(GapStep)
_BEGIN = '{"step":'
"""What each line begins with: a line that is no JSON and begins so was cut off."""


def read_history(path: Path) -> GapHistory:
    """Read a history; lines that a kill ended in the middle are counted, and the others taken.

    Raises:
        HarnessError: BAD_ROLLOUT_FILE.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"it cannot be read: {error}") from error
    steps: dict[int, GapStep] = {}
    num_cut = 0
    for number, line in enumerate(lines, 1):
        try:
            step = _STEP.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            is_cut = first["type"] == "json_invalid" and line.startswith(_BEGIN[: len(line)])
            if line and not is_cut:
                place = ".".join(map(str, first["loc"]))
                raise _bad(f"{path}: line {number}", f"{place}: {first['msg']}".removeprefix(": ")) from error
            num_cut += bool(line)
        else:
            steps[step.step] = step
    return GapHistory(file=path.name, steps=tuple(steps[at] for at in sorted(steps)), num_cut=num_cut)


def _bad(where: object, what: str) -> HarnessError:
    return HarnessError(
        Code.BAD_ROLLOUT_FILE,
        f"this is no history of a training run: {what}",
        where=where,
        expected="JSON lines that harness.RolloutMonitor(history=FILE) wrote",
        hint="name the monitor's file; without --history, the file is read as rollouts",
    )
