"""What a comparison is asked for."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from harness.formats.checkpoint import Checkpoint
from harness.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is compared, and what is at hand besides the log."""

    model: str
    """As the user named it."""
    checkpoint: Checkpoint
    dtype: str
    device: str = "cpu"
    truth: str = "auto"
    head: str | None = None
    """Dtype that both sides mean to compute their head in; None for the model's."""
    trainer: nn.Module | None = None
    module: nn.Module | None = None
    """What --model was given as, if it is no checkpoint: its adapters may be beside its weights on both sides."""
    layout: str = "right"
    autocast: torch.dtype | None = None
    """Dtype of the autocast that the trainer is run under; None for none."""
    engine: Plan | None = None
    engine_weights: Path | None = None
    previous: Path | None = None
    """Earlier weights, of which some may be in use still."""
