"""Edits of transformers' source, as mutation testing makes them: one node of one function."""

import ast
import copy
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from torch import nn

_EXCHANGED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
Edit = tuple[str, Callable[[nn.Module], None], str | None]
"""In words; what edits a model object; and the pattern of what is true of the cause, None if nobody declared it."""


def edit(model: nn.Module, random: Random) -> Edit | None:
    """Return an edit of the forward of a class of the model's modules, or of a function of its file that it calls.

    Args:
        model: a model object of transformers, which is not changed.
        random: draws class, function, node and change.
    """
    kinds = sorted(
        {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models.")},
        key=lambda kind: kind.__qualname__,
    )
    kind = random.choice(kinds)
    forward = inspect.unwrap(kind.forward)
    called = [name for name in forward.__code__.co_names if _is_of_file(forward.__globals__.get(name), kind)]
    name = random.choice(["forward", "forward", *sorted(called)])
    function = forward if name == "forward" else forward.__globals__[name]
    changed = _edited(function, random)
    if changed is None:
        return None
    words, made = changed

    def plant(target: nn.Module) -> None:
        whole = made if name == "forward" else _with_globals(forward, {name: made})
        for module in target.modules():
            if type(module) is kind:
                module.forward = types.MethodType(whole, module)

    return f"{kind.__name__}.{name}: {words}", plant, None


def _is_of_file(value: object, kind: type) -> bool:
    return inspect.isfunction(value) and value.__module__ == kind.__module__ and not inspect.isgeneratorfunction(value)


def _with_globals(function: Any, more: dict[str, Any]) -> Any:
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **more}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _edited(function: Any, random: Random) -> tuple[str, Any] | None:
    """Return what was changed in a function, and the changed function; None if it has nothing to change."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    (body,) = tree.body
    assert isinstance(body, ast.FunctionDef)
    body.decorator_list = []
    places = [node for statement in body.body for node in ast.walk(statement)]
    changes = [change for node in places for change in _changes(node)]
    if not changes:
        return None
    node, make = random.choice(changes)
    before = ast.unparse(node)
    make(node)
    words = f"`{before}` becomes `{ast.unparse(node)}`"
    scope: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), f"<drawn edit of {function.__qualname__}>", "exec")
    exec(code, dict(vars(sys.modules[function.__module__])), scope)  # transformers' own source
    return words, _with_globals(scope[body.name], vars(sys.modules[function.__module__]))


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[Any], None]]]:
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _EXCHANGED:
        yield node, lambda at: setattr(at, "op", _EXCHANGED[type(at.op)]())
    if isinstance(node, ast.BinOp):
        yield node, lambda at: _become(at, ast.BinOp(at.left, ast.Add(), ast.Constant(0)))
        if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult):
            yield node, lambda at: _become(at, ast.BinOp(at.right, at.op, at.left))
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _EXCHANGED:
        yield node, lambda at: setattr(at, "ops", [_EXCHANGED[type(at.ops[0])](), *at.ops[1:]])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield node, lambda at: _become(at, ast.UnaryOp(ast.UAdd(), at.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, lambda at: setattr(at, "value", not at.value if isinstance(at.value, bool) else at.value + 1)
        if isinstance(node.value, float):
            yield node, lambda at: setattr(at, "value", at.value * 1.1)
    if isinstance(node, ast.Call) and node.args:
        if isinstance(node.args[0], ast.Name | ast.Attribute | ast.BinOp | ast.Call):
            yield node, lambda at: setattr(at, "func", ast.Lambda(_any_arguments(), ast.Name("drawn_x", ast.Load())))
        if len(node.args) > 1:
            yield node, lambda at: setattr(at, "args", [at.args[1], at.args[0], *at.args[2:]])
    if isinstance(node, ast.Call) and any(item.arg is not None for item in node.keywords):
        yield node, lambda at: setattr(at, "keywords", at.keywords[1:])
    if isinstance(node, ast.If | ast.IfExp):
        yield node, lambda at: setattr(at, "test", ast.UnaryOp(ast.Not(), at.test))


def _any_arguments() -> ast.arguments:
    rest, named = ast.arg("drawn_rest"), ast.arg("drawn_named")
    return ast.arguments([], [ast.arg("drawn_x")], rest, [], [], named, [])


def _become(node: Any, new: ast.AST) -> None:
    """Put another node in the place of one."""
    made = copy.copy(new)
    node.__class__ = made.__class__
    node.__dict__.clear()
    node.__dict__.update(made.__dict__)
