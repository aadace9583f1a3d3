"""What can be changed in a file: comparisons, arithmetic, numbers, conditions, loops, as Cosmic Ray changes them.

Cosmic Ray is imported where it is used: what is listed needs none of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_LEFT_OUT = ("BitOr", "BitAnd", "BitXor", "LShift", "RShift", "Decorator", "NoOp", "Variable", "Exception", "_Is")
"""Parts of the names of operators that are not used: `|` stands mostly in types; a changed decorator or exception fails
at import, and so says nothing of a test. `is` against `==` is the same for None."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: str
    """Below the root of the checkout."""
    line: int
    column: int
    old: str
    """Lines that are replaced."""
    new: str
    whole: str
    """The whole file's source with the change."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old.strip()} -> {self.new.strip()}"


def replaced(path: str, old: str, new: str) -> Mutant:
    """Return the mutant in which a piece of source, which occurs once, stands otherwise."""
    source = (ROOT / path).read_text()
    assert source.count(old) == 1, f"{path} has {source.count(old)} times: {old}"
    line = source[: source.index(old)].count("\n") + 1
    return Mutant(path, line, 0, old, new, source.replace(old, new))


def unchanged(path: str) -> Mutant:
    """Return no mutant: the tests of the file must pass with it."""
    return Mutant(path, 0, 0, "", "", (ROOT / path).read_text())


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """A change that can be made, which is made when it is drawn."""

    path: str
    line: int
    column: int
    operator: str
    """Cosmic Ray's name."""
    occurrence: int
    """Which of the places that the operator changes."""

    def made(self) -> Mutant | None:
        """Return the mutant; None where nothing is left to change."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        source = (ROOT / self.path).read_text()
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        if changed is None or changed == source:
            return None
        before, after = source.splitlines(), changed.splitlines()
        end = self.line + max(0, len(after) - len(before))
        new = "\n".join(after[self.line - 1 : end])
        return Mutant(self.path, self.line, self.column, before[self.line - 1], new, changed)


def changes_of(path: str) -> Iterator[Change]:
    """Yield every change of a file, but for those of types and of what is outside of functions."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = (ROOT / path).read_text()
    is_code, nodes = _code_places(source), list(_nodes(get_ast(source)))
    for name in sorted(operator_names()):
        if any(part in name for part in _LEFT_OUT):
            continue
        operator = get_operator(name)()
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(positions):
            if (line, column) in is_code:
                yield Change(path, line, column, name, occurrence)


def _nodes(root: Any) -> Iterator[Any]:
    """Yield the nodes in the order in which Cosmic Ray numbers what it changes."""
    yield root
    for child in getattr(root, "children", ()):
        yield from _nodes(child)


class _Places:
    """Whether a place lies in a function's body, and in no type."""

    def __init__(self, bodies: list[tuple[int, int]], types: list[tuple[int, int, int, int]]) -> None:
        self._bodies, self._types = bodies, types

    def __contains__(self, place: tuple[int, int]) -> bool:
        line, column = place
        if not any(first <= line <= last for first, last in self._bodies):
            return False
        return not any((a, b) <= (line, column) < (c, d) for a, b, c, d in self._types)


def _code_places(source: str) -> _Places:
    bodies, types = [], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bodies.append((node.lineno, node.end_lineno or node.lineno))
            arguments = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
            hints = [node.returns, *(argument.annotation for argument in arguments)]
        elif isinstance(node, ast.AnnAssign):
            hints = [node.annotation]
        else:
            continue
        types += [
            (hint.lineno, hint.col_offset, hint.end_lineno or 0, hint.end_col_offset or 0) for hint in hints if hint
        ]
    return _Places(bodies, types)
