"""LoRA adapters of random weights, in PEFT's format."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parents[2] / "cases" / "checkpoints" / "qwen3-tiny"
"""The base model."""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path, *, seed: int, rank: int = 4, alpha: float = 8.0, modules: tuple[str, ...] = ALL, **settings: Any
) -> Path:
    """Write random adapter weights in PEFT's format."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(FOLDER / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(modules):
            outputs, inputs = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder
