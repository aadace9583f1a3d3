"""Weights in few bits of an export, written as a checkpoint of packed integers: that is read as any quantised one.

The bits are those of compressed-tensors' packed integers. What is not quantised in an export is taken from the
checkpoint that it was made from, which is what it should be.

`O` outputs, `I` inputs, `G` blocks of inputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.checkpoint import Checkpoint, read_shard
from harness.formats.checkpoint.converted import write_settings, write_shards

_FUSED = "qkv_proj"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight in few bits."""

    module: str
    """HF's name, or what an export fuses: `model.layers.0.self_attn.qkv_proj`."""
    bits: int
    """4 or 8."""
    codes: torch.Tensor
    """[O, I] uint8, from 0."""
    scale: torch.Tensor
    """[O, G]."""
    zero: torch.Tensor | None
    """[O, G] uint8; None: the middle of the codes."""
    has_inputs_in_int8: bool = False
    """Whether a product quantises its inputs, with a scale for each block."""

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def scheme(self) -> tuple[int, int | None, bool, bool]:
        """What it shares with others that are quantised alike: bits, block or None for a whole row, ..."""
        return self.bits, self.block if self.scale.shape[1] > 1 else None, self.has_inputs_in_int8, self.zero is None

    def rows(self, at: slice) -> "PackedWeight":
        """Return some outputs."""
        zero = None if self.zero is None else self.zero[at]
        return replace(self, codes=self.codes[at], scale=self.scale[at], zero=zero)


def write_packed(weights: Sequence[PackedWeight], origin: Checkpoint, made: Path, where: Path) -> None:
    """Write weights in few bits, and everything else of the checkpoint `origin`, into an empty folder.

    Raises:
        HarnessError: QUANTISED_MISFIT: a weight has no place in `origin`; `where` is that of the export.
    """
    by_module = {module: weight for item in weights for module, weight in _split(item, origin.config)}
    for module in by_module:
        if f"{module}.weight" not in origin.tensors and module != HEAD:
            raise HarnessError(
                Code.QUANTISED_MISFIT,
                "a weight of the export has no place in the checkpoint",
                where=f"{where}: {module}",
                expected=f"a module of {origin.folder}",
                hint="pass the checkpoint that the export was made from as --hf",
            )
    config = {**origin.config, "quantization_config": _described(by_module)}
    if HEAD in by_module:
        config["tie_word_embeddings"] = False
    write_settings(made, config, origin.folder)
    write_shards(made, _tensors(by_module, origin))


def _split(weight: PackedWeight, config: Mapping[str, Any]) -> Iterator[tuple[str, PackedWeight]]:
    """Yield HF's modules with their rows of a weight."""
    if not weight.module.endswith(_FUSED):
        yield weight.module, weight
        return
    num_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    size = int(config.get("head_dim") or config["hidden_size"] // num_heads)
    at, prefix = 0, weight.module.removesuffix(_FUSED)
    for name, count in (("q_proj", num_heads), ("k_proj", num_kv_heads), ("v_proj", num_kv_heads)):
        rows = slice(at, at + count * size)
        yield prefix + name, weight.rows(rows)
        at = rows.stop


def _described(weights: Mapping[str, PackedWeight]) -> dict[str, Any]:
    """Return the table `quantization_config`: a group for the modules that are quantised alike."""
    groups: dict[tuple[int, int | None, bool, bool], list[str]] = {}
    for module, weight in weights.items():
        groups.setdefault(weight.scheme, []).append(module)
    table = {}
    for at, ((bits, block, in_int8, is_symmetric), modules) in enumerate(groups.items()):
        shared = {"type": "int", **({"strategy": "group", "group_size": block} if block else {"strategy": "channel"})}
        inputs = {"num_bits": 8, "symmetric": True, "dynamic": True, **shared}
        table[f"group_{at}"] = {
            "targets": modules,
            "weights": {"num_bits": bits, "symmetric": is_symmetric, **shared},
            "input_activations": (inputs if block else {**inputs, "strategy": "token"}) if in_int8 else None,
        }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": table}


def _tensors(weights: Mapping[str, PackedWeight], origin: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for module, weight in weights.items():
        yield f"{module}.weight_packed", _words(weight.codes, weight.bits)
        yield f"{module}.weight_scale", weight.scale.clone()  # a file holds no tensor twice
        yield f"{module}.weight_shape", torch.tensor(weight.codes.shape)
        if weight.zero is not None:
            yield f"{module}.weight_zero_point", _words(weight.zero.T, weight.bits).T
    for name, (_, path) in origin.tensors.items():
        if name.removesuffix(".weight") not in weights:
            yield name, read_shard(path, name)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes [rows, columns] in words of 32 bits along the columns, the first in the lowest bits: int32."""
    size = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % size)).to(torch.int64)
    words: torch.Tensor = (padded.unflatten(1, (-1, size)) << (bits * torch.arange(size))).sum(dim=2)
    return words.to(torch.int32)  # words from the upper half become negative


def halves(stored: torch.Tensor) -> torch.Tensor:
    """Return the two codes of each byte of [..., bytes], the lower half first: [..., 2 * bytes] uint8."""
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2)


def refuse(what: str, where: object, **details: Any) -> NoReturn:
    """Raise UNKNOWN_QUANTISATION."""
    details.setdefault("hint", "docs/check-onnxruntime.md and docs/check-openvino.md say which exports are read")
    raise HarnessError(Code.UNKNOWN_QUANTISATION, what, where=where, **details)
