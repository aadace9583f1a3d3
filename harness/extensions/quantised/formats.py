"""The formats in which checkpoints keep quantised weights, in one table: their tensors, shapes, dtypes, and unpacking.

Shapes are written in names of sizes: `out` and `in` are the weight's own, the others are counted from them. Sources:
the compressors of compressed-tensors 0.20, AutoGPTQ's and GPTQModel's QuantLinear, AutoAWQ's packing_utils,
bitsandbytes' QuantState, torchao's Int8Tensor, `convert_moe_packed_tensors` of transformers.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from harness.extensions.quantised.codes import Codes, Words, float4, powers_of_two, unpacked
from harness.extensions.quantised.config import Scheme, misfit
from harness.formats.safetensors_header import TensorEntry

Sizes = dict[str, int]
Entries = Mapping[str, TensorEntry]
Tensors = Mapping[str, torch.Tensor]
Read = Callable[[str], torch.Tensor]
_FLOATS = ("F32", "F16", "BF16")
_EXPONENTS = ("F8_E8M0", "U8")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "tensor": (("one",), ()), "channel": (("out", "one"), ("out",)), "group": (("out", "groups"),),
    "block": (("row_blocks", "column_blocks"),),
}  # fmt: skip
"""Shapes of the scales, by what shares one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a quantised weight."""

    name: str
    """How the unpacking calls it."""
    suffixes: tuple[str, ...]
    """What follows the module's name in the tensor's; one of them is there."""
    dtypes: tuple[str, ...]
    """As safetensors names them."""
    shapes: tuple[tuple[str, ...], ...] | None
    """Each of them will do; None: those of scales, by the scheme."""
    is_needed: Callable[[Scheme], bool] = lambda _scheme: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to keep a quantised weight."""

    title: str
    """The name in the report."""
    parts: tuple[Part, ...]
    """The first holds the codes."""
    sizes: Callable[[Entries, Scheme, Read], Sizes]
    """Counts the sizes that shapes are made of; refuses what does not divide."""
    unpack: Callable[[Tensors, Scheme, Sizes], Codes]
    target: str = ".weight"
    """What follows the module's name in HF's name of the weight."""
    aside: tuple[str, ...] = ()
    """Tensors of a module that say nothing of its weight."""
    may_be_zero: bool = False
    """Whether a block without weights has a scale of zero and codes that are not those of zero."""


def _part(name: str, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[str, ...], **options: Any) -> Part:
    return Part(name=name, suffixes=(suffix,), dtypes=dtypes, shapes=shapes, **options)


def _scales(suffix: str = ".weight_scale", dtypes: tuple[str, ...] = _FLOATS) -> Part:
    return Part(name="scale", suffixes=(suffix,), dtypes=dtypes, shapes=None)


def _divided(what: str, size: int, by: int, where: str) -> int:
    if size % by:
        misfit(
            f"the {what} is no multiple of what it is divided into", where, expected=f"a multiple of {by}", actual=size
        )
    return size // by


def _blocks(outputs: int, inputs: int, scheme: Scheme, where: str) -> Sizes:
    """Count what shares scales: groups that divide the inputs, or blocks of which the last may be smaller."""
    sizes = {"out": outputs, "in": inputs, "one": 1}
    if scheme.strategy == "group":
        size = inputs if scheme.group in (None, -1) else scheme.group
        assert size is not None
        sizes |= {"group": size, "groups": _divided("number of inputs", inputs, size, where)}
    if scheme.block is not None:
        sizes |= {"row_blocks": -(-outputs // scheme.block[0]), "column_blocks": -(-inputs // scheme.block[1])}
    return sizes


def _shape(entries: Entries, name: str, dims: int) -> tuple[int, ...]:
    entry = entries[name]
    if len(entry.shape) != dims:
        misfit("the tensor has another number of dimensions", entry.name, expected=dims, actual=list(entry.shape))
    return entry.shape


def _plain_sizes(entries: Entries, scheme: Scheme, _read: Read) -> Sizes:
    outputs, inputs = _shape(entries, "codes", 2)
    return _blocks(outputs, inputs, scheme, entries["codes"].name)


def _block_of(scheme: Scheme, sizes: Sizes) -> tuple[int, int]:
    if scheme.strategy == "block":
        assert scheme.block is not None
        return scheme.block
    whole = {"tensor": (sizes["out"], sizes["in"]), "channel": (1, sizes["in"])}
    return whole.get(scheme.strategy) or (1, sizes["group"])


def _grid(scale: torch.Tensor) -> torch.Tensor:
    """[R, C] of scales of any shape."""
    floats = powers_of_two(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.to(torch.float32)
    return floats.reshape(-1, 1) if floats.dim() < 2 else floats


def _plain(tensors: Tensors, scheme: Scheme, sizes: Sizes) -> Codes:
    """One code in an element: int8 or float8."""
    zero, group = tensors.get("zero"), tensors.get("group")
    return Codes(
        values=tensors["codes"].to(torch.float32),
        scale=_grid(tensors["scale"]),
        block=_block_of(scheme, sizes),
        zero=None if zero is None else _grid(zero),
        group=None if group is None else group.long(),
    )


def _packed_sizes(entries: Entries, scheme: Scheme, read: Read) -> Sizes:
    outputs, words = _shape(entries, "codes", 2)
    count = 32 // scheme.bits
    shape = read("shape").flatten().tolist()
    if len(shape) != 2 or shape[0] != outputs or -(-shape[1] // count) != words:
        misfit(
            "the tensor contradicts the packed one",
            entries["shape"].name,
            expected=[outputs, words * count],
            actual=shape,
        )
    sizes = _blocks(outputs, shape[1], scheme, entries["codes"].name)
    columns = {"channel": 1, "tensor": 1}.get(scheme.strategy) or sizes["groups"]
    return sizes | {"words": words, "out_words": -(-outputs // count), "columns": columns, "two": 2}


def _packed(tensors: Tensors, scheme: Scheme, sizes: Sizes) -> Codes:
    """compressed-tensors: codes of a row in words of 32 bits, their sign as an offset."""
    half = 1 << (scheme.bits - 1)
    zero, group = tensors.get("zero"), tensors.get("group")
    if zero is not None:
        zero = unpacked(zero, scheme.bits, 0)[: sizes["out"]].to(torch.float32) - half
    values = unpacked(tensors["codes"], scheme.bits, 1)[:, : sizes["in"]].to(torch.float32) - half
    return Codes(
        values=values,
        scale=_grid(tensors["scale"]),
        block=_block_of(scheme, sizes),
        zero=zero,
        group=None if group is None else group.long(),
        words=Words(dim=1, order=tuple(range(32 // scheme.bits))),
    )


def _float4_sizes(entries: Entries, scheme: Scheme, _read: Read) -> Sizes:
    outputs, bytes_ = _shape(entries, "codes", 2)
    return _blocks(outputs, 2 * bytes_, scheme, entries["codes"].name) | {"bytes": bytes_}


def _float4(tensors: Tensors, scheme: Scheme, sizes: Sizes) -> Codes:
    """Two numbers of E2M1 in a byte; scales in E4M3 with a global one, or powers of two."""
    return Codes(
        values=float4(tensors["codes"]),
        scale=_grid(tensors["scale"]),
        block=(1, sizes["group"]),
        divisor=tensors["global"].to(torch.float32) if "global" in tensors else None,
        words=Words(dim=1, order=(0, 1)),
    )


def _gptq_sizes(entries: Entries, scheme: Scheme, _read: Read) -> Sizes:
    words, outputs = _shape(entries, "codes", 2)
    count = 32 // scheme.bits
    sizes = _blocks(outputs, words * count, scheme, entries["codes"].name)
    out_words = _divided("number of outputs", outputs, count, entries["codes"].name)
    return sizes | {"words": words, "out_words": out_words}


def _gptq(tensors: Tensors, scheme: Scheme, sizes: Sizes) -> Codes:
    """GPTQ: words along the inputs, [I, O]; zero points in words along the outputs; version 1 stores them less one."""
    group = tensors["group"].long()
    is_sorted = not torch.equal(group, torch.arange(sizes["in"]) // sizes["group"])
    zero = unpacked(tensors["zero"], scheme.bits, 1).to(torch.float32) + scheme.zero_offset
    return Codes(
        values=unpacked(tensors["codes"], scheme.bits, 0).to(torch.float32).T,
        scale=tensors["scale"].to(torch.float32).T,
        block=(1, sizes["group"]),
        zero=zero.T,
        group=group if is_sorted else None,
        words=Words(dim=1, order=tuple(range(32 // scheme.bits))),
    )


def _awq_sizes(entries: Entries, scheme: Scheme, _read: Read) -> Sizes:
    inputs, words = _shape(entries, "codes", 2)
    return _blocks(words * 8, inputs, scheme, entries["codes"].name) | {"out_words": words}


def _awq(tensors: Tensors, scheme: Scheme, sizes: Sizes) -> Codes:
    """AWQ: words along the outputs, [I, O], in an order of their own."""
    return Codes(
        values=unpacked(tensors["codes"], 4, 1, _AWQ_ORDER).to(torch.float32).T,
        scale=tensors["scale"].to(torch.float32).T,
        block=(1, sizes["group"]),
        zero=unpacked(tensors["zero"], 4, 1, _AWQ_ORDER).to(torch.float32).T,
        words=Words(dim=0, order=_AWQ_ORDER),
    )


def _bnb_state(read: Read, where: str) -> tuple[tuple[int, ...], int, int, float]:
    """Return shape, block, nested block and offset of bitsandbytes' QuantState, which is JSON in a tensor of bytes."""
    try:
        state = json.loads(bytes(read("state").tolist()))
        shape, block = tuple(state["shape"]), state["blocksize"]
        nested, offset = state.get("nested_blocksize", 0), float(state.get("nested_offset", 0.0))
        numbers = (*shape, block, *([nested] if "nested_blocksize" in state else []))
        if len(shape) < 2 or not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(state)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        misfit("the state of the quantiser is not understood", where, expected="shape and blocksize", actual=str(error))
    return shape, block, nested, offset


def _bnb_4bit_sizes(entries: Entries, _scheme: Scheme, read: Read) -> Sizes:
    shape, block, nested, _ = _bnb_state(read, entries["state"].name)
    _check_nesting(entries, nested)
    storage = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}.get(entries["codes"].dtype, 1)
    blocks = -(-prod(shape) // block)
    sizes = {f"dim{at}": size for at, size in enumerate(shape)} | {"one": 1, "state": entries["state"].num_elements}
    return sizes | {
        "rank": len(shape), "bytes": -(-prod(shape) // (2 * storage)), "blocks": blocks, "codes": 16, "codes8": 256,
        "nested": -(-blocks // (nested or blocks)), "group": block, "nested_group": nested or blocks,
    }  # fmt: skip


def _check_nesting(entries: Entries, nested: int) -> None:
    """Refuse scales that are codes of a table without that table, or the other way round."""
    scale = entries["scale"]
    parts = {"nested_absmax": "nested_scale" in entries, "nested_quant_map": "nested_table" in entries,
             "nested_blocksize": bool(nested)}  # fmt: skip
    if set(parts.values()) != {scale.dtype == "U8"}:
        expected = f"all of {', '.join(parts)} with scales of U8, and none with others"
        actual = f"scales of {scale.dtype} with {', '.join(name for name, has in parts.items() if has) or 'none'}"
        misfit("the scales are quantised in turn and half described", scale.name, expected=expected, actual=actual)


def _bnb_4bit(tensors: Tensors, _scheme: Scheme, sizes: Sizes) -> Codes:
    """Bitsandbytes' NF4 and FP4: codes of a table, the high half of a byte first; scales may be quantised in turn."""
    shape = tuple(sizes[f"dim{at}"] for at in range(sizes["rank"]))
    scale = tensors["scale"]
    if "nested_scale" in tensors:
        _, _, _, offset = _bnb_state(lambda _name: tensors["state"], "")
        nested = tensors["nested_scale"].repeat_interleave(sizes["nested_group"])[: sizes["blocks"]]
        scale = tensors["nested_table"][scale.long()] * nested + offset
    codes = unpacked(tensors["codes"].flatten().view(torch.uint8), 4, 0, (1, 0))[: prod(shape)]
    values, size = tensors["table"][codes.long()], sizes["group"]
    fits = shape[-1] % size == 0
    return Codes(
        values=values.reshape(shape) if fits else values[None],
        scale=scale.to(torch.float32).reshape(*shape[:-1], -1) if fits else scale.to(torch.float32)[None],
        block=(1, size),
        words=Words(dim=1, order=(1, 0)),
        shape=None if fits else shape,
    )


def _bnb_int8(tensors: Tensors, _scheme: Scheme, sizes: Sizes) -> Codes:
    """Bitsandbytes' int8: the largest magnitude of each row, which stands for 127."""
    scale, values = tensors["scale"][:, None], tensors["codes"].to(torch.float32)
    return Codes(values=values, scale=scale, block=(1, sizes["in"]), factor=7.874015718698502e-3)


def _experts_sizes(entries: Entries, scheme: Scheme, _read: Read) -> Sizes:
    experts, outputs, groups, bytes_ = _shape(entries, "codes", 4)
    if bytes_ != 16:
        misfit("a block has not 32 codes", entries["codes"].name, expected="16 bytes", actual=bytes_)
    return _blocks(outputs, groups * 32, scheme, entries["codes"].name) | {"experts": experts, "bytes": bytes_}


def _experts(tensors: Tensors, _scheme: Scheme, _sizes: Sizes) -> Codes:
    """gpt-oss: blocks of 32 codes of each expert; HF's parameter is turned."""
    values = float4(tensors["codes"]).flatten(-2)
    scale, words = powers_of_two(tensors["scale"]), Words(dim=1, order=(0, 1))
    return Codes(values=values, scale=scale, block=(1, 32), words=words, turned=True)


_OUT_IN = ("out", "in")
_ASYMMETRIC: dict[str, Any] = {"is_needed": lambda scheme: not scheme.is_symmetric}
_ORDERED: dict[str, Any] = {"is_needed": lambda scheme: scheme.is_ordered}
_OPTIONAL: dict[str, Any] = {"is_needed": lambda _scheme: False}
_COMPRESSED_ASIDE = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".input_g_idx", ".output_scale", ".output_zero_point",
)  # fmt: skip
_COMPRESSED_ZERO = Part(name="zero", suffixes=(".weight_zero_point",), dtypes=("I8",), shapes=None, **_ASYMMETRIC)
_COMPRESSED_GROUP = _part("group", ".weight_g_idx", ("I32",), ("in",), **_ORDERED)

FORMATS: Mapping[str, Format] = {
    "compressed-int8": Format(
        title="compressed-tensors, int8",
        parts=(_part("codes", ".weight", ("I8",), _OUT_IN), _scales(), _COMPRESSED_ZERO, _COMPRESSED_GROUP),
        sizes=_plain_sizes, unpack=_plain, aside=_COMPRESSED_ASIDE,
    ),
    "compressed-float8": Format(
        title="compressed-tensors, float8",
        parts=(_part("codes", ".weight", ("F8_E4M3",), _OUT_IN), _scales()),
        sizes=_plain_sizes, unpack=_plain, aside=(*_COMPRESSED_ASIDE, ".weight_zero_point"),
    ),
    "compressed-packed": Format(
        title="compressed-tensors, packed integers",
        parts=(
            _part("codes", ".weight_packed", ("I32",), ("out", "words")),
            _scales(),
            _part("shape", ".weight_shape", ("I64", "I32"), ("two",)),
            _part("zero", ".weight_zero_point", ("I32",), ("out_words", "columns"), **_ASYMMETRIC),
            _COMPRESSED_GROUP,
        ),
        sizes=_packed_sizes, unpack=_packed, aside=_COMPRESSED_ASIDE,
    ),
    "compressed-nvfp4": Format(
        title="compressed-tensors, NVFP4",
        parts=(
            _part("codes", ".weight_packed", ("U8",), ("out", "bytes")),
            _part("scale", ".weight_scale", ("F8_E4M3",), ("out", "groups")),
            _part("global", ".weight_global_scale", ("F32",), ("one",)),
        ),
        sizes=_float4_sizes, unpack=_float4, aside=_COMPRESSED_ASIDE,
    ),
    "compressed-mxfp4": Format(
        title="compressed-tensors, MXFP4",
        parts=(
            _part("codes", ".weight_packed", ("U8",), ("out", "bytes")),
            _part("scale", ".weight_scale", _EXPONENTS, ("out", "groups")),
        ),
        sizes=_float4_sizes, unpack=_float4, aside=_COMPRESSED_ASIDE,
    ),
    "fp8": Format(
        title="float8, one scale for a weight",
        parts=(
            _part("codes", ".weight", ("F8_E4M3",), _OUT_IN),
            Part(name="scale", suffixes=(".weight_scale", ".weight_scale_inv"), dtypes=_FLOATS, shapes=None),
        ),
        sizes=_plain_sizes, unpack=_plain, aside=(".input_scale", ".activation_scale"),
    ),
    "fp8-block": Format(
        title="float8 in blocks, as DeepSeek has it",
        parts=(_part("codes", ".weight", ("F8_E4M3",), _OUT_IN), _scales(".weight_scale_inv", (*_FLOATS, *_EXPONENTS))),
        sizes=_plain_sizes, unpack=_plain, aside=(".input_scale", ".activation_scale"),
    ),
    "gptq": Format(
        title="GPTQ",
        parts=(
            _part("codes", ".qweight", ("I32",), ("words", "out")),
            _part("scale", ".scales", _FLOATS, ("groups", "out")),
            _part("zero", ".qzeros", ("I32",), ("groups", "out_words")),
            _part("group", ".g_idx", ("I32",), ("in",)),
        ),
        sizes=_gptq_sizes, unpack=_gptq,
    ),
    "awq": Format(
        title="AWQ",
        parts=(
            _part("codes", ".qweight", ("I32",), ("in", "out_words")),
            _part("scale", ".scales", _FLOATS, ("groups", "out")),
            _part("zero", ".qzeros", ("I32",), ("groups", "out_words")),
        ),
        sizes=_awq_sizes, unpack=_awq,
    ),
    "bnb-4bit": Format(
        title="bitsandbytes, 4 bits",
        parts=(
            _part("codes", ".weight", ("U8", "BF16", "F16", "F32"), ("bytes", "one")),
            _part("scale", ".weight.absmax", ("F32", "U8"), ("blocks",)),
            _part("table", ".weight.quant_map", ("F32",), ("codes",)),
            Part(
                name="state", dtypes=("U8",), shapes=(("state",),),
                suffixes=(".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
            ),
            _part("nested_scale", ".weight.nested_absmax", ("F32",), ("nested",), **_OPTIONAL),
            _part("nested_table", ".weight.nested_quant_map", ("F32",), ("codes8",), **_OPTIONAL),
        ),
        sizes=_bnb_4bit_sizes, unpack=_bnb_4bit, may_be_zero=True,
    ),
    "bnb-int8": Format(
        title="bitsandbytes, int8",
        parts=(_part("codes", ".weight", ("I8",), _OUT_IN), _part("scale", ".SCB", ("F32",), ("out",))),
        sizes=_plain_sizes, unpack=_bnb_int8, aside=(".weight_format",),
    ),
    "gpt-oss-mxfp4": Format(
        title="MXFP4, as gpt-oss has it",
        parts=(
            _part("codes", "_blocks", ("U8",), ("experts", "out", "groups", "bytes")),
            _part("scale", "_scales", ("U8",), ("experts", "out", "groups")),
        ),
        sizes=_experts_sizes, unpack=_experts, target="",
    ),
    "torchao-int8": Format(
        title="torchao, int8",
        parts=(
            _part("codes", "._weight_qdata", ("I8",), _OUT_IN),
            _scales("._weight_scale"),
            Part(name="zero", suffixes=("._weight_zero_point",), dtypes=("I8",), shapes=None, **_OPTIONAL),
        ),
        sizes=_plain_sizes, unpack=_plain,
    ),
}  # fmt: skip


def shapes_of(part: Part, scheme: Scheme, sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the shapes that a part may have."""
    named = _SCALES[scheme.strategy] if part.shapes is None else part.shapes
    return [tuple(sizes[name] for name in shape) for shape in named]


def shape_of(format: Format, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of HF's parameter."""
    if "rank" in sizes:
        return tuple(sizes[f"dim{at}"] for at in range(sizes["rank"]))
    shape = (sizes["out"], sizes["in"])
    return (sizes["experts"], *reversed(shape)) if "experts" in sizes else shape
