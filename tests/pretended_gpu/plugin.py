"""pytest -p tests.pretended_gpu.plugin: tests for CUDA run on the pretended device, kernels interpreted."""

import os
import sys
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from .device import install

install()


def pytest_collection_modifyitems(items: Any) -> None:
    """Let the tests of kernels run on `cuda` although kernels are interpreted here."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").endswith(".launching"):
            module.IS_INTERPRETING = False  # type: ignore[attr-defined]
    for item in items:
        if getattr(item, "originalname", None) == "test_on_a_gpu_it_is_as_near_as_paged":
            item.add_marker(pytest.mark.skip(reason="torch's kernel for varying lengths is a GPU's own"))
