"""The gap between trainer and engine in a training run: read at every step, explained every few steps, stopped at.

The history is a JSON line for each comparison.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from harness.api.arguments import Model, named_as_arguments
from harness.base.files import read_text, writing
from harness.errors import Code, HarnessError
from harness.extensions.rollout.api import RolloutReport, rollout
from harness.extensions.rollout.result import GapHistory, GapStep
from harness.report.document import plain
from harness.results.check import Outcome

if TYPE_CHECKING:
    import torch


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
    num_cut = num_replaced = 0
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
            num_replaced += step.step in steps and steps[step.step].verdict is Outcome.MISMATCH
            steps[step.step] = step
    kept = tuple(steps[at] for at in sorted(steps))
    return GapHistory(file=path.name, steps=kept, num_cut=num_cut, num_replaced=num_replaced)


def _bad(where: object, what: str) -> HarnessError:
    return HarnessError(
        Code.BAD_ROLLOUT_FILE,
        f"this is no history of a training run: {what}",
        where=where,
        expected="JSON lines that harness.RolloutMonitor(history=FILE) wrote",
        hint="name the monitor's file; without --history, the file is read as rollouts",
    )


_LEAST_Z = 3.0
"""Standard errors by which a gap must be above what it may grow to."""


class RolloutMonitor:
    """Splits the gap of a few rollouts every few steps, and raises GapError where a term leaves its floor.

    At the steps between, it reads the gap of all rollouts, if both sides' log probabilities are in them: where the gap
    has grown, the rollouts with the largest gaps are compared at once.
    """

    def __init__(
        self,
        *,
        every: int = 1,
        num_rows: int = 4,
        growth: float = 1.5,
        history: str | Path | None = None,
        raises: bool = True,
        **options: Any,
    ) -> None:
        """Take what holds for the whole run.

        Args:
            every: steps from one comparison to the next.
            num_rows: rollouts that are compared each time.
            growth: by which factor the mean absolute gap may grow, from a comparison on, until the next one is made.
            history: file that gets a JSON line for each comparison: step, verdict, gap, terms, seconds, and their
                share of the time since the line before. At steps between, the verdict is `nothing`, and the gap that of
                all rollouts.
            raises: whether a term outside of its floor ends the run.
            options: further arguments of `harness.rollout`: `dtype`, `layout`, `head`, `device`, ...

        Raises:
            HarnessError: BAD_OPTION.
        """
        for name, value in (("every", every), ("num_rows", num_rows), ("growth", growth)):
            if not value >= 1:
                raise HarnessError(Code.BAD_OPTION, "too few", where=f"{name}=", expected="1 or more", actual=value)
        self.every, self.num_rows, self.growth, self.raises = every, num_rows, growth, raises
        self.options = options
        self.history = None if history is None else Path(history)
        self._ended: float | None = None
        self._most: tuple[float, float] | None = None
        """What the gap may grow to, and the standard error of that, nats; None without both columns."""

    def step(
        self, step: int, rollouts: str | Path | Sequence[Mapping[str, Any]], *, model: Model, **options: Any
    ) -> RolloutReport | None:
        """Compare the rollouts of a step, where it is its turn or their gap has grown.

        Args:
            step: number of the training step.
            rollouts: as `harness.rollout` takes them; rows that were sampled with the model as it is now.
            model: the trainer's module as it is, or a checkpoint of it.
            options: further arguments of `harness.rollout` for this step.

        Returns:
            The report; None where nothing was compared.

        Raises:
            GapError: a term is outside of its floor, or no token was compared.
            HarnessError: as `harness.rollout`; CANNOT_WRITE for the history.
        """
        from harness.extensions.rollout.format import read_rollouts
        from harness.extensions.rollout.waterfall import gap_figures, recorded_gap

        begin = time.perf_counter()
        options = {**self.options, **options}
        with named_as_arguments():
            read = partial(read_rollouts, rollouts, weight_version=options.pop("weight_version", None))
            gap = recorded_gap(read())
            is_due = step % self.every == 0 or (self._most is None and gap is not None)
            if not is_due and (gap is None or not self._has_grown(gap)):
                if gap is not None:
                    document = plain({"verdict": Outcome.NOTHING, "gap": gap_figures(gap), "terms": []})
                    self._keep(step, document, begin)
                return None
            chosen = read(num_rows=self.num_rows, by_gap=not is_due)
        report = rollout(chosen, model=model, **options)
        self._most = None if gap is None else self._growing(gap)
        document = report.as_dict()
        self._keep(step, {name: document[name] for name in ("verdict", "gap", "terms")}, begin)
        if self.raises:
            report.assert_ok()
        return report

    def _growing(self, gap: "torch.Tensor") -> tuple[float, float]:
        return self.growth * float(gap.abs().mean()), self.growth * _standard_error(gap)

    def _has_grown(self, gap: "torch.Tensor") -> bool:
        """Whether the gap, [compared], is larger than it may be, and not by chance."""
        assert self._most is not None
        most, error = self._most
        return float(gap.abs().mean()) > most + _LEAST_Z * math.hypot(error, _standard_error(gap))

    def _keep(self, step: int, document: Mapping[str, Any], begin: float) -> None:
        now = time.perf_counter()
        since, self._ended = now - (begin if self._ended is None else self._ended), now
        if self.history is None:
            return
        line = {"step": step, **document, "seconds": round(now - begin, 4), "share": round((now - begin) / since, 4)}
        with writing(self.history), self.history.open("ab+") as file:
            if file.tell():  # a run that was killed may have left half a line
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(json.dumps(line).encode() + b"\n")


def _standard_error(gap: "torch.Tensor") -> float:
    """Return that of the mean absolute gap."""
    return float(gap.abs().std(correction=0)) / math.sqrt(len(gap))
