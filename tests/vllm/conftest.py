"""vLLM in this process, and small checkpoints with head sizes that it takes."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
"""vLLM would bind each process to cores of its own choice, which others may be using."""

SIZES = {
    "vocab_size": 256, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.05,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}  # fmt: skip
"""What a family has beside, or in place of, the sizes."""


def write_checkpoint(family: str, folder: Path, **changes: object) -> Path:
    """Write a model with seeded weights; norms and biases are neither ones nor zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a checkpoint of each family."""
    root = tmp_path_factory.mktemp("families")
    return {family: write_checkpoint(family, root / family) for family in FAMILIES}
