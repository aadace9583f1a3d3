"""Where the kernels run in this process: compiled on a GPU, or interpreted on the CPU; Triton allows one of the two."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest
import torch

__all__ = ["DEVICES", "IGNORE_NUMPY", "launch_on"]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Triton 3.6 and older under numpy 2.3 and older.
IGNORE_NUMPY = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

HAS_TRITON = find_spec("triton") is not None
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()


def launch_on(device: str, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the device, ready for the kernels, or skip the test and say why."""
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if device == "cpu":
        _check_interpreter()
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        _interpret_standard_library(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    elif IS_INTERPRETING:
        pytest.skip("TRITON_INTERPRET=1 interprets the kernels in this process")
    return torch.device(device)


def _check_interpreter() -> None:
    if not IS_INTERPRETING:
        pytest.skip("the kernels are compiled in this process; TRITON_INTERPRET=1 pytest interprets them")
    triton_version = tuple(map(int, version("triton").split(".")[:2]))
    if triton_version < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton before 3.7 cannot interpret loops under numpy 2.4 (triton#9171)")


def _interpret_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do to `tl.max` and its like what TRITON_INTERPRET=1 does at triton's import: torch has imported it by now."""
    jit, language = importlib.import_module("triton.runtime.jit"), importlib.import_module("triton.language")
    for name, function in list(vars(language.standard).items()):
        if isinstance(function, jit.JITFunction):
            interpreted = jit.jit(function.fn)
            monkeypatch.setattr(language.standard, name, interpreted)
            if hasattr(language, name):
                monkeypatch.setattr(language, name, interpreted)
