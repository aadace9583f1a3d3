"""A mixer with a state in decode alone: it goes on from the right state of each prompt.

So code that runs in decode can be changed by itself: a prompt is computed by other code of HF, which is right.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.judge.compare.align import Rows
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.states.recurrence import Recurrence, by_step, state_of
from harness.oracle.caches import new_cache

_Step = tuple[Rows, dict[str, torch.Tensor]]
"""One row, and what was recorded of it."""
_Begun = tuple[Any, Sequence[_Step]]
"""HF's cache after a prompt, and the steps from the first wrong row on."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Steps of one row each, and the states that they go on from."""

    recurrence: Recurrence
    begun: Sequence[_Begun]

    def run(self) -> torch.Tensor:
        """Return what the operation gives at the wrong rows, [R, W] float64."""
        outputs = dict[tuple[int, int], torch.Tensor]()
        for state, steps in self.begun:
            cache = copy.deepcopy(state)
            for rows, values in steps:
                outputs[rows.places()[0]] = self.recurrence.run_on(rows, values, cache)[0]
        return torch.stack([outputs[place] for place in self.recurrence.wrong.rows.places()])

    def first(self) -> tuple["Decode", torch.Tensor]:
        """Return the first wrong row of the first request alone, and its number [1]."""
        state, (step, *_) = self.begun[0]
        wrong = self.recurrence.wrong
        number = torch.tensor([wrong.rows.places().index(step[0].places()[0])])
        return Decode(replace(self.recurrence, wrong=wrong.take(number)), [(state, [step])]), number


def decode_of(wrong: WrongOperation) -> Decode | None:
    """Return the decode of the mixer behind an operation; None if it has no state, or other rows are wrong, too."""
    recurrence = state_of(wrong) if wrong.are_single else None
    if recurrence is None:
        return None
    begun = [_begun(recurrence, rows) for rows in recurrence.histories]
    known = [item for item in begun if item is not None]
    return Decode(recurrence, known) if len(known) == len(begun) else None


def _begun(recurrence: Recurrence, rows: Rows) -> _Begun | None:
    """Return where a request's first wrong row is; None if a row before or after it was not recorded, or is no decode.

    Args:
        recurrence: the mixer.
        rows: of the request, up to its last wrong one.
    """
    is_wrong, cache = set(recurrence.wrong.rows.places()), new_cache(recurrence.wrong.hf)
    first = next(at for at, place in enumerate(rows.places()) if place in is_wrong)
    prompt, later = (rows.select(part) for part in torch.arange(len(rows)).tensor_split([first]))
    steps = by_step(later)
    recorded = [recurrence.recorded(step) for step in (prompt, *steps) if len(step)]
    values = [item for item in recorded if item is not None]
    if cache is None or len(values) <= len(steps) or max(map(len, steps)) > 1:
        return None
    recurrence.run_on(prompt, values[0], cache)
    return cache, list(zip(steps, values[1:], strict=True))
