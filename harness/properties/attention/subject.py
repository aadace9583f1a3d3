"""An attention function under test with what it declares, and a batch for it as a program of torch alone."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.properties.attention.adapter import KEYWORDS, OPTIONAL
from harness.properties.attention.case import (
    FOCUSES,
    MOST_ROUNDED_SCORE,
    AttentionCase,
    Served,
    Tensors,
    sizes_of,
)
from harness.properties.core.falsify import Target, calling
from harness.properties.core.findings import Counterexample


def program(target: Target, case: AttentionCase, *parts: Iterable[str]) -> str:
    """Join the lines after those that make the adapter and the tensors of a case."""
    opening = ["import torch", *target.opening(), *tensor_lines(case)]
    return "\n".join([*opening, *(line for part in parts for line in part)]) + "\n"


def tensor_lines(case: AttentionCase) -> list[str]:
    """Make `q`, `k_cache` and `v_cache` of the same bits as `AttentionCase.tensors` does."""
    shape = f"{case.num_blocks}, {case.block_size}, {case.num_kv_heads}, {case.head_dim}"
    owned = case.owned_slots()
    lines = [
        "",
        f"generator = torch.Generator().manual_seed({case.seed})",
        _draw("q", f"{case.num_rows}, {case.num_heads}, {case.head_dim}", case.query_level, case),
        _draw("k_cache", shape, case.key_level, case),
        _draw("v_cache", shape, case.value_level, case),
        f"block_tables, query_lens, context_lens = {case.block_tables}, {list(case.query_lens)}, "
        f"{list(case.context_lens)}",
    ]
    if case.placement:
        inverse = sorted(range(case.num_blocks), key=case.order.__getitem__)
        lines += [f"k_cache, v_cache = k_cache[{inverse}], v_cache[{inverse}]  # blocks in another order"]
    if not owned.all():
        free = [tuple(slot) for slot in (~owned).nonzero().tolist()]
        lines += [
            f"for block, offset in {free}:  # unallocated slots",
            f'    k_cache[block, offset] = v_cache[block, offset] = float("{case.garbage}")',
        ]
    if case.device != "cpu":
        lines += [f'q, k_cache, v_cache = (x.to("{case.device}") for x in (q, k_cache, v_cache))']
    return lines


def call_lines(target: Target, case: AttentionCase, out: str = "out") -> list[str]:
    """Call `attend`, or the function itself, on the tensors."""
    function = f"{target.name}.attend" if target.offers("attend") else target.name
    options = "".join(f", {name}={value!r}" for name, value in case.options.items())
    lens = "block_tables=block_tables, query_lens=query_lens, context_lens=context_lens"
    return [f"{out} = {function}(", f"    q, k_cache, v_cache, {lens}{options}", ")"]


def definition_lines(case: AttentionCase, row: int, head: int, bound: float) -> list[str]:
    """Compute one head of one row in float64, and assert that the output is within its bound."""
    if not bound:
        return ["", f"assert not out[{row}].any()  # it sees no key"]
    request, _, position = next(place for place in case.rows() if place[1] == row)
    size, kv_head = case.block_size, head // case.group_size
    first = 0 if case.window is None else max(0, position - case.window + 1)
    table = case.block_tables[request]
    slots = [(table[i // size], i % size) for i in range(first, position + 1)]
    exact = "double()" if case.device == "cpu" else "double().cpu()"
    score = f"k @ q[{row}, {head}].{exact} * {case.true_scale!r}"
    if case.softcap is not None:
        score = f"{case.softcap!r} * torch.tanh({score} / {case.softcap!r})"
    return [
        "",
        f"# row {row} is position {position} of request {request}; query head {head} reads KV head {kv_head}",
        f"slots = {_wrapped(slots)}",
        f"k, v = (torch.stack([x[block, offset, {kv_head}] for block, offset in slots]).{exact}"
        " for x in (k_cache, v_cache))",
        f"expected = torch.softmax({score}, dim=0) @ v",
        f"error = (out[{row}, {head}].{exact} - expected).norm() / expected.norm() / "
        f"{rounding_unit(case.torch_dtype):.4g}",
        'print(f"{error:.3g} roundings")',
        f"assert error <= {bound:.3g}",
    ]


def _draw(name: str, shape: str, level: float, case: AttentionCase) -> str:
    drawn = f"torch.randn({shape}, generator=generator)"
    if level != 1:
        drawn = f"({drawn} * {level!r})"
    return f"{name} = {drawn}" if case.dtype == "float32" else f"{name} = {drawn}.to(torch.{case.dtype})"


def _wrapped(slots: Sequence[tuple[int, int]]) -> str:
    """Write many slots in lines of ten."""
    if len(slots) <= 10:
        return str(list(slots))
    rows = [", ".join(map(str, slots[at : at + 10])) for at in range(0, len(slots), 10)]
    return "[\n    " + ",\n    ".join(rows) + ",\n]"


class AttentionUnderTest(Target):
    """The object that `--attention` names: a function, or a class or object with a method `attend`.

    Raises:
        HarnessError: BAD_ADAPTER: it is neither.
    """

    def __init__(self, named: Any) -> None:
        super().__init__(named, "attention")
        self.method = "attend" if self.offers("attend") else "__call__"
        if not self.offers(self.method):
            raise HarnessError(
                Code.BAD_ADAPTER, "the adapter lacks attend", where="--attention", expected="a function, or a class "
                "with a method attend", actual=type(self.adapter).__name__, hint="docs/test-your-attention.md has one",
            )  # fmt: skip
        self.rounds_scores = bool(self.declares("rounds_scores", False))
        defaults = Served()
        self.served = Served(
            dtypes=tuple(self.declares("dtypes", defaults.dtypes)),
            head_dims=tuple(self.declares("head_dims", defaults.head_dims)),
            block_sizes=tuple(self.declares("block_sizes", defaults.block_sizes)),
            group_sizes=tuple(self.declares("group_sizes", defaults.group_sizes)),
            device=str(self.declares("device", defaults.device)),
            keywords=frozenset(name for name in KEYWORDS if self.takes(self.method, name)),
            rounds_scores=self.rounds_scores,
            has_masked_rows=bool(self.declares("serves_masked_rows", False)),
            hides_keywords=self.hides_parameters(self.method),
        )

    def attend(self, case: AttentionCase, tensors: Tensors) -> torch.Tensor:
        """Return [T, N, H] on the CPU.

        Raises:
            Counterexample: it raises, writes to its inputs, or gives another shape or dtype.
        """
        return self.attend_requests(case, tensors, range(len(case.query_lens)))

    def attend_requests(self, case: AttentionCase, tensors: Tensors, requests: Sequence[int]) -> torch.Tensor:
        """Return the rows of only some requests of a case, `q_TNH` holding theirs alone; raises as `attend`."""
        tables, query_lens, context_lens = (
            [values[request] for request in requests]
            for values in (case.block_tables, case.query_lens, case.context_lens)
        )
        passed = {"q": tensors.q_TNH, "k_cache": tensors.k_cache_BSKH, "v_cache": tensors.v_cache_BSKH}
        before = {name: tensor.clone() for name, tensor in passed.items()}
        with calling("attend", lambda: program(self, case, call_lines(self, case))):
            out = self._function(self.method)(
                tensors.q_TNH,
                tensors.k_cache_BSKH,
                tensors.v_cache_BSKH,
                block_tables=tables,
                query_lens=query_lens,
                context_lens=context_lens,
                **case.options,
            )
        for name in (name for name, tensor in passed.items() if not _is_same(tensor, before[name])):
            copying = ["", f"before = {name}.clone()"]
            ending = ["", f"assert torch.equal({name}.view(torch.uint8), before.view(torch.uint8))  # NaN among it"]
            what = f"it writes to {name}, which is not its own"
            raise Counterexample(what, program(self, case, copying, call_lines(self, case), ending))
        expected, actual = (tuple(tensors.q_TNH.shape), case.torch_dtype), (tuple(out.shape), out.dtype)
        if actual != expected:
            ending = ["", f"assert (tuple(out.shape), out.dtype) == {expected}"]
            what = f"expected {expected[1]} {list(expected[0])}, actual {actual[1]} {list(actual[0])}"
            raise Counterexample(what, program(self, case, call_lines(self, case), ending))
        return torch.as_tensor(out).detach().cpu()


def _is_same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether all bits are as they were; slots that nobody wrote hold NaN."""
    return torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


def not_checked(named: Any, size_seed: int) -> list[str]:
    """Name what is not checked of an attention function, and why; the seed is that of the sizes of a day."""
    target = AttentionUnderTest(named)
    refused = {focus: target.served.refusal(focus) for focus in FOCUSES}
    lines = [f"{FOCUSES[focus]}: {refusal}" for focus, refusal in refused.items() if refusal]
    lines += [f"no {signature}" for method, signature in OPTIONAL.items() if not target.offers(method)]
    if not target.declares("is_batch_invariant", False):
        lines.append("that a request has the same bits alone and in a batch: it does not declare is_batch_invariant")
    if target.rounds_scores:
        lines.append(f"scores beyond {MOST_ROUNDED_SCORE:g}: it declares rounds_scores")
    drawn = " and ".join(_sizes(served) for served in (target.served, sizes_of(target.served, size_seed)))
    lines.append(f"sizes other than {drawn} (--size-seed {size_seed})")
    return [f"attention: {line}" for line in lines]


def _sizes(served: Served) -> str:
    heads, blocks, groups = (
        ", ".join(map(str, sorted(sizes))) for sizes in (served.head_dims, served.block_sizes, served.group_sizes)
    )
    return (
        f"heads of {heads}, blocks of {blocks}, groups of {groups}, {served.most_requests} requests, "
        f"{served.longest_context} tokens"
    )
