"""A batch for an attention function as a program, with torch and the function under test in it and nothing else."""

from collections.abc import Iterable, Sequence

from harness.base.metrics import rounding_unit
from harness.properties.attention.case import AttentionCase
from harness.properties.core.falsify import Target


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
