"""Changes of one expression or statement of a program, as in mutation testing, the likely ones first."""

import ast
import copy
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.judge.explain.edits.change import LIKELY, POSSIBLE, UNLIKELY

ROUND, FACTOR = "_rounded", "_fitted"
"""Names in a changed program: the rounding function, and the number that is fitted."""
NORMS = "norms"
"""Key of the alternatives: norms that a module may be put behind."""
_COMPUTES_NOTHING = {
    "to", "view", "reshape", "contiguous", "size", "type", "float", "unsqueeze", "squeeze", "flatten", "expand",
    "clone",
}  # fmt: skip
_INSTEAD = {
    "mean": ("{0}.sum(-1, keepdim=True)",),
    "sum": ("{0}.mean(-1, keepdim=True)",),
    "softmax": ("torch.sigmoid({0})",),
    "sigmoid": ("{0}.softmax(-1)", "torch.tanh({0})"),
    "tanh": ("torch.sigmoid({0})",),
    "softplus": ("torch.exp({0})", "torch.relu({0})"),
    "exp": ("torch.nn.functional.softplus({0})",),
    "rsqrt": ("torch.sqrt({0})", "1 / ({0})"),
    "repeat_interleave": ("{0}.tile({1})",),
    "chunk": ("({0}[..., ::2], {0}[..., 1::2])",),
}
"""Functions in the place of others: {0} is the first argument, {1} the second."""
_ACTIVATIONS = (
    "torch.nn.functional.silu({0})",
    "torch.nn.functional.gelu({0})",
    "torch.nn.functional.gelu({0}, approximate='tanh')",
    "{0} * torch.sigmoid(1.702 * {0})",
    "torch.relu({0})",
    "torch.relu({0}).square()",
    "torch.sigmoid({0})",
    "torch.tanh({0})",
)
_OTHER_VALUES = {
    "0 * ({0})": "is zero",
    "({0}) ** 0": "is all one",
    "({0}).flip(-1)": "is in another order: reversed",
}
"""What a variable may be set to instead."""
_OF_WEIGHTS = ("{0} / {0}.sum(-1, keepdim=True)", "{0}.softmax(-1)")
"""What may be made of weights or scores before they are used."""
_OTHER_OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult), ast.Sub: (ast.Add,), ast.Mult: (ast.Add, ast.Div), ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,), ast.MatMult: (ast.Mult,),
}  # fmt: skip
_OTHER_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_OF_SETTINGS = (
    "1", "0", "{0} * {0}", "1 / {0}", "-{0}", "{0} + 1", "{0} - 1", "{0} * 2", "{0} / 2", "{0} * 10", "{0} / 10",
    "1e-5", "1e-6",
)  # fmt: skip
_COMPUTING = ast.Assign | ast.AugAssign | ast.If | ast.For | ast.Expr
_DTYPES = ("bfloat16", "float16")
_FARTHEST_MOVE = 8
"""Statements that one is moved behind, at most."""
_LONGEST = 100
"""Maximum number of characters of an expression in a report."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a program: a node, its place, and the replacement."""

    parent: ast.AST
    field: str
    at: int | None
    """Index in the field, if that is a list of nodes."""
    line: int
    """Line of the node in the program, from 1 on."""
    rank: int
    old: str
    new: str
    node: Any
    """The new node, or list of nodes."""
    is_fitted: bool = False
    """Whether the new node has a factor (`FACTOR`)."""


_Replacement = tuple[int, Any, str]
"""Rank, new node and description. No node removes a statement; a list of them is the whole body."""


def edits_of(
    program: ast.Module, alternatives: Mapping[str, Sequence[str]] | None = None, ran: Set[int] | None = None
) -> list[Edit]:
    """Return the changes of a program, the likely ones first.

    Args:
        program: the definition of a function.
        alternatives: expressions by those in whose place they may stand: another module of the same shape, a
            neighbouring setting.
        ran: lines that ran: only statements that have one are changed. None for all.
    """
    called = {id(node.func) for node in ast.walk(program) if isinstance(node, ast.Call)}
    names, edits = _Names(program), list[Edit]()
    for parent, field, at, node in _places(program, ran):
        for rank, new, words in _changes(node, names, alternatives or {}, is_called=id(node) in called):
            slot, moved = (parent, field, at), node
            if isinstance(new, list):
                slot = (node, "orelse" if words.endswith(_IN_ELSE) else "body", None)
                moved = next(old for old, item in zip(getattr(node, slot[1]), new, strict=True) if old is not item)
                words = words.removesuffix(_IN_ELSE)
                if ran is not None and not _is_run(moved, ran):
                    continue
            else:
                new = ast.fix_missing_locations(ast.copy_location(ast.Pass() if new is None else new, node))
            line, shown = getattr(moved, "lineno", 1), parent if isinstance(node, ast.Constant) else moved
            shown = shown if isinstance(shown, ast.keyword) else moved  # of a constant, the name says what it is
            edits.append(Edit(*slot, line, rank, _shown(shown), words, new, words == _TIMES or FACTOR in words))
    return sorted(edits, key=lambda edit: edit.rank)


_IN_ELSE = " [else]"
_TIMES = "is multiplied by"


@contextmanager
def applied(edit: Edit) -> Iterator[None]:
    """Change the program for the duration of the block."""
    held = getattr(edit.parent, edit.field)
    before = held if edit.at is None else held[edit.at]
    try:
        _put(edit, edit.node)
        yield
    finally:
        _put(edit, before)


def _put(edit: Edit, node: Any) -> None:
    if edit.at is None:
        setattr(edit.parent, edit.field, node)
    else:
        getattr(edit.parent, edit.field)[edit.at] = node


def _places(program: ast.Module, ran: Set[int] | None) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield each node of the statements that ran with its parent, field and index, the outer ones first."""
    parents = deque[ast.AST]([program])
    while parents:
        parent = parents.popleft()
        for field, value in ast.iter_fields(parent):
            if isinstance(parent, ast.FunctionDef) and field != "body":
                continue  # arguments and annotations
            for at, item in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(item, ast.AST) and (ran is None or _is_run(item, ran)):
                    parents.append(item)
                    yield parent, field, at, item


def _is_run(node: ast.AST, ran: Set[int]) -> bool:
    """Whether a line of a statement, or of the head of a block, is among those that ran; true of what is inside."""
    if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef):
        return True
    body = getattr(node, "body", None)
    end = (node.end_lineno or node.lineno) if body is None else max(node.lineno, body[0].lineno - 1)
    return not ran.isdisjoint(range(node.lineno, end + 1))


def _choices(program: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(program):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=best), ast.Name(id=indices)])],
                value=ast.Call(func=ast.Attribute(value=holder, attr="topk"), args=args),
            ):
                scores = args[0] if ast.unparse(holder) == "torch" and args else holder
                yield best, (ast.unparse(scores), indices)


class _Names:
    """The local names of a function, and which of them are known before a line."""

    def __init__(self, program: ast.Module) -> None:
        self._first: dict[str, int] = {}
        for node in ast.walk(program):
            if isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
                self._first.setdefault(node.arg, 0)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._first[node.id] = min(node.lineno, self._first.get(node.id, node.lineno))

        self.chosen = dict(_choices(program))
        """By the name of the best scores of a `topk`: all scores, and the name of the indices."""

    def before(self, node: ast.Name) -> list[str]:
        """Return the other names that a name may be exchanged with."""
        if node.id not in self._first:
            return []
        return [name for name, line in self._first.items() if line < node.lineno and name != node.id]

    def are_known(self, node: ast.stmt, targets: Sequence[str]) -> bool:
        """Whether names that a statement sets exist before it."""
        return all(self._first.get(name, node.lineno) < node.lineno for name in targets)


def _shown(node: ast.AST) -> str:
    """Return an expression, or the first line of a statement."""
    text = ast.unparse(node).partition("\n")[0].rstrip(":").replace("super(__class__, self)", "super()")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _is(text: str) -> tuple[ast.expr, str]:
    """Return the node of an expression, and the description of a change to it."""
    return _expression(text), f"is `{text}`"


def _changes(
    node: ast.AST, names: _Names, alternatives: Mapping[str, Sequence[str]], *, is_called: bool
) -> Iterator[_Replacement]:
    """Yield the rank, the replacement and the description of each change of a node."""
    if isinstance(node, ast.expr) and (others := alternatives.get(ast.unparse(node))):
        for text in others:
            yield LIKELY if is_called else POSSIBLE, *_is(text)
    if is_called:
        return
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).startswith("self."):
        for text in alternatives.get(NORMS, ()):
            read = f"{text}({ast.unparse(node.args[0])})"
            changed = copy.copy(node)
            changed.args = [_expression(read), *node.args[1:]]
            yield UNLIKELY, changed, f"reads `{read}`"
    yield from _of_expression(node)
    yield from _of_statement(node, names)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        for name in names.before(node):
            yield UNLIKELY, *_is(name)
        for form in _OF_WEIGHTS if re.search(r"weight|top|score|prob", node.id) else ():
            yield POSSIBLE, *_is(form.format(node.id))
    if isinstance(node, ast.Call) and node.args and (choice := names.chosen.get(ast.unparse(node.args[0]))):
        changed = copy.copy(node)
        changed.args = [_expression(choice[0]), *node.args[1:]]
        yield LIKELY, *_is(f"{ast.unparse(changed)}.gather(-1, {choice[1]})")
    for statements in (getattr(node, name, None) for name in ("body", "orelse")):
        if isinstance(statements, list):
            yield from _of_order(node, statements)
    if isinstance(node, ast.BinOp | ast.Call):
        for dtype in _DTYPES:
            yield (
                UNLIKELY,
                _expression(f"{ROUND}(({ast.unparse(node)}), torch.{dtype})"),
                f"is rounded to {dtype}",
            )


def _of_statement(node: ast.AST, names: _Names) -> Iterator[_Replacement]:
    match node:
        case ast.If(test=test):
            changed = ast.If(test=_expression(f"not ({ast.unparse(test)})"), body=node.body, orelse=node.orelse)
            yield LIKELY, changed, "takes the other branch"
        case ast.AugAssign(op=operator):
            yield LIKELY, None, "is left out"
            for kind in _OTHER_OPERATORS.get(type(operator), ()):
                updated = ast.AugAssign(node.target, kind(), node.value)
                yield POSSIBLE, updated, f"is `{ast.unparse(updated)}`"
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            is_updated = any(isinstance(item, ast.Name) and item.id == name for item in ast.walk(value))
            if is_updated or names.are_known(node, [name]):
                yield LIKELY if is_updated else POSSIBLE, None, "is left out"  # the variable is as it was before
            if isinstance(value, ast.Call | ast.BinOp):
                for form, words in _OTHER_VALUES.items():
                    yield POSSIBLE, ast.Assign(node.targets, _expression(form.format(ast.unparse(value)))), words
        case ast.Assign(targets=[ast.Tuple(elts=elements)]):
            for order in _neighbours_exchanged(elements):
                target = ast.Tuple(order, ast.Store())
                yield (
                    LIKELY,
                    ast.Assign([target], node.value),
                    f"is `{ast.unparse(target)} = {ast.unparse(node.value)}`",
                )
        case ast.For(iter=over):
            text = ast.unparse(over)
            for part, turn in (("[1:]", "first"), ("[:-1]", "last")):
                yield POSSIBLE, _loop(node, f"list({text}){part}"), f"leaves out its {turn} turn"
        case ast.Expr(value=ast.Call()):
            yield POSSIBLE, None, "is left out"
        case ast.Return(value=ast.BinOp() | ast.Call() as value):
            yield POSSIBLE, ast.Return(ast.UnaryOp(ast.USub(), value)), "has the opposite sign"


def _loop(node: ast.For, over: str) -> ast.For:
    changed = copy.copy(node)
    changed.iter = _expression(over)
    return changed


def _of_expression(node: ast.AST) -> Iterator[_Replacement]:
    match node:
        case ast.BinOp():
            yield from _of_operation(node)
        case ast.Call():
            yield from _of_call(node)
        case ast.IfExp(body=body, orelse=orelse):
            yield LIKELY, orelse, f"is always `{ast.unparse(orelse)}`"
            yield LIKELY, body, f"is always `{ast.unparse(body)}`"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield LIKELY, operand, f"is `{ast.unparse(operand)}`"
        case ast.Compare(ops=[operator]) if type(operator) in _OTHER_COMPARISONS:
            changed = copy.copy(node)
            changed.ops = [_OTHER_COMPARISONS[type(operator)]()]
            yield POSSIBLE, changed, f"is `{ast.unparse(changed)}`"
        case ast.BoolOp(op=operator, values=values):
            joined = ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            yield POSSIBLE, joined, f"is `{ast.unparse(joined)}`"
        case ast.Constant(value=bool() as switch):
            yield LIKELY, ast.Constant(not switch), f"is {not switch}"
        case ast.Constant(value=int() | float() as number):
            for replacement in dict.fromkeys((0, 1, 2, -1, number + 1, number - 1)):
                if replacement != number:
                    yield POSSIBLE, ast.Constant(replacement), f"is {replacement}"
            if isinstance(number, float):
                yield LIKELY, *_times(node)
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Load()):
            name = ast.unparse(node)
            for text in _OF_SETTINGS:
                yield POSSIBLE, *_is(text.format(name))
            yield LIKELY, *_times(node)
        case ast.Tuple(elts=elements, ctx=ast.Load()) | ast.List(elts=elements, ctx=ast.Load()):
            for order in _neighbours_exchanged(elements):
                yield POSSIBLE, type(node)(order, ast.Load()), "is in the other order"
        case ast.Slice():
            yield from _of_slice(node)
        case ast.Subscript(slice=ast.Name(id=index), ctx=ast.Load()):
            for text in (f"{ast.unparse(node.value)}[{index} + 1]", f"{ast.unparse(node.value)}[{index} - 1]"):
                yield POSSIBLE, *_is(text)


def _neighbours_exchanged(elements: Sequence[ast.expr]) -> Iterator[list[ast.expr]]:
    """Yield the elements with two neighbours exchanged."""
    for at in range(len(elements) - 1):
        if not isinstance(elements[at], ast.Slice) and not isinstance(elements[at + 1], ast.Slice):
            yield [*elements[:at], elements[at + 1], elements[at], *elements[at + 2 :]]


def _times(node: ast.AST) -> tuple[ast.expr, str]:
    return _expression(f"({ast.unparse(node)}) * {FACTOR}"), _TIMES


def _of_slice(node: ast.Slice) -> Iterator[_Replacement]:
    """Yield the other half, every second element in the place of a half, and ends that are off by one."""
    lower, upper = (None if end is None else ast.unparse(end) for end in (node.lower, node.upper))
    texts = list[tuple[int, str]]()
    if node.step is None and (lower is None) != (upper is None):
        texts += [(LIKELY, f"{upper or ''}:{lower or ''}"), (POSSIBLE, "::2" if lower is None else "1::2")]
        texts += [(POSSIBLE, ":" if lower is None else f"{lower} - 1:")]
        texts += [(POSSIBLE, f"{lower} + 1:" if upper is None else f":{item}") for item in _around(upper or "")]
    elif node.step is not None:
        texts += [(POSSIBLE, "1::2" if lower is None else "::2")]
    for rank, text in dict.fromkeys(texts):
        yield rank, ast.parse(f"x[{text}]", mode="eval").body.slice, f"is `{text}`"  # type: ignore[attr-defined]


def _around(text: str) -> tuple[str, str]:
    return f"{text} + 1", f"{text} - 1"


def _of_order(node: ast.AST, statements: Sequence[ast.stmt]) -> Iterator[_Replacement]:
    """Yield a statement behind one that follows it, if both compute something."""
    suffix = "" if statements is getattr(node, "body", None) else _IN_ELSE
    for at, statement in enumerate(statements):
        for to in range(at + 1, min(len(statements), at + _FARTHEST_MOVE + 1)):
            if not isinstance(statement, _COMPUTING) or not isinstance(statements[to], _COMPUTING):
                break  # nothing moves behind a return
            order = [*statements[:at], *statements[at + 1 : to + 1], statement, *statements[to + 1 :]]
            yield UNLIKELY, order, f"comes after `{_shown(statements[to])}`{suffix}"


def _of_operation(node: ast.BinOp) -> Iterator[_Replacement]:
    for side in (node.left, node.right):
        yield LIKELY, side, f"is `{ast.unparse(side)}`"
    left, right = ast.unparse(node.left), ast.unparse(node.right)
    if isinstance(node.op, ast.Mult):
        texts = [f"({left}) * ({right}) * ({right})", f"({left}) * ({left}) * ({right})"]
        for call, factor in ((node.left, right), (node.right, left)):
            if isinstance(call, ast.Call) and call.args:
                function, argument = ast.unparse(call.func), ast.unparse(call.args[0])
                texts += [f"{function}({factor}) * ({argument})", f"{function}({argument} * ({factor}))"]
        for text in texts:
            yield LIKELY, *_is(text)
    if isinstance(node.op, ast.Add):
        for text in (f"({left}) + 2 * ({right})", f"2 * ({left}) + ({right})"):
            yield LIKELY, *_is(text)
        for text in (f"({left}) + {FACTOR} * ({right})", f"{FACTOR} * ({left}) + ({right})"):
            yield LIKELY, *_is(text)
        yield from _of_coarse_terms(node, left, right)
    for operator in _OTHER_OPERATORS.get(type(node.op), ()):
        changed = ast.BinOp(node.left, operator(), node.right)
        yield POSSIBLE, changed, f"is `{ast.unparse(changed)}`"
    if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult):
        changed = ast.BinOp(node.right, node.op, node.left)
        yield POSSIBLE, changed, f"is `{ast.unparse(changed)}`"


def _of_coarse_call(call: ast.Call, right: ast.Call, *, is_method: bool) -> Iterator[_Replacement]:
    """Yield a call whose first input and output are rounded: what is computed in a lower precision.

    Args:
        call: a copy of the call.
        right: the call as it is.
        is_method: whether the first input is the object.
    """
    source = right.func.value if is_method else right.args[0]  # type: ignore[attr-defined]
    for dtype in _DTYPES:
        coarse, low = copy.deepcopy(call), _expression(f"{ROUND}(({ast.unparse(source)}), torch.{dtype})")
        if is_method:
            coarse.func.value = low  # type: ignore[attr-defined]
        else:
            coarse.args[0] = low
        yield UNLIKELY, _expression(f"{ROUND}({ast.unparse(coarse)}, torch.{dtype})"), f"is computed in {dtype}"


def _of_coarse_terms(node: ast.BinOp, left: str, right: str) -> Iterator[_Replacement]:
    """Yield a sum of variables one or both of which are rounded; other terms are rounded by themselves."""
    names = [isinstance(side, ast.Name) for side in (node.left, node.right)]
    for dtype in _DTYPES:
        low = [f"{ROUND}({text}, torch.{dtype})" for text in (left, right)]
        for sides in ((True, False), (False, True), (True, True)):
            if all(name or not side for name, side in zip(names, sides, strict=True)):
                terms = [coarse if side else text for coarse, text, side in zip(low, (left, right), sides, strict=True)]
                which = " and ".join(f"`{text}`" for text, side in zip((left, right), sides, strict=True) if side)
                yield UNLIKELY, _expression(" + ".join(terms)), f"has {which} rounded to {dtype}"


def _of_call(node: ast.Call) -> Iterator[_Replacement]:
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
        texts = [f"({ast.unparse(item)})" for item in inside]
        yield from _of_coarse_call(twice, node, is_method=is_method)
        for form in _ACTIVATIONS if re.search("act|gelu|relu|silu", name) else _INSTEAD.get(name, ()):
            if "{1}" not in form or len(texts) > 1:
                yield LIKELY, *_is(form.format(*texts))
    for at, argument in enumerate(node.args[1:], start=1):
        without = copy.copy(node)
        without.args = [*node.args[:at], ast.Constant(None), *node.args[at + 1 :]]
        yield POSSIBLE, without, f"has no `{ast.unparse(argument)}`"
    for at, keyword in enumerate(node.keywords):
        without = copy.copy(node)
        without.keywords = [*node.keywords[:at], *node.keywords[at + 1 :]]
        yield POSSIBLE, without, f"has no `{ast.unparse(keyword)}`"
    if len(inside) > 1 and not is_method:
        exchanged = copy.copy(node)
        exchanged.args = [*node.args[1::-1], *node.args[2:]]
        yield POSSIBLE, exchanged, f"is `{ast.unparse(exchanged)}`"
