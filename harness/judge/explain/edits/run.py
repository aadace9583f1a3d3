"""Run the part of the model around a wrong operation with one expression of HF's source changed.

Every module around an operation is a few lines of Python, and so are the functions that it calls. No family and no kind
of operation is known here: a norm, a gate, a router and a scan are all code.
"""

import ast
import difflib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from harness.judge.explain.any_kind.settings import ran_again
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.edits.operators import Edit, edited, edits_of

_MOST_EDITS = 600
"""Maximum number of edits of one function."""


@dataclass(frozen=True, slots=True)
class _Code:
    """A function of HF, and the object that holds it."""

    holder: Any
    """A module of the model, or the Python module of a function."""
    name: str
    function: FunctionType
    program: ast.Module
    """Definition of the function, without decorators."""
    file: str
    first: int
    """Number of the first line of the definition in its file."""

    def changed(self, edit: Edit) -> Callable[..., Any]:
        """Return the function with a change."""
        space: dict[str, Any] = {}
        names = {**self.function.__globals__, "torch": torch, "_rounded": _rounded, "__class__": type(self.holder)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of constants where a variable was
            code = compile(edited(self.program, edit), f"<{self.file}, changed>", "exec")
        exec(code, names, space)
        function = space[self.function.__name__]
        return MethodType(function, self.holder) if isinstance(self.holder, nn.Module) else function

    def place(self, edit: Edit) -> str:
        """Return the file and the line of a change."""
        return f"{Path(self.file).name}:{self.first + edit.line - 1}"

    def diff(self, edit: Edit) -> str:
        """Return the changed lines, as a diff of the statement."""
        before, after = (ast.unparse(tree).splitlines() for tree in (self.program, edited(self.program, edit)))
        lines = [
            line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
        ]
        return " | ".join(f"{line[0]} {line[1:].strip()}" for line in lines[:4])


def other_code(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what the operation gives with one expression of HF's code around it changed.

    Causes: in *module* (*file:line*), `*expression*` is left out, is applied twice, is `*expression*`, takes the other
    branch, is rounded to *dtype*.
    """
    budget = wrong.edit_budget
    if budget is None or budget.seconds <= 0 or (reran := ran_again(wrong)) is None:
        return
    places, right = reran
    seen = {_digest(right)}
    for code, edit in _in_turns(wrong):
        if budget.seconds <= 0:
            return
        with budget.spent():
            output = _under(wrong, code, edit, places, right)
            if output is None or _digest(output) in seen:
                continue
            seen.add(_digest(output))
            hypothesis = _hypothesis(code, edit, output)
        yield hypothesis


def _hypothesis(code: _Code, edit: Edit, output: torch.Tensor) -> Hypothesis:
    where = type(code.holder).__name__ if isinstance(code.holder, nn.Module) else code.name
    return Hypothesis(
        cause=f"in {where} ({code.place(edit)}), `{edit.old}` {edit.new}",
        output=output,
        detail=f"HF computes this with: {code.diff(edit)}",
        is_vague=True,  # what has a name of its own and fits as well comes first
    )


def _digest(output: torch.Tensor) -> int:
    return hash(output.contiguous().numpy().tobytes())


def _in_turns(wrong: WrongOperation) -> list[tuple[_Code, Edit]]:
    """Return the edits of all functions around an operation, the likely ones of each first, the nearest code first."""
    all_edits = [(code, edit) for code in _codes(wrong) for edit in _edits(code.function)[:_MOST_EDITS]]
    return sorted(all_edits, key=lambda item: item[1].rank)


@cache
def _edits(function: FunctionType) -> list[Edit]:
    return edits_of(_parsed(function)[0])


def _under(
    wrong: WrongOperation, code: _Code, edit: Edit, places: torch.Tensor, right: torch.Tensor
) -> torch.Tensor | None:
    """Return the rows under a change; None if it does not run, or not to numbers of the same shape, or to zeros alone.

    Many changes give zeros, and so does whatever is not computed or not loaded.
    """
    assert wrong.rerun is not None
    try:
        with replaced(code.holder, code.name, code.changed(edit)):
            output = wrong.rerun.run()[places]
    except Exception:  # most changes of a program do not run
        return None
    is_said = output.shape == right.shape and bool(output.isfinite().all()) and bool(output.any())
    return output if is_said else None


def _codes(wrong: WrongOperation) -> Iterator[_Code]:
    """Yield the forwards of the modules around an operation, the innermost first, and the functions that they call."""
    functions: dict[str, _Code] = {}
    for path in _modules(wrong):
        module = wrong.hf.module(path)
        forward = _code(module, "forward", inspect.unwrap(type(module).forward))
        methods = [] if forward is None else _methods(module, forward)
        for code in (forward, *methods):
            if code is None:
                continue
            yield code
            for name, function in _called(code):
                of_function = _code(inspect.getmodule(function), name, function) if name not in functions else None
                if of_function is not None:
                    functions[name] = of_function
    yield from functions.values()


def _methods(module: nn.Module, forward: _Code) -> list[_Code | None]:
    """Return the methods of a module that its forward calls."""
    names = {
        node.func.attr
        for node in ast.walk(forward.program)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self"
    }
    return [_code(module, name, vars(type(module)).get(name)) for name in sorted(names)]


def _code(holder: Any, name: str, function: Any) -> _Code | None:
    """Return a function of HF's; None for one of torch, or without source."""
    if not isinstance(function, FunctionType) or not function.__module__.startswith("transformers."):
        return None
    try:
        program, first = _parsed(function)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if any(isinstance(node, ast.While) for node in ast.walk(program)):
        return None  # a change might never end
    return _Code(holder, name, function, program, inspect.getfile(function), first)


@cache
def _parsed(function: FunctionType) -> tuple[ast.Module, int]:
    """Return the definition of a function without decorators, and the number of its first line."""
    lines, first = inspect.getsourcelines(function)
    program = ast.parse(textwrap.dedent("".join(lines)))
    (definition,) = program.body
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__name__:
        # For code of `exec`, Python 3.13 returns lines of what the interpreter was started with.
        raise OSError("these lines do not define the function")
    definition.decorator_list = []
    return program, first


def _called(code: _Code) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of the same file that a function calls by their names."""
    names = {
        node.func.id
        for node in ast.walk(code.program)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for name in sorted(names):
        function = code.function.__globals__.get(name)
        if isinstance(function, FunctionType) and function.__module__ == code.function.__module__:
            yield name, function


def _modules(wrong: WrongOperation) -> list[str]:
    """Return the modules around an operation, the innermost first, and those inside of it that are no taps."""
    assert wrong.rerun is not None
    path, part = wrong.operation.module, wrong.rerun.part_inputs.call.path
    taps = {operation.module for operation in wrong.graph}
    inner = [f"{path}.{name}" for name, _ in wrong.module.named_modules() if name]
    around = list[str]()
    while path == part or path.startswith(f"{part}."):
        around.append(path)
        path = path.rpartition(".")[0]
    return [*around, *(item for item in inner if item not in taps)]


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype).to(x.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
