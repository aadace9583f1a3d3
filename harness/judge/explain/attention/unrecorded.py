"""Attention that was not recorded: its output is seen only through the recorded operation that reads it.

`R` rows, `W` elements of a row of attention, `V` elements of a row of the operation that reads it.
"""

from dataclasses import replace

import torch

from harness.formats.taps import Kind
from harness.judge.compare.evidence import histories
from harness.judge.explain.core.failure import Beyond, Failure

PARAMETERS = ("attention.rotary", "attention.scores", "attention.caps")
"""Rooms of causes that are tried on unrecorded attention: what it is told to do, and not how it does it."""


def unrecorded_attention(failure: Failure) -> tuple[Failure, torch.Tensor] | None:
    """Return the failure of the attention that an operation was judged through, and the numbers of its rows.

    None if there is none, or several.
    """
    rerun = failure.rerun
    between = [failure.graph[tap] for tap in failure.unrecorded if failure.graph[tap].kind is Kind.ATTENTION]
    if rerun is None or len(between) != 1:
        return None
    attention, places = between[0], rerun.places(failure.rows)
    rerun.run()
    if attention.tap not in rerun.calls or bool((places < 0).all()):
        return None
    found, kept = histories(rerun.scene.batch, rerun.calls[attention.tap], places[places >= 0])
    where = {place: at for at, place in enumerate(places.tolist())}
    order = torch.tensor([where[place] for place in kept.tolist()])
    expected = rerun.values[attention.tap][kept.to(rerun.hf.device)].flatten(1).to("cpu", torch.float64)
    actual = failure.actual[order]
    is_direct = failure.operation.kind is Kind.LINEAR and failure.operation.inputs == (attention.tap,)

    def push(context: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        given = failure.replay([context], failure.positions[order][rows]) if is_direct else None
        return rerun.run({attention.tap: (kept[rows], context)})[kept[rows]] if given is None else given

    inner = replace(
        failure,
        operation=attention,
        rows=failure.rows.select(order),
        actual=_guess(failure, actual - failure.expected[order], expected) if is_direct else expected,
        expected=expected,
        inputs=[],
        views=found,
        beyond=Beyond(actual=actual, push=push),
    )
    return inner, order


def _guess(failure: Failure, error: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the context nearest to what should be that gives what the product after it gave, [R, W]."""
    weight = failure.weight(failure.operation.tap)
    if weight is None:
        return expected
    context: torch.Tensor = expected + torch.linalg.lstsq(weight, error.T, driver="gelsd").solution.T
    return context
