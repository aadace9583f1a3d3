"""Greedy tokens of an engine under many schedules, to be held against transformers' own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_engine import EngineConfig, LLMEngine, SamplingParams

PROMPTS = [[*range(5, 42)], [*range(5, 30), 7, 9, 11], [*range(50, 57)]]
"""The first two begin alike."""
NUM_NEW = 9

every_schedule = pytest.mark.parametrize(
    "options",
    [
        {"block_size": 4},
        {"block_size": 1},
        {"block_size": 4, "max_num_batched_tokens": 5},
        {"block_size": 4, "num_blocks": 16},
        {"block_size": 4, "enable_prefix_caching": True, "max_num_seqs": 1},
        {"block_size": 4, "num_speculative_tokens": 3},
        {"attention_backend": "contiguous", "num_speculative_tokens": 2},
        {"attention_backend": "recompute"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)


def random_schedule(draw: random.Random) -> dict[str, Any]:
    """Draw options of an engine."""
    return {
        "block_size": draw.choice([1, 3, 16, 64]), "max_num_batched_tokens": draw.choice([3, 11, 2048]),
        "num_speculative_tokens": draw.choice([0, 1, 4]), "enable_prefix_caching": draw.random() < 0.5,
        "max_num_seqs": draw.choice([1, 8]),
    }  # fmt: skip


def greedy(folder: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt."""
    with LLMEngine(folder, EngineConfig(dtype="float32", debug_checks=True, **options)) as engine:
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
        return [output.token_ids for output in engine.generate(prompts, params)]


def finish(engine: LLMEngine) -> dict[int, list[int]]:
    """Run an engine to its end; return the tokens of each request from here on."""
    made: dict[int, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            made.setdefault(output.request_id, []).append(output.token_id)
    return made


def assert_ignored(tensor: str, folder: Path, copy: Path) -> None:
    """Assert that a tensor of a copy of the checkpoint changes no token."""
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = load_file(copy / "model.safetensors")
    save_file({**weights, tensor: torch.zeros(3)}, copy / "model.safetensors")
    assert greedy(copy, PROMPTS[2:]) == greedy(folder, PROMPTS[2:])
