"""A model that is filled up with zeros computes the same."""

import pytest
import torch

from harness.extensions.quant.files import pad_checkpoint
from harness.extensions.quant.forward import sample_text, split_text
from harness.oracle.model import load_model

IDS = torch.tensor([[1, 20, 21, 22, 9, 8, 7, 30]])


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_the_logits_are_the_same(name, checkpoints, tmp_path):
    original = load_model(checkpoints / name, dtype=torch.float32)
    padded = load_model(pad_checkpoint(checkpoints / name, tmp_path / "padded"), dtype=torch.float32)
    assert padded.config.hidden_size % 256 == padded.config.intermediate_size % 256 == 0
    assert padded.config.num_attention_heads * padded.head_dim % 256 == 0
    with torch.no_grad():
        expected, actual = original.run(input_ids=IDS).logits, padded.run(input_ids=IDS).logits
    assert float((actual - expected).norm() / expected.norm()) < 3e-6


def test_what_a_model_says_is_decided_by_the_seed(checkpoints):
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    first, again, another = (sample_text(hf, num_sequences=2, num_tokens=9, seed=seed) for seed in (0, 0, 1))
    assert first == again != another
    assert [len(row) for row in first] == [9, 9]


def test_a_text_is_cut_into_sequences(checkpoints):
    hf = load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    assert split_text(range(7), hf, 3) == [[0, 1, 2], [3, 4, 5]]
