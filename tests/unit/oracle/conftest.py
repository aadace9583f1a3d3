"""The three embedded checkpoints as the oracle sees them, loaded once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.oracle.decoder import Decoder, load_decoder

NAMES = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")

Load = Callable[..., Decoder]


@pytest.fixture(scope="session")
def load(checkpoints: Path) -> Load:
    """Load a checkpoint in a dtype; a test that changes the model must load its own."""

    @cache
    def loaded(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
        return load_decoder(checkpoints / name, dtype=dtype)

    return loaded


@pytest.fixture(scope="session", params=NAMES)
def decoder(request: pytest.FixtureRequest, load: Load) -> Decoder:
    """Return each of the checkpoints in float32."""
    return load(request.param)


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    """Return tokens inside every checkpoint's vocabulary."""
    return torch.randint(3, 256, (23,), generator=torch.Generator().manual_seed(3)).tolist()
