"""GGUF files of every type with a fault planted in them, as converters and loaders have made them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from harness.extensions.llamacpp.gguf import open_gguf
from harness.extensions.llamacpp.gguf.header import PLAIN
from harness.extensions.llamacpp.gguf.model import rows_of_hf
from harness.extensions.llamacpp.gguf.writer import write_gguf
from harness.extensions.quant.files import quantise

FAULTS = ("rows not reordered", "another layer's tensor", "rotary base doubled", "scales shifted by a block")
OTHERS, OTHERS_FROM = "model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj"
SCALED, SCALED_ROW = "blk.1.ffn_down.weight", 0


def write_typed(folder: Path, path: Path, type_name: str, **options: object) -> Path:
    """Write a checkpoint in any type: K-quants by llama.cpp's own quantiser."""
    if type_name in PLAIN:
        return write_gguf(folder, path, type_name, **options)  # type: ignore[arg-type]
    source = write_gguf(folder, path.with_suffix(".source.gguf"), **options)  # type: ignore[arg-type]
    quantise(source, path, type_name)
    source.unlink()
    return path


def write_faulty(folder: Path, path: Path, type_name: str, fault: str) -> Path:
    """Write a Llama checkpoint as GGUF with one of `FAULTS`."""
    if fault == "rows not reordered":
        return write_typed(folder, path, type_name, change=_not_reordered(folder))
    if fault == "another layer's tensor":
        replacement = load_file(folder / "model.safetensors")[f"{OTHERS_FROM}.weight"]
        return write_typed(
            folder, path, type_name, change=lambda name, x: replacement if name == f"{OTHERS}.weight" else x
        )
    if fault == "rotary base doubled":
        return write_typed(
            folder, path, type_name, metadata={"rope.freq_base": 2.0 * _config(folder).rope_parameters["rope_theta"]}
        )
    shift_scales(write_typed(folder, path, type_name))
    return path


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, local_files_only=True)


def _not_reordered(folder: Path) -> Callable[[str, torch.Tensor], torch.Tensor]:
    config = _config(folder)

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        if "q_proj.weight" in name or "k_proj.weight" in name:
            return rows_of_hf(x, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        return x

    return change


def shift_scales(path: Path) -> None:
    """Give each block in the first row of a quantised tensor the scale of the next; the last block keeps its own."""
    tensor, _ = open_gguf(path).tensors[SCALED]
    size, count = tensor.type.block_bytes, tensor.shape[1] // tensor.type.block_size
    content = bytearray(path.read_bytes())
    row = slice(tensor.begin, tensor.begin + size * count)
    content[row] = _shifted(content[row], tensor.type.name, size)
    path.write_bytes(content)


def _shifted(row: bytearray, type_name: str, size: int) -> bytearray:
    blocks = [row[at : at + size] for at in range(0, len(row), size)]
    read, write = {"Q6_K": (_read_q6_k, _write_q6_k), "Q5_K": (_read_6_bits, _write_6_bits),
                   "Q4_K": (_read_6_bits, _write_6_bits)}.get(type_name, (_read_d, _write_d))  # fmt: skip
    scales = [scale for block in blocks for scale in read(block)]
    scales = scales[1:] + scales[-1:]
    num_scales = len(scales) // len(blocks)
    for at, block in enumerate(blocks):
        write(block, scales[at * num_scales : (at + 1) * num_scales])
    return bytearray(b"".join(blocks))


def _read_d(block: bytearray) -> list[bytes]:
    return [bytes(block[:2])]  # ggml_half d, of Q8_0 and Q4_0


def _write_d(block: bytearray, scales: list[bytes]) -> None:
    block[:2] = scales[0]


def _read_q6_k(block: bytearray) -> list[int]:
    return list(block[192:208])  # int8_t scales[16] after ql[128] and qh[64]


def _write_q6_k(block: bytearray, scales: list[int]) -> None:
    block[192:208] = bytes(scales)


def _read_6_bits(block: bytearray) -> list[int]:
    """Eight scales of 6 bits among 12 bytes; see ggml's `get_scale_min_k4`. The minima stay."""
    packed = block[4:16]
    return [packed[j] & 63 for j in range(4)] + [packed[j + 8] & 15 | packed[j] >> 6 << 4 for j in range(4)]


def _write_6_bits(block: bytearray, scales: list[int]) -> None:
    for j in range(4):
        block[4 + j] = scales[j] | scales[j + 4] >> 4 << 6
        block[12 + j] = block[12 + j] & 0xF0 | scales[j + 4] & 15
