"""The draws of answers that a JSON schema binds: what it allows at each of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

from harness.extensions.server.chat.structured.automaton import SPACING, Automaton
from harness.extensions.server.sampler.draws import Draws
from harness.extensions.server.sampler.evidence import Draw
from harness.extensions.server.sampler.settings import DrawRequest, SamplerSetting

_Item = tuple[tuple[int, int], tuple[DrawRequest, Draw]]
"""A place of `Draws`, with the request and the draw there."""
_Answer = list[_Item]


def within_schemas(draws: Draws, automaton: Automaton) -> Draws:
    """Return draws with the tokens that a schema allows there, where their setting has one.

    Raises:
        HarnessError: BAD_SCHEMA.
    """
    answers: dict[SamplerSetting, list[_Answer]] = {}
    for (setting, _), own in groupby(draws.items(), key=lambda item: (item[1][0].setting, item[1][0].number)):
        answers.setdefault(setting, []).append(list(own))
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
    tokens = [[draw.token_ids[0] for _, (_, draw) in own] for own in answers]

    def misfit(spacing: str) -> int:
        return sum(automaton.num_taken(schema, spacing, own) < len(own) for own in tokens)

    spacing = min([*SPACING][::-1], key=misfit)
    for own, ids in zip(answers, tokens, strict=True):
        for place, (request, draw) in own[: automaton.num_taken(schema, spacing, ids) + 1]:
            yield place, (request, _bound(draw, schema, spacing, automaton))


def _bound(draw: Draw, schema: Mapping[str, Any], spacing: str, automaton: Automaton) -> Draw:
    allowed = automaton.allowed(schema, spacing, draw.past.answer).nonzero()[0].tolist()
    return replace(draw, settings=replace(draw.settings, grammar=tuple(allowed)))
