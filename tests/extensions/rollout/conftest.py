"""One set of rollouts for all tests, and HF's model as the trainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.extensions.rollout.format import read_rollouts
from harness.extensions.rollout.result import RolloutResult
from harness.extensions.rollout.run import compare_rollouts
from harness.extensions.rollout.sides import Request
from harness.formats.checkpoint import Checkpoint, resolve
from harness.oracle.model import load_model

from .training import prompts, rollout, train_column, write_rows

MODEL = "llama-tiny"


@pytest.fixture(scope="module")
def trainer() -> Any:
    return load_model(Path(resolve(MODEL)), dtype=torch.bfloat16, stays=True).model


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return rollout(MODEL, prompts())


@pytest.fixture(scope="module")
def columns(trainer: Any, rows: list[dict[str, Any]]) -> list[list[float]]:
    return train_column(trainer, rows)


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., RolloutResult]:
    """Compare rows, with or without a trainer's columns, in bfloat16."""

    def compare(
        rows: list[dict[str, Any]], columns: list[list[float]] | None = None, *, model: str = MODEL, **options: Any
    ) -> RolloutResult:
        path = write_rows(tmp_path / "rollouts.jsonl", rows, columns)
        request = Request(model=model, checkpoint=Checkpoint(Path(resolve(model))), dtype="bfloat16", **options)
        return compare_rollouts(read_rollouts(path), request)

    return compare
