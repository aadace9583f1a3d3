"""The draws of a sampler's answers, and the logits of the rows that they are drawn from."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import torch

from harness.base.progress import Progress
from harness.extensions.server.chat.automaton import SPACING, Automaton
from harness.extensions.server.completion import Completion
from harness.extensions.server.sampler.evidence import Draw
from harness.extensions.server.sampler.requests import TOKENS, DrawRequest, SamplerAnswers, SamplerSetting
from harness.extensions.server.truth import Rounding, WalkRows, walk_logits
from harness.oracle.model import HFModel
from harness.oracle.sampling import Past

Draws = Mapping[tuple[int, int], tuple[DrawRequest, Draw]]
"""By the number of the request and the position of the row."""
ReadDraw = Callable[[DrawRequest, Draw, torch.Tensor, torch.Tensor], None]
"""Is given a draw with the logits of its row, [V] float64: the truth's, and those of HF in the server's dtype."""


def draws_of(asked: SamplerAnswers, left_out: Container[str] = ()) -> Draws:
    """Return the draws of all answers, but for settings that are left out."""
    return {
        place: (request, draw)
        for request in asked.requests
        if request.setting.name not in left_out and isinstance(answer := asked.answers[request.number], Completion)
        for place, draw in _draws_of_answer(request, answer, asked.eos)
    }


def _draws_of_answer(
    request: DrawRequest, answer: Completion, eos: Sequence[int]
) -> Iterator[tuple[tuple[int, int], Draw]]:
    """Yield the draws of an answer by their place, with an end of text that the server does not name."""
    tokens: list[tuple[int, ...]] = [(token_id,) for token_id in answer.token_ids[:TOKENS]]
    is_hidden = answer.finish_reason == "stop" and answer.token_ids[-1:] not in [(item,) for item in eos]
    if is_hidden and eos and len(tokens) < TOKENS:
        tokens.append(tuple(eos))
    for step, token_ids in enumerate(tokens):
        past = Past(prompt=request.prompt, answer=answer.token_ids[:step])
        draw = Draw(request=request.number, step=step, settings=request.settings, past=past, token_ids=token_ids)
        yield (request.number, len(request.prompt) + step - 1), draw


def read_draws(
    hf: HFModel,
    draws: Draws,
    read: ReadDraw,
    *,
    truth: str,
    progress: Progress,
    label: str,
    cache: Rounding | None = None,
) -> None:
    """Run a model along all answers, and show the logits of each draw's row.

    `read` is given each draw once, and `progress` the `label` of what is being done. `cache` is that of `walk_logits`.
    """
    walks: dict[int, tuple[list[int], list[int]]] = {}
    for (number, position), (request, draw) in draws.items():
        ids, positions = walks.setdefault(number, ([], []))
        ids[:] = [*request.prompt, *draw.past.answer]
        positions.append(position)
    num_done = 0

    def read_rows(rows: WalkRows, logits: torch.Tensor, control: torch.Tensor) -> None:
        nonlocal num_done
        for row, place in enumerate(rows):
            read(*draws[place], logits[row], control[row])
        num_done += len(rows)
        progress(label, num_done, len(draws))

    if walks:
        walk_logits(hf, walks, read_rows, truth=truth, cache=cache)


_Item = tuple[tuple[int, int], tuple[DrawRequest, Draw]]
"""A place of `Draws`, with the request and the draw there."""
_Answer = list[_Item]


def bind_to_schemas(draws: Draws, automaton: Automaton) -> Draws:
    """Return draws with the tokens that a schema allows there, where their setting has one.

    Raises:
        HarnessError: BAD_SCHEMA.
    """
    answers: dict[SamplerSetting, list[_Answer]] = {}
    for (setting, _), items in groupby(draws.items(), key=lambda item: (item[1][0].setting, item[1][0].number)):
        answers.setdefault(setting, []).append(list(items))
    bound: dict[tuple[int, int], tuple[DrawRequest, Draw]] = {}
    for setting, of_setting in answers.items():
        schema = setting.schema
        bound.update(chain(*of_setting) if schema is None else _bound_draws(of_setting, schema, automaton))
    return bound


def _bound_draws(answers: Sequence[_Answer], schema: Mapping[str, Any], automaton: Automaton) -> Iterator[_Item]:
    """Yield the draws of a setting with the tokens that its schema allows there.

    A draw outside of the schema is the last one of its answer: nothing says what may follow. Where whitespace may
    stand is the server's to choose; the strictest convention that fits most answers is taken.
    """
    tokens = [[draw.token_ids[0] for _, (_, draw) in answer] for answer in answers]

    def misfit(spacing: str) -> int:
        return sum(automaton.num_taken(schema, spacing, token_ids) < len(token_ids) for token_ids in tokens)

    spacing = min([*SPACING][::-1], key=misfit)
    for answer, ids in zip(answers, tokens, strict=True):
        for place, (request, draw) in answer[: automaton.num_taken(schema, spacing, ids) + 1]:
            yield place, (request, _bound(draw, schema, spacing, automaton))


def _bound(draw: Draw, schema: Mapping[str, Any], spacing: str, automaton: Automaton) -> Draw:
    allowed = automaton.allowed(schema, spacing, draw.past.answer).nonzero()[0].tolist()
    return replace(draw, settings=replace(draw.settings, grammar=tuple(allowed)))
