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
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8.0,
    modules: tuple[str, ...] = ALL,
    base: Path = FOLDER,
    **settings: Any,
) -> Path:
    """Write random adapter weights in PEFT's format, for the checkpoint in `base`."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    weights = {name: weight for file in sorted(base.glob("*.safetensors")) for name, weight in load_file(file).items()}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(modules) and weight.dim() == 2:
            outputs, inputs = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder
