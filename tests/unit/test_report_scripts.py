"""The scripts behind the reports import names that are there: no other test runs them, and mypy leaves them out."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

REPORTS = Path(__file__).parents[2] / "reports"
OURS = ("harness", "reference_engine", "tests")


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


@pytest.mark.parametrize("path", sorted(REPORTS.rglob("*.py")), ids=lambda path: path.name)
def test_what_a_script_imports_is_there(path):
    missing = [f"{module}.{name}" for module, name in imported(path) if not is_there(module, name)]
    assert not missing


def test_a_name_that_is_gone_is_seen():
    assert not is_there("harness.extensions.server.sampler.requests", "ask_sampler")
    assert is_there("harness.extensions.server.audit", "run")
