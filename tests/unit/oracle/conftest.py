"""The three embedded checkpoints as the oracle sees them, loaded once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from harness.oracle import model
from harness.oracle.model import HFModel, load_model
from harness.oracle.weights import StreamedWeights

NAMES = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")

Load = Callable[..., HFModel]


@pytest.fixture(scope="session")
def load(checkpoints: Path) -> Load:
    """Load a checkpoint in a dtype; a test that changes the model must load its own."""

    @cache
    def loaded(name: str, dtype: torch.dtype = torch.float32) -> HFModel:
        return load_model(checkpoints / name, dtype=dtype)

    return loaded


@pytest.fixture(scope="session", params=NAMES)
def hf(request: pytest.FixtureRequest, load: Load) -> HFModel:
    """Return each of the checkpoints in float32."""
    return load(request.param)


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    """Return tokens inside every checkpoint's vocabulary."""
    return torch.randint(3, 256, (23,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a checkpoint as one that is too large to be held."""

    def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> HFModel:
        with monkeypatch.context() as patch:
            patch.setattr(model, "_RESIDENT_BYTES", 0)
            hf = load_model(folder, dtype=dtype)
        assert isinstance(hf.weights, StreamedWeights)
        return hf

    return loaded
