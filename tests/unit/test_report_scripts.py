"""The scripts behind the reports use names that are there: no other test runs them, and mypy leaves them out."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    path
    for folder in ("reports", "tests/benchmarks", "tests/calibrations")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
OURS = ("harness", "reference_engine", "tests")


RUNS = {
    "engine_cpu_time": ["--shape", "tiny", "--peer", "hf-generate", "--repeats", "1"],
    "scheduler_step": ["--num-seqs", "8", "--num-steps", "20"],
    "trace_speed": ["--megabytes", "2", "--repeats", "1", "--out", "OUT"],
    "module_walk": [],
    "check_growth": ["--axes", "tokens", "--most", "1"],
    "eight_schedules": ["--small", "--layers", "1", "--times", "1"],
}
"""Scripts of tests/benchmarks that pages name, with options under which they take seconds."""


def imported(path):
    """Yield module and name of what a script imports of the project."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in OURS:
            yield from ((node.module, name.name) for name in node.names)


def is_there(module, name):
    if hasattr(import_module(module), name):
        return True
    try:
        import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def used_of_modules(path):
    """Yield module and name of what a script takes from the modules of the project that it imports whole."""
    tree = ast.parse(path.read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in OURS:
            for name in node.names:
                if find_spec_of(f"{node.module}.{name.name}"):
                    modules[name.asname or name.name] = f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def find_spec_of(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is no package: it is a name in a module
        return False


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_a_script_takes_is_there(path, monkeypatch):
    if (
        not torch.cuda.is_available()
    ):  # a kernel is interpreted or compiled as it is imported, for all tests of the process
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    names = [*imported(path), *used_of_modules(path)]
    try:
        missing = [f"{module}.{name}" for module, name in names if not is_there(module, name)]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        pytest.skip(f"needs {error.name}")
    assert not missing


def test_a_name_that_is_gone_is_seen():
    assert not is_there("harness.extensions.server.sampler.requests", "ask_sampler")
    assert is_there("harness.extensions.server.audit", "run")


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_a_script_that_a_page_names_runs(script, tmp_path):
    options = [str(tmp_path / "out.md") if option == "OUT" else option for option in RUNS[script]]
    path = ROOT / "tests" / "benchmarks" / f"{script}.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, path, *options], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + (tmp_path / "out.md").read_text() if "OUT" in RUNS[script] else done.stdout).strip()
