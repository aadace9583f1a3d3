"""Models of other families than those of the embedded checkpoints."""

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from harness.oracle.model import HFModel, load_model

from .tiny_models import save, tiny_model

Tiny = Callable[..., HFModel]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the checkpoint of a tiny model of a family; a test that changes it must make its own."""
    folder = tmp_path_factory.mktemp("tiny-models")

    @cache
    def saved(family: str) -> Path:
        return save(tiny_model(family), folder / family)

    return saved


@pytest.fixture(scope="session")
def tiny(tiny_folder: Callable[[str], Path]) -> Tiny:
    """Load a tiny model of a family in a dtype; a test that changes the model must load its own."""

    @cache
    def loaded(family: str, dtype: torch.dtype = torch.float32) -> HFModel:
        return load_model(tiny_folder(family), dtype=dtype)

    return loaded


@pytest.fixture(scope="session")
def fused() -> ModuleType:
    """Return the module of the examples' toy engine, whose projections are fused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples")
        return importlib.import_module("fused_engine")
