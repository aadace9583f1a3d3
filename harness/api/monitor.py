"""The gap between trainer and engine in a training run: measured every few steps, kept, and stopped at."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.api.arguments import Model
from harness.api.training import RolloutReport, rollout
from harness.base.files import writing
from harness.errors import Code, HarnessError


class RolloutMonitor:
    """Splits the gap of a few rollouts every few steps, and raises GapError where a term leaves its floor."""

    def __init__(
        self,
        *,
        every: int = 1,
        num_rows: int = 4,
        history: str | Path | None = None,
        raises: bool = True,
        **options: Any,
    ) -> None:
        """Take what holds for the whole run.

        Args:
            every: steps from one comparison to the next.
            num_rows: rollouts that are compared each time.
            history: file that gets a JSON line for each comparison: step, verdict, gap, terms, seconds, and their
                share of the time since the comparison before.
            raises: whether a term outside of its floor ends the run.
            options: further arguments of `harness.rollout`: `dtype`, `layout`, `head`, `device`, ...

        Raises:
            HarnessError: BAD_OPTION.
        """
        for name, value in (("every", every), ("num_rows", num_rows)):
            if value < 1:
                raise HarnessError(Code.BAD_OPTION, "too few", where=f"{name}=", expected="1 or more", actual=value)
        self.every, self.num_rows, self.raises, self.options = every, num_rows, raises, options
        self.history = None if history is None else Path(history)
        self._ended: float | None = None

    def step(
        self, step: int, rollouts: str | Path | Sequence[Mapping[str, Any]], *, model: Model, **given: Any
    ) -> RolloutReport | None:
        """Compare the rollouts of a step, where it is its turn.

        Args:
            step: number of the training step.
            rollouts: as `harness.rollout` takes them; rows that were sampled with the model as it is now.
            model: the trainer's module as it is, or a checkpoint of it.
            given: further arguments of `harness.rollout` for this step.

        Returns:
            The report; None where it is not this step's turn.

        Raises:
            GapError: a term is outside of its floor, or no token was compared.
            HarnessError: as `harness.rollout`; CANNOT_WRITE for the history.
        """
        if step % self.every:
            return None
        begin = time.perf_counter()
        report = rollout(rollouts, model=model, num_rows=self.num_rows, **{**self.options, **given})
        self._keep(step, report, begin)
        if self.raises:
            report.assert_ok()
        return report

    def _keep(self, step: int, report: RolloutReport, begin: float) -> None:
        now = time.perf_counter()
        since, self._ended = now - (begin if self._ended is None else self._ended), now
        if self.history is None:
            return
        found = report.as_dict()
        line = {
            "step": step,
            **{name: found[name] for name in ("verdict", "gap", "terms")},
            "seconds": round(now - begin, 3),
            "share": round((now - begin) / since, 4),
        }
        with writing(self.history), self.history.open("ab+") as file:
            if file.tell():  # a run that was killed may have left half a line
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(json.dumps(line).encode() + b"\n")
