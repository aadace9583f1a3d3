"""The draws of answers that a JSON schema binds: what it allows at each of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.campaigns.sampler.evidence import Draw
from harness.campaigns.structured.automaton import SPACING, Automaton

Places = Sequence[tuple[tuple[int, int], Draw]]
"""Draws of one answer in their order, each with its place."""


def bound_draws(answers: Sequence[Places], schema: Mapping[str, Any], automaton: Automaton) -> Iterator[Places]:
    """Yield the draws of each answer with the tokens that are allowed there.

    A draw outside of the schema is the last one of its answer: nothing says what may follow. Where whitespace may
    stand is the server's to choose; the strictest convention that fits most answers is taken.

    Raises:
        HarnessError: BAD_SCHEMA.
    """
    tokens = [[draw.token_ids[0] for _, draw in own] for own in answers]

    def misfit(spacing: str) -> int:
        return sum(automaton.num_taken(schema, spacing, own) < len(own) for own in tokens)

    spacing = min([*SPACING][::-1], key=misfit)
    for own, ids in zip(answers, tokens, strict=True):
        judged = own[: automaton.num_taken(schema, spacing, ids) + 1]
        yield [(place, _bound(draw, schema, spacing, automaton)) for place, draw in judged]


def _bound(draw: Draw, schema: Mapping[str, Any], spacing: str, automaton: Automaton) -> Draw:
    allowed = automaton.allowed(schema, spacing, draw.past.answer).nonzero()[0].tolist()
    return replace(draw, settings=replace(draw.settings, grammar=tuple(allowed)))
