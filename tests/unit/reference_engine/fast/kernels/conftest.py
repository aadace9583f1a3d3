from __future__ import annotations

import pytest
import torch

from .launching import DEVICES, launch_on


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU through Triton's interpreter, and a GPU where there is one."""
    return launch_on(request.param, monkeypatch)
