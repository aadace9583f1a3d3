from __future__ import annotations

import subprocess
import sys

import pytest

import reference_engine

TORCH_FREE = [
    "",
    ".block_pool",
    ".scheduler",
    ".requests.sequence",
    ".checkpoint.weights",
    ".requests.admission",
    ".observer",
]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_needs_no_torch(module: str) -> None:
    code = f"import sys, reference_engine{module}; sys.exit('torch' in sys.modules or 'harness' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


def test_every_public_name_resolves() -> None:
    for name in reference_engine.__all__:
        assert getattr(reference_engine, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        reference_engine.Engine  # noqa: B018
