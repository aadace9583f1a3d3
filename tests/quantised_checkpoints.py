"""Writes small quantised checkpoints of every format that the harness reads, from a checkpoint in floats.

The packing is written here once more, from the formats' descriptions, and not with the readers' code: a reader is held
to the integers that were packed. Groups are 32 wide, blocks 32 by 32, so that the embedded models have several.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E4M3 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""A module's tensors by their suffix, and the weight that they stand for, float32."""


@dataclass(frozen=True)
class Kind:
    """A format, with the configuration that says so."""

    write: Callable[[torch.Tensor], Written]
    config: Mapping[str, Any]
    target: str = ".weight"
    """What follows a module's name in that of its weight."""


def _grouped(weight: torch.Tensor, size: int = GROUP) -> torch.Tensor:
    return weight.unflatten(1, (-1, size))


def _symmetric(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [O, I] and scales [O, G] in float16 of groups."""
    groups = _grouped(weight)
    scale = (groups.abs().amax(dim=2) / largest).to(torch.float16)
    codes = (groups / scale[..., None].float()).round().clamp(-largest - 1, largest)
    return codes.flatten(1).to(torch.int32), scale


def _asymmetric(weight: torch.Tensor, levels: int = 15) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned codes [O, I], scales [O, G] in float16, zero points [O, G]."""
    groups = _grouped(weight)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scale = ((high - low) / levels).to(torch.float16)
    zero = (-low / scale.float()).round().clamp(1, levels)
    codes = (groups / scale[..., None].float() + zero[..., None]).round().clamp(0, levels)
    return codes.flatten(1).to(torch.int32), scale, zero.to(torch.int32)


def _spread(blocks: torch.Tensor, size: int = GROUP) -> torch.Tensor:
    return blocks.float().repeat_interleave(size, dim=1)


def _words(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Put eight unsigned codes of four bits into each int32, lowest bits first."""
    parts = codes.transpose(dim, -1).to(torch.int64).unflatten(-1, (-1, 8))
    words = sum(parts[..., order[at]] << (4 * at) for at in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).transpose(dim, -1).contiguous()


def _halves(codes: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    low, high = (pairs[..., 1], pairs[..., 0]) if high_first else (pairs[..., 0], pairs[..., 1])
    return low | (high << 4)


def _float4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and values of the nearest numbers in E2M1."""
    index = (values.abs()[..., None] - _FLOAT4).abs().argmin(dim=-1)
    rounded = torch.where(values < 0, -_FLOAT4[index], _FLOAT4[index])
    return index + 8 * (values < 0), rounded


def _int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def _int8(weight: torch.Tensor) -> Written:
    codes, scale = _int8_rows(weight)
    scale = scale.to(torch.bfloat16)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def _float8_rows(weight: torch.Tensor) -> Written:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = (weight / scale).to(_E4M3)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale


def _float8_static(weight: torch.Tensor) -> Written:
    scale = weight.abs().max()[None] / 448
    codes = (weight / scale).to(_E4M3)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor([0.02])}
    return tensors, codes.float() * scale


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(_E4M3)
    return codes.flatten(2).flatten(0, 1), scale, (codes.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)


def _float8_blocks(suffix: str) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        codes, scale, dequantised = _blocks(weight)
        return {".weight": codes, suffix: scale}, dequantised

    return write


def _w4a16(weight: torch.Tensor) -> Written:
    codes, scale = _symmetric(weight, 7)
    tensors = {".weight_packed": _words(codes + 8, 1), ".weight_scale": scale, ".weight_shape": _shape(weight)}
    return tensors, codes.float() * _spread(scale)


def _w4a16_asymmetric(weight: torch.Tensor) -> Written:
    codes, scale, zero = _asymmetric(weight)
    tensors = {
        ".weight_packed": _words(codes, 1), ".weight_scale": scale, ".weight_shape": _shape(weight),
        ".weight_zero_point": _words(zero, 0),
    }  # fmt: skip
    return tensors, (codes - _spread(zero)).float() * _spread(scale)


def _w4a16_ordered(weight: torch.Tensor) -> Written:
    order, group = _order(weight.shape[1])
    codes, scale = _symmetric(weight[:, order], 7)
    restored = torch.empty_like(codes)
    restored[:, order] = codes
    tensors = {
        ".weight_packed": _words(restored + 8, 1), ".weight_scale": scale, ".weight_shape": _shape(weight),
        ".weight_g_idx": group,
    }  # fmt: skip
    return tensors, restored.float() * scale.float()[:, group.long()]


def _order(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An order of the inputs, and the group of each input under it."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width))
    group = torch.empty(width, dtype=torch.int32)
    group[order] = (torch.arange(width) // GROUP).to(torch.int32)
    return order, group


def _shape(weight: torch.Tensor) -> torch.Tensor:
    return torch.tensor(weight.shape, dtype=torch.int64)


def _nvfp4(weight: torch.Tensor) -> Written:
    whole = (448 * 6 / weight.abs().max())[None]
    groups = _grouped(weight, 16)
    scale = (groups.abs().amax(dim=2) / 6 * whole).to(_E4M3)
    used = scale.float() / whole
    codes, values = _float4(groups / used[..., None])
    tensors = {".weight_packed": _halves(codes.flatten(1)), ".weight_scale": scale, ".weight_global_scale": whole}
    return {**tensors, ".input_global_scale": torch.tensor([100.0])}, (values * used[..., None]).flatten(1)


def _powers(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    exponent = (groups.abs().amax(dim=-1).log2().floor() - 2).clamp(-100, 100)
    codes, values = _float4(groups / (2.0**exponent)[..., None])
    return codes, (exponent + 127).to(torch.uint8), values * (2.0**exponent)[..., None]


def _mxfp4(weight: torch.Tensor) -> Written:
    codes, scale, values = _powers(_grouped(weight))
    return {".weight_packed": _halves(codes.flatten(1)), ".weight_scale": scale}, values.flatten(1)


def _gptq(*, offset: int, ordered: bool) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        order, group = _order(weight.shape[1])
        if not ordered:
            order, group = torch.arange(weight.shape[1]), (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
        codes, scale, zero = _asymmetric(weight[:, order])
        restored = torch.empty_like(codes)
        restored[:, order] = codes
        tensors = {
            ".qweight": _words(restored.T, 0), ".qzeros": _words(zero.T - offset, 1), ".g_idx": group,
            ".scales": scale.T.contiguous(),
        }  # fmt: skip
        return tensors, (restored - zero[:, group.long()]).float() * scale.float()[:, group.long()]

    return write


def _gptq_symmetric(weight: torch.Tensor) -> Written:
    codes, scale = _symmetric(weight, 7)
    tensors = {
        ".qweight": _words((codes + 8).T, 0), ".qzeros": _words(torch.full_like(scale.T, 7).int(), 1),
        ".g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32), ".scales": scale.T.contiguous(),
    }  # fmt: skip
    return tensors, codes.float() * _spread(scale)


def _awq(weight: torch.Tensor) -> Written:
    codes, scale, zero = _asymmetric(weight)
    tensors = {
        ".qweight": _words(codes.T, 1, _AWQ_ORDER), ".qzeros": _words(zero.T, 1, _AWQ_ORDER),
        ".scales": scale.T.contiguous(),
    }  # fmt: skip
    return tensors, (codes - _spread(zero)).float() * _spread(scale)


_NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
_BLOCK = 64


def _nf4(*, doubled: bool) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        flat = weight.flatten().unflatten(0, (-1, _BLOCK))
        scale = flat.abs().amax(dim=1)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": _BLOCK, "dtype": "float32", "shape": list(weight.shape),
        }  # fmt: skip
        tensors = {".weight.absmax": scale}
        if doubled:
            tensors, scale = _doubled(scale, state)
        codes = (flat[..., None] / scale[:, None, None] - _NF4).abs().argmin(dim=-1)
        tensors[".weight"] = _halves(codes.flatten(), high_first=True)[:, None]
        tensors[".weight.quant_map"] = _NF4.clone()
        tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return tensors, (_NF4[codes] * scale[:, None]).reshape(weight.shape)

    return write


def _doubled(scale: torch.Tensor, state: dict[str, Any]) -> tuple[Tensors, torch.Tensor]:
    """Quantise the scales in turn: 256 share one, less their mean."""
    table = torch.linspace(-1, 1, 256)
    offset = float(scale.mean())
    blocks = -(-len(scale) // 256)
    nested = torch.stack([(part - offset).abs().max() for part in scale.split(256)])
    spread = nested.repeat_interleave(256)[: len(scale)]
    codes = ((scale - offset)[:, None] / spread[:, None] - table).abs().argmin(dim=1)
    state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    assert len(nested) == blocks
    tensors = {
        ".weight.absmax": codes.to(torch.uint8), ".weight.nested_absmax": nested, ".weight.nested_quant_map": table,
    }  # fmt: skip
    return tensors, table[codes] * spread + offset


def _bnb_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(dim=1)
    codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
    tensors = {".weight": codes, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * largest[:, None] * 7.874015718698502e-3


def _torchao(weight: torch.Tensor) -> Written:
    codes, scale = _int8_rows(weight)
    zero = torch.zeros_like(scale, dtype=torch.int8)
    tensors = {"._weight_qdata": codes, "._weight_scale": scale, "._weight_zero_point": zero}
    return tensors, codes.float() * scale


def _gpt_oss(weight: torch.Tensor) -> Written:
    """[E, I, O] as HF has experts; blocks are along the inputs."""
    codes, scale, values = _powers(weight.transpose(1, 2).unflatten(2, (-1, GROUP)))
    return {"_blocks": _halves(codes), "_scales": scale}, values.flatten(2).transpose(1, 2).contiguous()


def _compressed(packing: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip


def _arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


_TOKENS8 = _arguments(8, "int", "token", dynamic=True)
_W4 = _arguments(4, "int", "group", group_size=GROUP)
_BNB = {"quant_method": "bitsandbytes", "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None}
_BNB4 = {**_BNB, "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "damp_percent": 0.1}
_TORCHAO = {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}}

KINDS: Mapping[str, Kind] = {
    "w8a8": Kind(_int8, _compressed("int-quantized", _arguments(8, "int", "channel"), _TOKENS8)),
    "fp8-dynamic": Kind(_float8_rows, _compressed(
        "float-quantized", _arguments(8, "float", "channel"), _arguments(8, "float", "token", dynamic=True)
    )),
    "fp8-static": Kind(_float8_static, _compressed(
        "float-quantized", _arguments(8, "float", "tensor"), _arguments(8, "float", "tensor")
    )),
    "fp8-blocks": Kind(_float8_blocks(".weight_scale"), _compressed(
        "float-quantized", _arguments(8, "float", "block", block_structure=[GROUP, GROUP]),
        _arguments(8, "float", "group", group_size=GROUP, dynamic=True),
    )),
    "w4a16": Kind(_w4a16, _compressed("pack-quantized", _W4)),
    "w4a16-asymmetric": Kind(_w4a16_asymmetric, _compressed("pack-quantized", {**_W4, "symmetric": False})),
    "w4a16-ordered": Kind(_w4a16_ordered, _compressed("pack-quantized", {**_W4, "actorder": "group"})),
    "nvfp4": Kind(_nvfp4, _compressed(
        "nvfp4-pack-quantized", _arguments(4, "float", "tensor_group", group_size=16)
    )),
    "mxfp4": Kind(_mxfp4, _compressed("mxfp4-pack-quantized", _arguments(4, "float", "group", group_size=GROUP))),
    "deepseek": Kind(_float8_blocks(".weight_scale_inv"), {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [GROUP, GROUP],
    }),
    "gptq": Kind(_gptq(offset=1, ordered=False), {**_GPTQ, "desc_act": False, "checkpoint_format": "gptq"}),
    "gptq-v2": Kind(_gptq(offset=0, ordered=False), {**_GPTQ, "desc_act": False, "checkpoint_format": "gptq_v2"}),
    "gptq-symmetric": Kind(_gptq_symmetric, {**_GPTQ, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}),
    "gptq-ordered": Kind(_gptq(offset=1, ordered=True), {**_GPTQ, "desc_act": True, "checkpoint_format": "gptq"}),
    "awq": Kind(_awq, {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
    }),
    "nf4": Kind(_nf4(doubled=False), {**_BNB4, "bnb_4bit_use_double_quant": False}),
    "nf4-doubled": Kind(_nf4(doubled=True), {**_BNB4, "bnb_4bit_use_double_quant": True}),
    "bnb-int8": Kind(_bnb_int8, {**_BNB, "load_in_4bit": False, "load_in_8bit": True}),
    "torchao": Kind(_torchao, {"quant_method": "torchao", "quant_type": _TORCHAO}),
    "gpt-oss": Kind(_gpt_oss, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, target=""),
}  # fmt: skip


def write_quantised(
    original: Path,
    folder: Path,
    kind: str,
    *,
    changed: Callable[[Tensors], None] = lambda _tensors: None,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Write a quantised form of a checkpoint, and return the weights that it stands for, float32 by HF's names.

    Args:
        original: a checkpoint in floats.
        folder: is made.
        kind: a key of `KINDS`.
        changed: is given all tensors before they are written, to change them.
        config: fields to set in `quantization_config`; `...` removes one.
    """
    folder.mkdir(parents=True)
    tensors: Tensors = {}
    expected: dict[str, torch.Tensor] = {}
    for shard in sorted(original.glob("*.safetensors")):
        for name, weight in load_file(shard).items():
            _write_one(KINDS[kind], name, weight, tensors, expected)
    changed(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for file in original.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    declared = {**KINDS[kind].config, **config}
    whole = json.loads((original / "config.json").read_text())
    whole["quantization_config"] = {name: value for name, value in declared.items() if value is not Ellipsis}
    (folder / "config.json").write_text(json.dumps(whole))
    return expected


def _write_one(
    kind: Kind, name: str, weight: torch.Tensor, tensors: Tensors, expected: dict[str, torch.Tensor]
) -> None:
    is_expert = name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj")
    is_linear = name.endswith("_proj.weight") and weight.dim() == 2
    if not (is_expert if kind.target == "" else is_linear):
        tensors[name] = expected[name] = weight
        return
    parts, expected[name] = kind.write(weight.float())
    tensors.update({name.removesuffix(kind.target) + suffix: part for suffix, part in parts.items()})
