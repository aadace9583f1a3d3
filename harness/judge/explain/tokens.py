"""Ways to choose a token wrongly from logits that are recorded: of another row, in a coarser dtype, not the largest.

`V` words of the vocabulary.
"""

from collections.abc import Callable, Iterator

import torch

from harness.formats.recording import Recording, Step
from harness.judge.compare.align import step_rows
from harness.results.check import Explanation

_MAX_STEPS = 256


def explain_token(recording: Recording, logits: str, request: int, position: int) -> Explanation | None:
    """Say how the engine came to its choice after a row, from the logits that it recorded; None if it recorded none.

    A choice that is the largest of the engine's own logits is no fault of the choosing: None as well.
    """
    choices = list(_choices(recording, logits))
    wrong = [choice for choice in choices if choice.token != int(choice.logits[choice.row].argmax())]
    here = next((choice for choice in choices if (choice.request, choice.position) == (request, position)), None)
    if here is None or here not in wrong:
        return None
    for cause, holds in _CAUSES.items():
        num_explained = sum(holds(item) for item in wrong)
        if num_explained == len(wrong):
            return _explanation(cause, _rank(here), wrong, num_explained)
    return _explanation("the chosen token is not the largest logit: not greedy", _rank(here), wrong, len(wrong))


class _Choice:
    """A token, the logits [rows, V] of its step, and which of them it was to be chosen from."""

    def __init__(self, request: int, position: int, token: int, row: int, logits: torch.Tensor) -> None:
        self.request, self.position, self.token, self.row, self.logits = request, position, token, row, logits


def _choices(recording: Recording, logits: str) -> Iterator[_Choice]:
    for step in recording.steps[:_MAX_STEPS]:
        if step.sampled is not None and step.has(logits):
            yield from _of_step(step, logits, step.sampled)


def _of_step(step: Step, tap: str, sampled: torch.Tensor) -> Iterator[_Choice]:
    logits, covered = step.tap(tap).to(torch.float64), step.rows_of(tap)
    rows = step_rows(step, tap)
    chosen = sampled if covered is None else sampled[covered]
    for row, token in enumerate(chosen.tolist()):
        if token >= 0:
            yield _Choice(int(rows.request[row]), int(rows.position[row]), token, row, logits)


def _explanation(cause: str, detail: str, wrong: list[_Choice], num_explained: int) -> Explanation:
    places = ", ".join(f"request {item.request} position {item.position}" for item in wrong[:3])
    return Explanation(
        cause=cause,
        scope=f"{len(wrong)} choices: {places}" if len(wrong) > 1 else places,
        num_rows=len(wrong),
        num_explained=num_explained,
        detail=detail,
    )


def _rank(choice: _Choice) -> str:
    row = choice.logits[choice.row]
    if choice.token >= len(row):
        return f"token {choice.token} is not in the vocabulary"
    rank = int((row > row[choice.token]).sum()) + 1
    return f"token {choice.token} has rank {rank}, {float(row.max() - row[choice.token]):.3g} below the largest logit"


def _rounded(dtype: torch.dtype, choice: _Choice) -> bool:
    row = choice.logits[choice.row].to(dtype)
    return choice.token < len(row) and bool(row[choice.token] == row.max())


_CAUSES: dict[str, Callable[[_Choice], bool]] = {
    "the logits are rounded to bfloat16 before the argmax": lambda choice: _rounded(torch.bfloat16, choice),
    "the logits are rounded to float16 before the argmax": lambda choice: _rounded(torch.float16, choice),
    "the token is chosen from the last row's logits": lambda choice: choice.token == int(choice.logits[-1].argmax()),
    "the token is chosen from the first row's logits": lambda choice: choice.token == int(choice.logits[0].argmax()),
    "the token is chosen from another row's logits": lambda choice: (
        choice.token in choice.logits.argmax(dim=1).tolist()
    ),
    "the smallest logit is chosen": lambda choice: choice.token == int(choice.logits[choice.row].argmin()),
    "the second largest logit is chosen": lambda choice: (
        choice.token == int(choice.logits[choice.row].topk(2).indices[1])
    ),
}
