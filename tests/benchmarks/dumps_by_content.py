"""Dumps of small models, sound and with one mistake in all layers: what the search by content makes of them.

    python -m tests.benchmarks.dumps_by_content [PATTERN]

Prints a line for each dump (checkpoint, mistake, what was dumped, names, dtype): taps found of those there are, false
matches, the first wrong tap by all tensors and by those found, and CPU seconds. PATTERN is a regular expression.
"""

import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product

import torch

from harness.engines.by_content.columns import relative_error
from harness.engines.by_content.hf_run import run_hf
from harness.engines.tensor_folder import finder_of
from harness.formats.checkpoint import embedded_cases
from harness.formats.taps import Kind, Operation
from harness.formats.tensors import NamedTensor
from harness.oracle.model import HFModel, load_model

IDS = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40, 77, 31, 90, 64, 11, 150, 28, 99, 43, 120, 66, 7]
ROUNDINGS = {torch.float32: 2.5e-8, torch.bfloat16: 1.67e-3}
QUERIES_AND_KEYS = tuple(f"{part}{name}" for part in ("q", "k") for name in ("_rope", "_proj", "_norm"))


def _layers(mistake: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    def plant(model: torch.nn.Module) -> None:
        for layer in model.model.layers:
            mistake(layer)

    return plant


def _theta(model: torch.nn.Module) -> None:
    for name, frequencies in model.model.rotary_emb.named_buffers():
        if "inv_freq" in name:
            frequencies.copy_(frequencies**1.4)


def _eps(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        for field in ("eps", "variance_epsilon"):
            if "norm" in name and hasattr(module, field):
                setattr(module, field, 3e-2)


def _scale(layer: torch.nn.Module) -> None:
    layer.self_attn.scaling *= 0.7


def _transposed(layer: torch.nn.Module) -> None:
    weight = layer.self_attn.o_proj.weight
    weight.data = weight.data.T.reshape(weight.shape).clone()


def _no_values(layer: torch.nn.Module) -> None:
    layer.self_attn.v_proj.weight.data.zero_()


def _gain(layer: torch.nn.Module) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda _module, _args, output: output * 1.2)


def _heads(layer: torch.nn.Module) -> None:
    size = layer.self_attn.head_dim

    def swap(_module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        first, second, *rest = args[0].split(size, dim=-1)
        return (torch.cat([second, first, *rest], dim=-1),)

    layer.self_attn.o_proj.register_forward_pre_hook(swap)


MISTAKES: Mapping[str, Callable[[torch.nn.Module], None]] = {
    "sound": lambda _model: None,
    "theta": _theta,
    "eps": _eps,
    **{
        name: _layers(mistake)
        for name, mistake in {
            "scale": _scale,
            "transposed": _transposed,
            "no-values": _no_values,
            "gain": _gain,
            "heads": _heads,
        }.items()
    },
}


def _neighbours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_options: object) -> object:
    """Rotate neighbouring elements: the wrong rotation for HF's weights."""
    half = cos.shape[-1] // 2
    cos, sin = (part[..., :half].repeat_interleave(2, -1).unsqueeze(1) for part in (cos, sin))
    turned = (torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) for x in (q, k))
    return tuple(x * cos + y * sin for x, y in zip((q, k), turned, strict=True))


@contextmanager
def _planted(hf: HFModel, mistake: str) -> Iterator[None]:
    if mistake != "layout":
        MISTAKES[mistake](hf.model)
        yield
        return
    code = sys.modules[type(hf.model).__module__]
    before, code.apply_rotary_pos_emb = code.apply_rotary_pos_emb, _neighbours
    try:
        yield
    finally:
        code.apply_rotary_pos_emb = before


def _is_dumped(operation: Operation, what: str) -> bool:
    is_outside, last = operation.layer is None, operation.site.rpartition(".")[2]
    return {
        "all": True,
        "modules": ":" not in operation.source and "@" not in operation.source,
        "blocks": is_outside or operation.site == "output",
        "sparse": is_outside or last in ("output", "o_proj", "down_proj", "experts") or last.endswith("layernorm"),
        "no-embedding": operation.kind is not Kind.EMBEDDING and ":" not in operation.source,
        "attention": is_outside or last in ("q_rope", "k_rope", "attention", "v_proj", "o_proj"),
    }[what]


def _name(tap: str, at: int, style: str) -> str:
    if style == "numbers":
        return f"t{at * 7919 % 10007:05d}"
    return re.sub(r"model\.layers\.(\d+)\.", r"blk.\1.", tap).replace("self_attn.", "attn_").replace("mlp.", "ffn_")


def _dump(
    model: str, mistake: str, what: str, style: str, dtype: torch.dtype, is_interleaved: bool
) -> tuple[dict[str, torch.Tensor], set[str], list[NamedTensor]]:
    """Return the values of all taps, the taps that are dumped, and the dump."""
    hf = load_model(embedded_cases() / "checkpoints" / model, dtype=dtype, stays=True)
    values: dict[str, torch.Tensor] = {}
    with _planted(hf, mistake):
        run_hf(hf, torch.tensor([IDS]), lambda op, value: values.update({op.tap: value.clone()}))
    values = {tap: value for tap, value in values.items() if hf.graph[tap].kind is not Kind.CHOICE}
    shown = [op for op in hf.graph if op.tap in values and _is_dumped(op, what)]
    size = next(op.shape[-1] for op in hf.graph if op.site == "q_rope")
    tensors = []
    for at, op in enumerate(shown):
        rows = values[op.tap]
        if is_interleaved and op.site.endswith(QUERIES_AND_KEYS):
            rows = rows.reshape(len(rows), -1, 2, size // 2).transpose(-1, -2).reshape(rows.shape)
        tensors.append(NamedTensor(_name(op.tap, at, style), rows))
    if style == "numbers":
        random.Random(1).shuffle(tensors)
    return values, {op.tap for op in shown}, tensors


def _first_wrong(hf: HFModel, rows: Mapping[str, torch.Tensor], rounding: float) -> str:
    """Return the first tap whose rows are not what HF computes from those of others."""
    wrong: list[str] = []

    def look(op: Operation, value: torch.Tensor) -> torch.Tensor | None:
        if op.tap not in rows:
            return None
        if relative_error(rows[op.tap], value) > max(2e-5, 8 * rounding):
            wrong.append(op.tap)
        return rows[op.tap]

    run_hf(hf, torch.tensor([IDS]), look)
    return wrong[0] if wrong else "-"


def cases() -> Iterator[tuple[str, str, str, str, torch.dtype, bool]]:
    """Yield checkpoint, mistake, what is dumped, names, dtype, and whether heads are interleaved."""
    models = ("llama-tiny", "qwen3-tiny", "gemma3-tiny", "qwen3-moe-tiny")
    for model, what, style in product(
        models, ("all", "modules", "blocks", "sparse", "no-embedding"), ("names", "numbers")
    ):
        yield from ((model, mistake, what, style, torch.float32, False) for mistake in ("sound", "theta", "eps"))
    for model, mistake in product(models[:2], ("layout", "scale", "transposed", "no-values", "gain", "heads")):
        yield from ((model, mistake, what, "numbers", torch.float32, False) for what in ("all", "sparse"))
    for model, mistake, what in product(models[:2], ("sound", "theta", "scale", "layout"), ("all", "sparse")):
        yield model, mistake, what, "numbers", torch.bfloat16, False
    for model, mistake, what in product(models[:2], ("sound", "theta"), ("all", "attention")):
        yield model, mistake, what, "names", torch.float32, True


def main(pattern: str = "") -> None:
    """Print the lines and their sum."""
    totals = [0.0] * 7
    for model, mistake, what, style, dtype, is_interleaved in cases():
        words = [model, mistake, what, style, str(dtype).removeprefix("torch."), *["interleaved"] * is_interleaved]
        if not re.search(pattern, "/".join(words)):
            continue
        values, shown, tensors = _dump(model, mistake, what, style, dtype, is_interleaved)
        hf = load_model(embedded_cases() / "checkpoints" / model, dtype=torch.float32, stays=True)
        begin = time.process_time()
        finder = finder_of(tensors, hf, IDS, ROUNDINGS[dtype])
        finder.find()
        seconds = time.process_time() - begin
        rows_by_tap = {tap: finder.rows(tap) for tap in finder.chosen}
        false = [tap for tap, rows in rows_by_tap.items() if not torch.equal(rows, values[tap])]
        truth = _first_wrong(hf, {tap: values[tap] for tap in shown}, ROUNDINGS[dtype])
        first = _first_wrong(hf, rows_by_tap, ROUNDINGS[dtype])
        is_alarm = truth == "-" != first
        row = [1, len(rows_by_tap.keys() & shown), len(shown), len(false), first == truth, is_alarm, seconds]
        totals = [total + number for total, number in zip(totals, row, strict=True)]
        print(
            f"{'/'.join(words):50} {row[1]} of {row[2]}, {row[3]} false; first {first} of {truth}; {seconds:.1f} s",
            flush=True,
        )
    dumps, num_found, there, num_false, right, alarms, seconds = totals
    print(
        f"{dumps:.0f} dumps: {num_found:.0f} of {there:.0f} taps, {num_false:.0f} false, first divergence right in "
        f"{right:.0f}, {alarms:.0f} alarms on sound ones, {seconds:.0f} s"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
