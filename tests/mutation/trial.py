"""Run the tests of a module against a mutant of it, in a process of its own."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from tests.mutation.mutants import ROOT, Mutant

_LIBRARIES = ("torch", "transformers", "safetensors.torch", "pytest", "numpy", "tokenizers")

_NO_TESTS, _NOT_RUN = 5, 9
"""Exit status of pytest that found no test, and of a child that raised."""


def preload() -> None:
    """Import what takes long and is not under test, so that forks have it."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    assert not [name for name in sys.modules if name.startswith(("harness", "reference_engine"))], "imported too early"


def survives(mutant: Mutant, tests: Sequence[str], limit_s: float) -> str:
    """Return `killed`, `survived`, or `timeout`, which counts as noticed.

    Raises:
        RuntimeError: the tests did not run.
    """
    child = os.fork()
    if child == 0:
        status = _NOT_RUN
        try:
            status = _run(mutant, tests)
        finally:
            os._exit(status)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return _outcome(os.waitstatus_to_exitcode(status), mutant)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _outcome(status: int, mutant: Mutant) -> str:
    """Name pytest's exit status; a mutant may fail at import, in a fixture or in our plugin, but not leave no test."""
    if status in (_NO_TESTS, _NOT_RUN):
        raise RuntimeError(f"the tests of {mutant.path} did not run: pytest's exit status is {status}")
    return "killed" if status else "survived"


def _run(mutant: Mutant, tests: Sequence[str]) -> int:
    os.setsid()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    sys.meta_path.insert(0, _Changed(mutant))
    import pytest

    # A plugin that transformers has imported is not rewritten; only what it asserts would be the worse for it.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", ignored, "-m", "not slow and not gpu"]
    return int(pytest.main([*options, *(str(ROOT / test) for test in tests)]))


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module, with the mutant's source."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self._path, self._source = str(ROOT / mutant.path), mutant.whole

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._path, loader=self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See `importlib.abc.Loader`."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source as the module."""
        exec(compile(self._source, self._path, "exec"), module.__dict__)
