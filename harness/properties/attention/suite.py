"""Properties of attention functions: what must hold for every batch, whatever computes it.

Each `check_` takes what `--attention` names and Hypothesis settings, and raises `PropertyError` with the smallest
batch that breaks the property.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st

from harness.base.metrics import rounding_unit, row_metrics
from harness.properties.attention.batches import FOCUSES, GARBAGE, batches
from harness.properties.attention.case import AttentionCase, Tensors
from harness.properties.attention.definition import Expected, expected_output
from harness.properties.attention.program import call_lines, definition_lines, program, tensor_lines
from harness.properties.attention.subject import AttentionUnderTest
from harness.properties.core.falsify import falsify
from harness.properties.core.findings import Counterexample, Rejections


def check_definition(named: Any, settings: Settings, focus: str = "any") -> Rejections:
    """Hold every head of every row of batches of a kind (a key of `FOCUSES`) to the definition in float64.

    Raises:
        PropertyError: one is further off than rounding can explain.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)

    def check(case: AttentionCase) -> None:
        tensors = case.tensors()
        expected = expected_output(case, tensors, rounds_scores=target.rounds_scores)
        out_TNH = target.attend(case, tensors)
        worst = worst_head(case, out_TNH, expected)
        if worst is not None:
            row, head, error, bound = worst
            ending = definition_lines(case, row, head, bound)
            raise Counterexample(
                _off(case, row, head, error, bound), program(target, case, call_lines(target, case), ending)
            )

    return falsify(f"attention equals its definition: {FOCUSES[focus]}", check, batches(target.served, focus), settings)


def worst_head(case: AttentionCase, out_TNH: torch.Tensor, expected: Expected) -> tuple[int, int, float, float] | None:
    """Return row, head, error and bound in roundings of the head that exceeds its bound the most; None: none does."""
    metrics = row_metrics(out_TNH.flatten(0, 1), expected.out_TNH.flatten(0, 1).cpu())
    error = (metrics.relative_l2 / rounding_unit(case.torch_dtype)).nan_to_num(nan=math.inf)
    bound = expected.bound_TN.flatten().cpu()
    excess = torch.where(error <= bound, 0.0, error / bound)
    worst = int(excess.argmax())
    if excess[worst] == 0:
        return None
    row, head = divmod(worst, case.num_heads)
    return row, head, float(error[worst]), float(bound[worst])


def _off(case: AttentionCase, row: int, head: int, error: float, bound: float) -> str:
    request, _, position = next(place for place in case.rows() if place[1] == row)
    where = f"row {row} (request {request}, position {position}), query head {head}"
    if not bound:
        return f"{where}: it sees no key, and is not 0"
    found = f"{error:.3g} roundings to {case.dtype}" if math.isfinite(error) else "it is not finite"
    return f"{where}: {found}, against a bound of {bound:.3g}"


def check_placement(named: Any, settings: Settings) -> Rejections:
    """Compare the bits of batches whose blocks lie elsewhere, with other garbage in the unallocated slots.

    Raises:
        PropertyError: they differ.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)

    def check(moves: tuple[AttentionCase, AttentionCase]) -> None:
        case, moved = moves
        outs = [target.attend(move, move.tensors()) for move in moves]
        if torch.equal(*outs):
            return
        row, head = (int(i) for i in (outs[0] != outs[1]).any(dim=-1).nonzero()[0])
        ending = [
            *call_lines(target, case), *tensor_lines(moved), *call_lines(target, moved, out="moved"),
            "", "assert torch.equal(moved, out)",
        ]  # fmt: skip
        raise Counterexample(f"row {row}, query head {head} has other bits elsewhere", program(target, case, ending))

    return falsify("the place of the blocks changes no bit", check, batches(target.served).flatmap(_moved), settings)


def _moved(case: AttentionCase) -> st.SearchStrategy[tuple[AttentionCase, AttentionCase]]:
    """Return pairs of a case and the same one placed otherwise."""
    elsewhere = st.builds(
        lambda placement, garbage: replace(case, placement=placement, garbage=garbage),
        st.integers(0, 99),
        st.sampled_from(GARBAGE),
    )
    return st.tuples(st.just(case), elsewhere)


def check_batching(named: Any, settings: Settings) -> Rejections:
    """Compare the bits of each request alone and in a batch; nothing is checked where their equality is not declared.

    Raises:
        PropertyError: they differ.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)
    if not target.declares("is_batch_invariant", False):
        return Rejections()

    def check(case: AttentionCase) -> None:
        tensors = case.tensors()
        together = target.attend(case, tensors).split(list(case.query_lens))
        chunks = tensors.q_TNH.split(list(case.query_lens))
        for request, (q_TNH, in_batch) in enumerate(zip(chunks, together, strict=True)):
            own = Tensors(q_TNH=q_TNH, k_cache_BSKH=tensors.k_cache_BSKH, v_cache_BSKH=tensors.v_cache_BSKH)
            if not torch.equal(target.attend_requests(case, own, [request]), in_batch):
                raise Counterexample(f"request {request} has other bits alone", _alone(target, case, request))

    return falsify("a request has the same bits alone and in a batch", check, batches(target.served), settings)


def _alone(target: AttentionUnderTest, case: AttentionCase, request: int) -> str:
    start = sum(case.query_lens[:request])
    rows, own = f"{start}:{start + case.query_lens[request]}", f"{request}:{request + 1}"
    again = [
        "",
        f"in_batch, q = out[{rows}], q[{rows}]",
        f"block_tables, query_lens, context_lens = (x[{own}] for x in (block_tables, query_lens, context_lens))",
    ]
    ending = ["", "assert torch.equal(alone, in_batch)"]
    calls = [*call_lines(target, case), *again, *call_lines(target, case, out="alone")]
    return program(target, case, calls, ending)
