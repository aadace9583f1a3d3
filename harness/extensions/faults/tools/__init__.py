"""Adapters of tools: each is what somebody writes to ask one tool whether an engine is sound."""

import ast
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from harness.errors import Code, HarnessError
from harness.extensions.faults.answer import Tool

TOOLS: Mapping[str, str] = {
    name: f"{__name__}.{module}:TOOL"
    for name, module in {
        "harness": "check",
        "hooks": "hooks",
        "model-debugger": "model_debugger",
        "debug-mode": "debug_mode",
        "torchlens": "torchlens",
        "msprobe": "msprobe",
        "pytest-torch": "pytest_torch",
    }.items()
}
"""By the name for `--tool`: where the adapter is."""


def open_tool(name: str) -> Tool:
    """Return the adapter of a name in `TOOLS`, or of a `module:object`.

    Raises:
        HarnessError: BAD_OPTION: there is no such tool.
    """
    module, _, attribute = TOOLS.get(name, name).partition(":")
    try:
        tool: Tool = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        what, expected = f"no tool is called {name!r}", f"{', '.join(TOOLS)}, or module:object"
        raise HarnessError(Code.BAD_OPTION, what, where="--tool", expected=expected, actual=str(error)) from error
    return tool


def num_lines(name: str) -> int:
    """Return the number of lines of code of an adapter, with what several adapters share: what a user writes."""
    module = importlib.import_module(TOOLS.get(name, name).partition(":")[0])
    shared = [value for value in vars(module).values() if isinstance(value, ModuleType) and _is_ours(value)]
    return sum(len(_code_lines(Path(inspect.getfile(item)).read_text(encoding="utf-8"))) for item in (module, *shared))


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.startswith(f"{__name__}.")


def _code_lines(text: str) -> set[int]:
    """Return the numbers of lines with code other than imports and docstrings."""
    tree = ast.parse(text)
    left_out = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node)]
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    return lines - {at for node in left_out for at in _lines_of(node)}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _lines_of(node: ast.AST) -> Sequence[int]:
    return range(getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) + 1)
