"""Readers of quantised weights: held to the integers that were packed, bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.extensions.quantised.checkpoint import QuantisedCheckpoint
from harness.extensions.quantised.codes import Words, unpacked
from tests.quantised_checkpoints import KINDS, write_quantised
from tests.quantised_faults import CHECKPOINTS

MODELS = {"nf4": "qwen2-tiny"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpt-oss"])
def test_a_format_is_dequantised_bit_for_bit(kind: str, tmp_path: Path):
    expected = write_quantised(CHECKPOINTS / MODELS.get(kind, "llama-tiny"), tmp_path / "model", kind)
    checkpoint = QuantisedCheckpoint(tmp_path / "model")
    dequantised = dict(checkpoint.tensors())
    assert dequantised.keys() == expected.keys()
    assert len(checkpoint.weights) == 21
    for name, weight in expected.items():
        assert torch.equal(dequantised[name], weight), name


def test_experts_of_gpt_oss_are_turned(tmp_path: Path):
    original = tmp_path / "original"
    original.mkdir()
    torch.manual_seed(0)
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 64, 128),
        "model.layers.0.mlp.experts.down_proj": torch.randn(3, 64, 64),
        "model.layers.0.mlp.router.weight": torch.randn(3, 64),
    }
    save_file(tensors, original / "model.safetensors")
    (original / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    expected = write_quantised(original, tmp_path / "model", "gpt-oss")
    dequantised = dict(QuantisedCheckpoint(tmp_path / "model").tensors())
    assert dequantised.keys() == tensors.keys()
    for name, weight in expected.items():
        assert torch.equal(dequantised[name], weight), name


def test_codes_are_taken_out_of_words_in_order():
    words = torch.tensor([[0x76543210, -0x1234568]], dtype=torch.int32)
    assert unpacked(words, 4, 1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]
    assert unpacked(words.T, 4, 0)[:8, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert unpacked(words[:, :1], 4, 1, (0, 2, 4, 6, 1, 3, 5, 7)).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert unpacked(torch.tensor([0x21], dtype=torch.uint8), 4, 0, (1, 0)).tolist() == [2, 1]


def test_the_last_block_may_be_smaller(tmp_path: Path):
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "model", "deepseek")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.tensor([[1.0], [2.0]])
    for name in [name for name in tensors if name.endswith("_scale_inv") and "layers.0.self_attn.q" not in name]:
        scales = tensors[name.removesuffix("_scale_inv")]
        tensors[name] = torch.ones(-(-scales.shape[0] // 128), -(-scales.shape[1] // 128))
    save_file(tensors, file)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    codes = QuantisedCheckpoint(tmp_path / "model").codes("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(codes.dequantised()[:128], codes.values[:128])
    assert torch.equal(codes.dequantised()[128:], codes.values[128:] * 2)


@pytest.mark.parametrize(("num_codes", "half"), [(8, 8), (4, 128), (2, 8), (16, 2)])
def test_the_middle_of_the_codes_follows_from_how_many_lie_in_a_word(num_codes: int, half: float):
    assert Words(dim=1, order=tuple(range(num_codes))).half == half
