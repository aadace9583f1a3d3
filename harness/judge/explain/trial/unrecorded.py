"""Attention that was not recorded, and that another operation was judged through: the mistake may be its own.

`R` rows, `W` elements of a row of such an operation, `V` elements of a row of the one that was judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from harness.formats.taps import Kind, Operation
from harness.judge.compare.evidence import histories
from harness.judge.explain.attention import masks, softmax, unrecorded
from harness.judge.explain.core.rerun import Rerun
from harness.judge.explain.core.wrong_operation import Downstream, Explain, WrongOperation

EXPLANATIONS: Mapping[Kind, Sequence[Explain]] = {
    Kind.ATTENTION: (
        unrecorded.rotated_otherwise,
        unrecorded.rotated_though_none,
        masks.causal_mask_off,
        masks.mask_misaligned,
        masks.wrong_window,
        masks.padding_attended,
        softmax.wrong_scale,
        softmax.bias_added,
        softmax.coarse_softmax,
        softmax.left_out,
        softmax.other_cap,
        softmax.other_sinks,
    ),
}
"""Explanations for what was not recorded: its parameters, not its kernel."""


def unrecorded_operation(wrong: WrongOperation) -> tuple[WrongOperation, torch.Tensor] | None:
    """Return the attention that an operation was judged through, and which wrong rows it has.

    None if there is none, or several.
    """
    between = [wrong.graph[tap] for tap in wrong.unrecorded if wrong.graph[tap].kind in EXPLANATIONS]
    if len(between) != 1 or wrong.rerun is None or wrong.views:
        return None
    operation, places = between[0], wrong.rerun.places(wrong.rows)
    wrong.rerun.run()
    if operation.tap not in wrong.rerun.values or bool((places < 0).all()):
        return None
    return _attention(wrong, wrong.rerun, operation, places)


def _attention(
    wrong: WrongOperation, rerun: Rerun, attention: Operation, places: torch.Tensor
) -> tuple[WrongOperation, torch.Tensor] | None:
    if attention.tap not in rerun.calls:
        return None
    views, kept = histories(rerun.part_inputs.batch, rerun.calls[attention.tap], places[places >= 0])
    where = {place: at for at, place in enumerate(places.tolist())}
    order = torch.tensor([where[place] for place in kept.tolist()])
    inner = _inner(wrong, rerun, attention, kept, order)
    if _is_direct(wrong, attention):
        error = wrong.actual[order] - wrong.expected[order]
        inner = replace(inner, actual=_guess(wrong, error, inner.expected))
    return replace(inner, views=views), order


def _inner(
    wrong: WrongOperation,
    rerun: Rerun,
    operation: Operation,
    places: torch.Tensor,
    order: torch.Tensor,
) -> WrongOperation:
    """Return the operation at some places, with what was recorded after it."""
    behind, expected = wrong.take(order), _rows(rerun, operation.tap, places)

    def push(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        direct = wrong.replay([output], behind.positions[rows]) if _is_direct(wrong, operation) else None
        return rerun.run({operation.tap: (places[rows], output)})[places[rows]] if direct is None else direct

    return replace(
        behind,
        operation=operation,
        actual=expected,
        expected=expected,
        inputs=[],
        downstream=Downstream(tap=operation.tap, actual=behind.actual, push=push),
    )


def _rows(rerun: Rerun, tap: str, places: torch.Tensor) -> torch.Tensor:
    return rerun.values[tap][places.to(rerun.hf.device)].flatten(1).to("cpu", torch.float64)


def _is_direct(wrong: WrongOperation, operation: Operation) -> bool:
    """Whether what was judged is a product that reads the operation."""
    return wrong.operation.kind is Kind.LINEAR and wrong.operation.inputs == (operation.tap,)


def _guess(wrong: WrongOperation, error: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the context nearest to what should be that gives what the product after it gave, [R, W]."""
    weight = wrong.weight(wrong.operation.tap)
    if weight is None:
        return expected
    context: torch.Tensor = expected + torch.linalg.lstsq(weight, error.T, driver="gelsd").solution.T
    return context
