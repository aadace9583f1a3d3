"""Changes of one expression of a program, as in mutation testing, the likely ones first."""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_LOW = "_rounded"
"""Name of the rounding function in a changed program."""
_COMPUTES_NOTHING = frozenset(
    (
        "to",
        "view",
        "reshape",
        "contiguous",
        "size",
        "type",
        "float",
        "unsqueeze",
        "squeeze",
        "flatten",
        "expand",
        "clone",
    )
)
_INSTEAD = {
    "mean": "{0}.sum(-1, keepdim=True)",
    "sum": "{0}.mean(-1, keepdim=True)",
    "softmax": "torch.sigmoid({0})",
    "sigmoid": "{0}.softmax(-1)",
    "tanh": "torch.sigmoid({0})",
    "act_fn": "torch.nn.functional.gelu({0})",
}
_OTHER_OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.Div), ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
}  # fmt: skip
_OTHER_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OF_SETTINGS = ("1", "0", "{0} * {0}", "1 / {0}", "-{0}", "{0} + 1", "{0} - 1", "1e-5", "1e-6")
_COMPUTING = ast.Assign | ast.AugAssign | ast.If | ast.Expr
_DTYPES = ("bfloat16", "float16")
_LONGEST = 100
"""Maximum number of characters of an expression in a report."""
LIKELY, POSSIBLE, UNLIKELY = range(3)
"""Ranks: what is left out, exchanged or a branch; other constants and operators; what is rounded."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a program: a node, its place, and the replacement."""

    number: int
    """Index of the node in the order of `ast.walk`."""
    line: int
    """Line of the node in the program, from 1 on."""
    rank: int
    old: str
    new: str
    node: ast.AST | None
    """The new node; None to remove a statement."""


def edits_of(program: ast.Module) -> list[Edit]:
    """Return the changes of a program, the likely ones first."""
    called = {id(node.func) for node in ast.walk(program) if isinstance(node, ast.Call)}
    edits = [
        Edit(number, getattr(node, "lineno", 1), rank, _shown(node), words, new)
        for number, node in enumerate(ast.walk(program))
        if id(node) not in called
        for rank, new, words in _changes(node)
    ]
    return sorted(edits, key=lambda edit: edit.rank)


def edited(program: ast.Module, edit: Edit) -> ast.Module:
    """Return a copy of a program with one change."""
    changed = copy.deepcopy(program)
    target = next(node for number, node in enumerate(ast.walk(changed)) if number == edit.number)
    _Put(target, edit.node).visit(changed)
    return ast.fix_missing_locations(changed)


def _shown(node: ast.AST) -> str:
    """Return an expression, or the first line of a statement."""
    text = ast.unparse(node).partition("\n")[0].rstrip(":")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


class _Put(ast.NodeTransformer):
    """Replaces a node by another one."""

    def __init__(self, target: ast.AST, new: ast.AST | None) -> None:
        self.target, self.new = target, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the new node if this is the target."""
        if node is self.target:
            return ast.Pass() if self.new is None else copy.deepcopy(self.new)
        return self.generic_visit(node)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _changes(node: ast.AST) -> Iterator[tuple[int, ast.AST | None, str]]:
    """Yield the rank, the replacement and the description of each change of a node."""
    match node:
        case ast.BinOp():
            yield from _of_operation(node)
        case ast.Call():
            yield from _of_call(node)
        case ast.If(test=test):
            yield LIKELY, _if(node, _expression(f"not ({ast.unparse(test)})")), "takes the other branch"
        case ast.IfExp(body=body, orelse=orelse):
            yield LIKELY, orelse, f"is always `{ast.unparse(orelse)}`"
            yield LIKELY, body, f"is always `{ast.unparse(body)}`"
        case ast.AugAssign():
            yield LIKELY, None, "is left out"
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            if any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(value)):
                yield LIKELY, None, "is left out"  # without it, the variable is as it was before
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield LIKELY, operand, f"is `{ast.unparse(operand)}`"
        case ast.Compare(ops=[operator]) if type(operator) in _OTHER_COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops = [_OTHER_COMPARISONS[type(operator)]()]
            yield POSSIBLE, changed, f"is `{ast.unparse(changed)}`"
        case ast.Constant(value=bool() as switch):
            yield LIKELY, ast.Constant(not switch), f"is {not switch}"
        case ast.Constant(value=int() | float() as number):
            for replacement in dict.fromkeys((0, 1, 2, -1, number + 1, number - 1)):
                if replacement != number:
                    yield POSSIBLE, ast.Constant(replacement), f"is {replacement}"
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Load()):
            name = ast.unparse(node)
            for text in _OF_SETTINGS:
                yield POSSIBLE, _expression(text.format(name)), f"is `{text.format(name)}`"
        case ast.Tuple(elts=[first, second, *rest], ctx=ast.Load()):
            yield POSSIBLE, ast.Tuple([second, first, *rest], ast.Load()), "is in the other order"
    for statements in (getattr(node, name, None) for name in ("body", "orelse")):
        if isinstance(statements, list):
            yield from _of_order(node, statements)
    if isinstance(node, ast.BinOp | ast.Call):
        for dtype in _DTYPES:
            yield UNLIKELY, _expression(f"{_LOW}(({ast.unparse(node)}), torch.{dtype})"), f"is rounded to {dtype}"


def _of_order(node: ast.AST, statements: Sequence[ast.stmt]) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield two neighbouring statements in the opposite order, if both compute something."""
    for at, (first, second) in enumerate(pairwise(statements)):
        if isinstance(first, _COMPUTING) and isinstance(second, _COMPUTING):
            changed = copy.deepcopy(node)
            in_order = changed.body if statements is getattr(node, "body", None) else changed.orelse  # type: ignore[attr-defined]
            in_order[at : at + 2] = in_order[at + 1], in_order[at]
            yield POSSIBLE, changed, f"computes `{_shown(second)}` before `{_shown(first)}`"


def _if(node: ast.If, test: ast.expr) -> ast.If:
    return ast.If(test=test, body=node.body, orelse=node.orelse)


def _of_operation(node: ast.BinOp) -> Iterator[tuple[int, ast.AST, str]]:
    for side in (node.left, node.right):
        yield LIKELY, side, f"is `{ast.unparse(side)}`"
    if isinstance(node.op, ast.Mult):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        texts = [f"({left}) * ({right}) * ({right})", f"({left}) * ({left}) * ({right})"]
        if isinstance(node.left, ast.Call) and node.left.args:
            function, argument = ast.unparse(node.left.func), ast.unparse(node.left.args[0])
            texts += [f"{function}({right}) * ({argument})", f"{function}({argument} * ({right}))"]
        for text in texts:
            yield LIKELY, _expression(text), f"is `{text}`"
    for operator in _OTHER_OPERATORS.get(type(node.op), ()):
        changed = ast.BinOp(node.left, operator(), node.right)
        yield POSSIBLE, changed, f"is `{ast.unparse(changed)}`"
    if isinstance(node.op, ast.Sub | ast.Div):
        changed = ast.BinOp(node.right, node.op, node.left)
        yield POSSIBLE, changed, f"is `{ast.unparse(changed)}`"


def _of_call(node: ast.Call) -> Iterator[tuple[int, ast.AST, str]]:
    """Yield replacements of a call: its object, another function, exchanged arguments."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _COMPUTES_NOTHING:
        return
    is_method = isinstance(function, ast.Attribute) and not ast.unparse(function).startswith(
        ("torch.", "nn.", "F.", "self.")
    )
    inside: Sequence[ast.expr] = [item for item in node.args if not isinstance(item, ast.Constant | ast.Starred)]
    if is_method:
        inside = [function.value, *inside]  # type: ignore[attr-defined]
    for item in inside:
        yield LIKELY, item, f"is `{ast.unparse(item)}`"
    if inside:
        twice = copy.deepcopy(node)
        if is_method:
            twice.func.value = node  # type: ignore[attr-defined]
        elif isinstance(twice.args[0], ast.expr):
            twice.args[0] = node
        yield LIKELY, twice, "is applied twice"
    for at, argument in enumerate(node.args[1:], start=1):
        without = copy.deepcopy(node)
        without.args[at] = ast.Constant(None)
        yield POSSIBLE, without, f"has no `{ast.unparse(argument)}`"
    if inside and name in _INSTEAD:
        text = _INSTEAD[name].format(f"({ast.unparse(inside[0])})")
        yield LIKELY, _expression(text), f"is `{text}`"
    if len(inside) > 1 and not is_method:
        exchanged = copy.deepcopy(node)
        exchanged.args[:2] = exchanged.args[1::-1]
        yield POSSIBLE, exchanged, f"is `{ast.unparse(exchanged)}`"
