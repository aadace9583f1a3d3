"""What can be changed in a file: comparisons, arithmetic, numbers, conditions, loops, as Cosmic Ray changes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

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


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield every mutant of a file, but for changes of types and of what is outside of functions and classes."""
    source = (ROOT / path).read_text()
    is_code = _code_places(source)
    for name in sorted(operator_names()):
        if any(part in name for part in _LEFT_OUT):
            continue
        operator = get_operator(name)()
        for occurrence, (line, column) in enumerate(_positions(source, operator)):
            if (line, column) not in is_code:
                continue
            changed = mutate_code(source, operator, occurrence)
            if changed is not None and changed != source:
                yield _mutant(path, line, column, source, changed)


def _positions(source: str, operator: object) -> Iterator[tuple[int, int]]:
    """Yield the places that an operator changes, in the order in which Cosmic Ray numbers them."""
    nodes = [get_ast(source)]
    while nodes:
        node = nodes.pop(0)
        for start, _ in operator.mutation_positions(node):  # type: ignore[attr-defined]
            yield start
        nodes[:0] = getattr(node, "children", [])


def _mutant(path: str, line: int, column: int, source: str, changed: str) -> Mutant:
    before, after = source.splitlines(), changed.splitlines()
    end = line + max(0, len(after) - len(before))
    return Mutant(path, line, column, before[line - 1], "\n".join(after[line - 1 : end]), changed)


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
