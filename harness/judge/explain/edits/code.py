"""HF's code around an operation: the forwards of modules, the methods and functions that they call."""

import ast
import difflib
import inspect
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.edits.change import ModelChange, ToldChange
from harness.judge.explain.edits.operators import FACTOR, NORMS, ROUND, Edit, applied, edits_of
from harness.judge.explain.edits.words import term_of
from harness.judge.explain.edits.written_out import WRITTEN_OUT

_MOST_ALTERNATIVES = 12
"""Maximum number of neighbouring settings that one setting is exchanged with."""
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "sigmoid", "tanh")
"""Names of activations in transformers."""
LinesRun = Mapping[CodeType, set[int]]
"""Lines that ran of each function, by their numbers in its file."""


@dataclass(frozen=True, slots=True)
class SourceCode:
    """A function of HF, and the object that holds it."""

    module: str
    """Path of the module that runs it."""
    holder: Any
    """A module of the model, or the Python module of a function."""
    name: str
    function: FunctionType
    program: ast.Module
    """Definition of the function, without decorators."""
    file: str
    first: int
    """Number of the first line of the definition in its file."""

    def made(self, edit: Edit, factor: float) -> AbstractContextManager[None]:
        """Change the function for the duration of a block, with the factor that is fitted in it.

        Raises:
            SyntaxError, ValueError: the changed program does not compile.
        """
        space: dict[str, Any] = {}
        names = {"torch": torch, ROUND: _rounded, FACTOR: factor, "__class__": self._class}
        exec(self._compiled(edit), {**self.function.__globals__, **names}, space)
        changed = space[self.function.__name__]
        return replaced(
            self.holder, self.name, MethodType(changed, self.holder) if isinstance(self.holder, nn.Module) else changed
        )

    @property
    def _class(self) -> type:
        """The class that defines the function, which `super()` begins at."""
        kinds = (self.holder if isinstance(self.holder, type) else type(self.holder)).__mro__
        return next((kind for kind in kinds if self.name in vars(kind)), kinds[0])

    def _compiled(self, edit: Edit) -> CodeType:
        with warnings.catch_warnings(), applied(edit), _turns_counted(self.program):
            warnings.simplefilter("ignore", SyntaxWarning)  # of constants where a variable was
            return compile(self.program, f"<{self.file}, changed>", "exec")

    def told(self, edit: Edit, factor: float) -> ToldChange:
        """Return a change in words, with the changed lines."""
        where = type(self.holder).__name__ if isinstance(self.holder, nn.Module) else self.name
        new, term = edit.new.replace(FACTOR, f"{factor:.4g}"), term_of(edit, self.holder)
        if edit.is_fitted and FACTOR not in edit.new:
            new += f" {factor:.4g}"
        cause = f"in {where} ({Path(self.file).name}:{self.first + edit.line - 1}), `{edit.old}` {new}"
        return ToldChange(
            cause=cause if term is None else f"{term.replace(FACTOR, f'{factor:.4g}')}: {cause}",
            detail=f"your engine computes what HF computes with this change: {self._diff(edit, factor)}",
        )

    def _diff(self, edit: Edit, factor: float) -> str:
        """Return the changed lines, as a diff of the statement."""
        before = ast.unparse(self.program).splitlines()
        with applied(edit):
            after = ast.unparse(self.program).replace(FACTOR, f"{factor:.4g}").splitlines()
        lines = [
            line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
        ]
        return " | ".join(f"{line[0]} {line[1:].strip()}" for line in lines[:4])

    def changes(self, lines: LinesRun | None = None, *, in_class: bool = False) -> list[ModelChange]:
        """Return the changes of the function, or of its statements that ran, the likely ones first.

        Args:
            lines: that ran; None for all.
            in_class: whether a method is changed in all modules of its class.
        """
        is_method = in_class and isinstance(self.holder, nn.Module)
        changed = replace(self, holder=type(self.holder)) if is_method else self
        return [
            ModelChange(
                module=self.module,
                rank=edit.rank,
                make=partial(changed.made, edit),
                tell=partial(self.told, edit),
                is_fitted=edit.is_fitted,
                is_vague=term_of(edit, self.holder) is None,
            )
            for edit in self.edits(lines)
        ]

    def edits(self, lines: LinesRun | None = None) -> list[Edit]:
        """Return the changes of the function, or of its statements that ran, the likely ones first."""
        ran = None
        if lines is not None and self.function not in WRITTEN_OUT.values():
            ran = frozenset(line - self.first + 1 for line in lines.get(self.function.__code__, ()))
        if ran is not None and not ran:
            return []
        alternatives = _alternatives(self.holder) if isinstance(self.holder, nn.Module) else ()
        return _edits(self.function, tuple(alternatives), ran)


@contextmanager
def _turns_counted(program: ast.Module) -> Iterator[None]:
    """Let each turn of a loop begin with a function of torch: `Meter` ends a loop that a change keeps from ending."""
    loops = [node for node in ast.walk(program) if isinstance(node, ast.For | ast.While)]
    for loop in loops:
        loop.body[:0] = ast.parse("torch.empty(0)").body
    try:
        yield
    finally:
        for loop in loops:
            del loop.body[0]


@contextmanager
def lines_run() -> Iterator[LinesRun]:
    """Collect the lines of HF's code that run in the block."""
    lines = defaultdict[CodeType, set[int]](set)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not frame.f_globals.get("__name__", "").startswith("transformers."):
            return None
        lines[frame.f_code].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@cache
def _edits(
    function: FunctionType, alternatives: tuple[tuple[str, tuple[str, ...]], ...], ran: frozenset[int] | None
) -> list[Edit]:
    return edits_of(parsed(function)[0], dict(alternatives), ran)


def _alternatives(holder: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each module or number that a module holds, with those that may stand in its place."""
    yield (
        NORMS,
        tuple(f"self.{name}" for name, child in holder.named_children() if "norm" in type(child).__name__.lower()),
    )
    shapes = {name: [tuple(p.shape) for p in child.parameters()] for name, child in holder.named_children()}
    for name, shape in shapes.items():
        yield f"self.{name}", tuple(f"self.{item}" for item, like in shapes.items() if item != name and like == shape)
    for prefix, values in (("self", vars(holder)), ("self.config", vars(getattr(holder, "config", None) or object))):
        numbers = _numbers(values)
        for name, value in numbers.items():
            near = [item for item, like in numbers.items() if type(like) is type(value) and like != value]
            yield f"{prefix}.{name}", tuple(f"{prefix}.{item}" for item in near[:_MOST_ALTERNATIVES])
        for name, value in values.items():
            if isinstance(value, str) and value in _ACTIVATIONS:
                yield f"{prefix}.{name}", tuple(repr(item) for item in _ACTIVATIONS if item != value)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if type(value) in (int, float) and not name.startswith("_")}


def _codes_of(modules: Mapping[str, nn.Module]) -> Iterator[SourceCode]:
    """Yield the forwards of modules, by their paths, and then the functions that they call."""
    functions: dict[str, SourceCode] = {}
    for path, module in modules.items():
        forward = code_of(path, module, "forward", type(module).forward)
        methods = [] if forward is None else _methods(path, module, forward)
        for code in (forward, *methods):
            if code is None:
                continue
            yield code
            for name, function in _called(code):
                holder = inspect.getmodule(function)
                of_function = code_of(path, holder, name, function) if name not in functions else None
                if of_function is not None:
                    functions[name] = of_function
    yield from functions.values()


def changes_of_code(wrong: WrongOperation, lines: LinesRun) -> Iterator[ModelChange]:
    """Yield the changes of the code around an operation, as far as it ran."""
    for code in _codes_of({path: wrong.hf.module(path) for path in modules_around(wrong)}):
        yield from code.changes(lines)


def changes_of_classes(model: nn.Module, lines: LinesRun) -> Iterator[ModelChange]:
    """Yield the changes of the code of a model, as far as it ran: in all modules of a class at once."""
    first = dict[type, str]()
    for path, module in model.named_modules():
        first.setdefault(type(module), path)
    for code in _codes_of({path: model.get_submodule(path) for path in first.values()}):
        yield from code.changes(lines, in_class=True)


def _methods(path: str, module: nn.Module, forward: SourceCode) -> list[SourceCode | None]:
    """Return the methods of a module that its forward calls."""
    names = {
        node.func.attr
        for node in ast.walk(forward.program)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self"
    }
    return [code_of(path, module, name, vars(type(module)).get(name)) for name in sorted(names)]


def code_of(path: str, holder: Any, name: str, function: Any) -> SourceCode | None:
    """Return a function of HF's, or one of torch that is written out; None for others, or without source."""
    function = WRITTEN_OUT.get(function, function)
    if callable(function):
        function = inspect.unwrap(function)  # the wrapper has the names of another file
    is_known = function in WRITTEN_OUT.values() or getattr(function, "__module__", "").startswith("transformers.")
    if not isinstance(function, FunctionType) or not is_known:
        return None
    try:
        program, first = parsed(function)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return SourceCode(path, holder, name, function, program, inspect.getfile(function), first)


@cache
def parsed(function: FunctionType) -> tuple[ast.Module, int]:
    """Return the definition of a function without decorators and annotations, and the number of its first line."""
    lines, first = inspect.getsourcelines(function)
    program = ast.parse(textwrap.dedent("".join(lines)))
    (definition,) = program.body
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__name__:
        # For code of `exec`, Python 3.13 returns lines of what the interpreter was started with.
        raise OSError("these lines do not define the function")
    definition.decorator_list, definition.returns = [], None
    for node in ast.walk(program):
        if isinstance(node, ast.Call) and ast.unparse(node) == "super()":
            node.args = [ast.Name("__class__", ast.Load()), ast.Name("self", ast.Load())]
    ast.fix_missing_locations(program)
    for node in ast.walk(definition.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    return program, first


def _called(code: SourceCode) -> Iterator[tuple[str, FunctionType]]:
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


def modules_around(wrong: WrongOperation) -> list[str]:
    """Return the modules around an operation, the innermost first, and those inside of the first two without a row.

    A convolution or a product that HF computes by a function is a module that holds a weight and is never called. What
    was recorded of a module is not computed from its code.
    """
    assert wrong.rerun is not None
    path, part = wrong.operation.module, wrong.rerun.part_inputs.call.path
    taps = {op.module for op in wrong.graph} - {op.module for op in wrong.graph if op.tap in wrong.unrecorded}
    around = list[str]()
    while path == part or path.startswith(f"{part}."):
        around.append(path)
        path = path.rpartition(".")[0]
    inner = [f"{base}.{name}" for base in around[:2] for name, _ in wrong.hf.module(base).named_modules() if name]
    return list(dict.fromkeys([*around, *(item for item in inner if item not in taps)]))


def _rounded(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    with torch._C.DisableTorchFunction():  # the run undoes the casts of HF's code
        return x.to(dtype).to(x.dtype)
