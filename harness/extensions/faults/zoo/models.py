"""Every decoder-only architecture of transformers as a tiny checkpoint with lively weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from harness.extensions.faults.zoo.lively import make_lively
from harness.extensions.faults.zoo.quiet import quiet
from harness.extensions.faults.zoo.tiny_config import tiny_config

NUM_TOKENS = 48


def build(model_type: str, *, seed: int = 0, settings: Mapping[str, Any] | None = None) -> PreTrainedModel:
    """Return a tiny model of an architecture in float32, in eval mode; the same weights for the same seed.

    `settings` replace fields of its configuration.

    Raises:
        Exception: what transformers raises, where it cannot build the architecture at this size.
    """
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(model_type)
        if settings:
            config = type(config)(**config.to_diff_dict() | dict(settings))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        make_lively(model, seed)
    return model


def save(model_type: str, folder: Path, *, seed: int = 0, settings: Mapping[str, Any] | None = None) -> None:
    """Write the checkpoint of an architecture into a folder: config.json, and safetensors in float32."""
    with quiet():
        build(model_type, seed=seed, settings=settings).save_pretrained(folder)


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a checkpoint as HF does, without a network, in eval mode."""
    with quiet():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def tokens(*, seed: int = 1, count: int = NUM_TOKENS) -> torch.Tensor:
    """Return token ids [1, count], none of them special."""
    return torch.randint(3, 250, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, V] of a forward over ids [1, T] without a cache."""
    result: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return result
