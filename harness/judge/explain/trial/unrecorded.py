"""Attention that was not recorded, and that another operation was judged through: the mistake may be its own.

`R` rows, `W` elements of a row of attention, `V` elements of a row of the operation that was judged.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from harness.formats.taps import Kind, Operation
from harness.judge.compare.evidence import histories
from harness.judge.explain.attention import misread, reads, softmax
from harness.judge.explain.causes import OF_ATTENTION_PARAMETERS, OF_MASK_AND_SCALE
from harness.judge.explain.core.wrong_operation import Downstream, Explain, WrongOperation

OF_UNRECORDED_ATTENTION: Sequence[Explain] = (
    *OF_ATTENTION_PARAMETERS,
    softmax.left_out,
    softmax.other_cap,
    softmax.other_sinks,
)
"""Explanations for attention that was not recorded: its parameters, not its kernel."""
OF_UNSHOWN_ATTENTION: Sequence[Explain] = (
    misread.other_rows,
    reads.cleared_pages,
    reads.another_order,
    reads.coarse_cache,
    reads.other_kv_heads,
    *OF_MASK_AND_SCALE,
)
"""Explanations for attention that HF's interface does not show: of keys and values, too."""


def unrecorded_attention(wrong: WrongOperation) -> tuple[WrongOperation, torch.Tensor] | None:
    """Return the attention that an operation was judged through, and which wrong rows it has.

    None if there is none, or several.
    """
    between = [wrong.graph[tap] for tap in wrong.unrecorded if wrong.graph[tap].kind is Kind.ATTENTION]
    rerun = wrong.rerun if len(between) == 1 and not wrong.views else None
    if rerun is None:
        return None
    attention, places = between[0], rerun.places(wrong.rows)
    rerun.run()
    if attention.tap not in rerun.calls or attention.tap not in rerun.values or bool((places < 0).all()):
        return None
    views, kept = histories(rerun.part_inputs.batch, rerun.calls[attention.tap], places[places >= 0])
    where = {place: at for at, place in enumerate(places.tolist())}
    order = torch.tensor([where[place] for place in kept.tolist()])
    expected = rerun.values[attention.tap][kept.to(rerun.hf.device)].flatten(1).to("cpu", torch.float64)
    behind, is_direct = wrong.take(order), _is_direct(wrong, attention)

    def push(context: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        direct = wrong.replay([context], behind.positions[rows]) if is_direct else None
        return rerun.run({attention.tap: (kept[rows], context)})[kept[rows]] if direct is None else direct

    inner = replace(
        behind,
        operation=attention,
        actual=_guess(wrong, behind.actual - behind.expected, expected) if is_direct else expected,
        expected=expected,
        inputs=[],
        views=views,
        downstream=Downstream(tap=attention.tap, actual=behind.actual, push=push),
    )
    return inner, order


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
