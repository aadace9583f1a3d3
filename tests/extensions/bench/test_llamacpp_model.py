"""The GGUF file that llama.cpp is timed on holds the checkpoint's own bits."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness.extensions.bench.llamacpp import write_model
from harness.extensions.bench.peer import BenchConfig, PeerMissingError
from harness.extensions.bench.shape import SHAPES, build_checkpoint


def setting(folder: Path, dtype: str) -> BenchConfig:
    return BenchConfig(
        folder=folder, scratch=folder, dtype=dtype, device="cpu", num_threads=1, max_request_len=8,
        max_total_len=8, max_requests=1, engine_options={},
    )  # fmt: skip


def test_weights_are_the_same_bits_and_norms_float32(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    build_checkpoint(SHAPES["tiny"], tmp_path, dtype="bfloat16", seed=0, device="cpu")
    path = write_model(setting(tmp_path, "bfloat16"))
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    checkpoint_tensors = load_file(tmp_path / "model.safetensors")
    assert len(read) == len(checkpoint_tensors)
    up = read["blk.1.ffn_up.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType.BF16
    assert (
        up.data.tobytes() == checkpoint_tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8).numpy().tobytes()
    )
    assert read["output_norm.weight"].data.dtype == np.float32


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PeerMissingError, match="gguf"):
        write_model(setting(tmp_path, "float32"))
