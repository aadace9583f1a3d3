"""Properties of attention functions: what must hold for every batch, for split and merged parts, and for padding.

Each `check_` takes what `--attention` names and Hypothesis settings, and raises `PropertyError` with the smallest
batch that breaks the property.

Shapes: R requests, T rows, C context tokens, P parts, N query heads, K KV heads, H head dim.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from harness.base.metrics import rounding_unit, row_metrics
from harness.properties.attention.case import FOCUSES, GARBAGE, AttentionCase, Served, Tensors, batches, sizes_of
from harness.properties.attention.definition import Expected, context_of, expected_output, merged_output
from harness.properties.attention.subject import AttentionUnderTest, call_lines, definition_lines, program, tensor_lines
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections


def check_definition(named: Any, settings: Settings, focus: str = "any", *, size_seed: int | None = None) -> Rejections:
    """Compare every head of every row of a kind of batches (a key of `FOCUSES`) with the definition in float64.

    Args:
        named: what `--attention` names.
        settings: of Hypothesis.
        focus: the kind of batches.
        size_seed: seed of other sizes (`sizes_of`); None for the usual ones.

    Raises:
        PropertyError: a head differs by more than rounding can explain.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)
    served = target.served if size_seed is None else sizes_of(target.served, size_seed)

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

    return falsify(f"attention equals its definition: {FOCUSES[focus]}", check, batches(served, focus), settings)


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
    deviation = f"{error:.3g} roundings to {case.dtype}" if math.isfinite(error) else "it is not finite"
    return f"{where}: {deviation}, against a bound of {bound:.3g}"


def check_placement(named: Any, settings: Settings) -> Rejections:
    """Compare the bits of batches with moved blocks and different content in the unallocated slots.

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
    """Return pairs of a case and the same case with its blocks elsewhere."""
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
            request_tensors = Tensors(q_TNH=q_TNH, k_cache_BSKH=tensors.k_cache_BSKH, v_cache_BSKH=tensors.v_cache_BSKH)
            if not torch.equal(target.attend_requests(case, request_tensors, [request]), in_batch):
                raise Counterexample(f"request {request} has other bits alone", _alone(target, case, request))

    return falsify("a request has the same bits alone and in a batch", check, batches(target.served), settings)


def _alone(target: AttentionUnderTest, case: AttentionCase, request: int) -> str:
    start = sum(case.query_lens[:request])
    rows, one = f"{start}:{start + case.query_lens[request]}", f"{request}:{request + 1}"
    again = [
        "",
        f"in_batch, q = out[{rows}], q[{rows}]",
        f"block_tables, query_lens, context_lens = (x[{one}] for x in (block_tables, query_lens, context_lens))",
    ]
    ending = ["", "assert torch.equal(alone, in_batch)"]
    calls = [*call_lines(target, case), *again, *call_lines(target, case, out="alone")]
    return program(target, case, calls, ending)


_PADDING = 100.0
"""Values after the end of a request: finite, like the rows of a padding token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCase:
    """Parts of a split."""

    num_parts: int
    num_rows: int
    num_heads: int
    head_dim: int
    level: float
    """Standard deviation of the logarithms."""
    empty: tuple[int, ...]
    """Parts without keys: output 0, logarithm -inf."""
    seed: int
    device: str

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [P, T, N, H] and logarithms [P, T, N], float32."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.num_parts, self.num_rows, self.num_heads)
        out_PTNH = torch.randn(*shape, self.head_dim, generator=generator)
        log_sum_PTN = torch.randn(*shape, generator=generator) * self.level
        out_PTNH[list(self.empty)], log_sum_PTN[list(self.empty)] = 0.0, -math.inf
        return out_PTNH.to(self.device), log_sum_PTN.to(self.device)

    def lines(self) -> list[str]:
        """Return a program's lines that make them as `out_parts` and `log_sums`."""
        shape = f"{self.num_parts}, {self.num_rows}, {self.num_heads}"
        lines = [
            "",
            f"generator = torch.Generator().manual_seed({self.seed})",
            f"out_parts = torch.randn({shape}, {self.head_dim}, generator=generator)",
            f"log_sums = torch.randn({shape}, generator=generator) * {self.level!r}",
        ]
        if self.empty:
            empty = list(self.empty)
            lines += [f'out_parts[{empty}], log_sums[{empty}] = 0.0, -float("inf")  # parts without keys']
        if self.device != "cpu":
            lines += [f'out_parts, log_sums = out_parts.to("{self.device}"), log_sums.to("{self.device}")']
        return lines


def check_merge(named: Any, settings: Settings) -> Rejections:
    """Compare `merge` with the sum of the parts weighted by exp(logarithm); nothing is checked without it.

    Raises:
        PropertyError: a head of a row is further off than rounding to float32 can explain.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)
    if not target.offers("merge"):
        return Rejections()

    def check(case: MergeCase) -> None:
        opening = ["import torch", *target.opening(), *case.lines(), "out = attention.merge(out_parts, log_sums)"]
        parts = case.tensors()
        with calling("merge", lambda: "\n".join(opening) + "\n"):
            out_TNH = target.adapter.merge(*(part.clone() for part in parts))
        expected = merged_output(*(part.double().cpu() for part in parts))
        bound_TN = expected.bound_TN
        metrics = row_metrics(out_TNH.detach().cpu().flatten(0, 1), expected.out_TNH.flatten(0, 1))
        error = (metrics.relative_l2 / rounding_unit(torch.float32)).nan_to_num(nan=math.inf)
        excess = torch.where(error <= bound_TN.flatten(), 0.0, error / bound_TN.flatten())
        worst = int(excess.argmax())
        if excess[worst]:
            row, head = divmod(worst, case.num_heads)
            ending = [
                "",
                f"weights = torch.softmax(log_sums[:, {row}, {head}].double(), dim=0)",
                f"expected = weights @ out_parts[:, {row}, {head}].double()",
                f"error = (out[{row}, {head}] - expected).norm() / expected.norm() / "
                f"{rounding_unit(torch.float32):.4g}",
                'print(f"{error:.3g} roundings")',
                f"assert error <= {float(bound_TN[row, head]):.3g}",
            ]
            what = f"row {row}, head {head}: {float(error[worst]):.3g} roundings, bound {bound_TN[row, head]:.3g}"
            raise Counterexample(what, "\n".join([*opening, *ending]) + "\n")

    return falsify("merged parts are the whole", check, _merges(target.served), settings)


@st.composite
def _merges(draw: DrawFn, served: Served) -> MergeCase:
    num_parts = draw(st.integers(1, 9))
    return MergeCase(
        num_parts=num_parts,
        num_rows=draw(st.integers(1, 4)),
        num_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from(served.head_dims)),
        level=draw(st.sampled_from((1.0, 0.0, 10.0, 100.0, 10000.0))),
        empty=tuple(sorted(draw(st.sets(st.integers(0, num_parts - 1), max_size=num_parts - 1)))),
        seed=draw(st.integers(0, 99)),
        device=served.device,
    )


def check_padded(named: Any, settings: Settings) -> Rejections:
    """Compare every row of a padded batch with the definition; nothing is checked without `attend_padded`.

    Raises:
        PropertyError: a head of a row is further from its definition than rounding can explain.
        HarnessError: BAD_ADAPTER.
    """
    target = AttentionUnderTest(named)
    if not target.offers("attend_padded"):
        return Rejections()

    def check(case: AttentionCase) -> None:
        tensors = case.tensors()
        expected = expected_output(case, tensors, rounds_scores=target.rounds_scores)
        contexts = [
            context_of(tensors.k_cache_BSKH, tensors.v_cache_BSKH, table, context_len)
            for table, context_len in zip(case.block_tables, case.context_lens, strict=True)
        ]
        q = tensors.q_TNH.split(list(case.query_lens))
        padded = [_padded(list(parts)) for parts in (q, *zip(*contexts, strict=True))]
        with calling("attend_padded", lambda: program(target, case, _PADDED_LINES)):
            out = target.adapter.attend_padded(*padded, list(case.query_lens), list(case.context_lens))
        out_TNH = torch.cat([rows[:length] for rows, length in zip(out, case.query_lens, strict=True)]).detach().cpu()
        worst = worst_head(case, out_TNH, expected)
        if worst is not None:
            row, head, error, bound = worst
            what = f"row {row}, query head {head}: {error:.3g} roundings to {case.dtype}, bound {bound:.3g}"
            raise Counterexample(what, program(target, case, _PADDED_LINES, definition_lines(case, row, head, bound)))

    plain = batches(target.served).map(lambda case: replace(case, scale=None, window=None, softcap=None))
    return falsify("a padded batch gives what the packed one does", check, plain, settings)


_PADDED_LINES = [
    "",
    "def padded(parts):",
    "    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=100.0)",
    "",
    "k, v = (",
    "    [x[table].flatten(0, 1)[:n] for table, n in zip(block_tables, context_lens)]",
    "    for x in (k_cache, v_cache)",
    ")",
    "q_padded = padded(q.split(query_lens))",
    "out = attention.attend_padded(q_padded, padded(k), padded(v), query_lens, context_lens)",
    "out = torch.cat([rows[:n] for rows, n in zip(out, query_lens)])",
]


def _padded(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return [R, ...], padded to the longest request."""
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=_PADDING)
