"""Names that say nothing: what is called so gets a name that says what it is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {"own", "each", "found", "given", "other"}
ROOMS = ("harness", "reference_engine", "cases", "tests", "reports", "docs")


def named(tree):
    """Yield the names that a module gives to variables, arguments, functions and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("room", ROOMS)
def test_a_name_says_what_a_thing_is(room):
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name, line in named(ast.parse(path.read_text(encoding="utf-8")))
        if name in NAMES
    ]
    assert bad == []
