"""What the names of tensors tell: which tap a name is like, and which name the same tensor of another layer has."""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import combinations

from harness.formats.taps import Graph, Operation

_INPUT = "input"


class TapNames:
    """Names of tensors, compared with the names of taps."""

    def __init__(self, graph: Graph, names: Collection[str]) -> None:
        """Take the names."""
        modules = (op for op in graph if op.source and ":" not in op.source and "@" not in op.source)
        self._paths = {f" {_words(op.source)} ": op.tap for op in modules}
        self._taps = {name: self._tap(name) for name in names}
        self._numbers = {name: {int(number) for number in re.findall(r"\d+", name)} for name in names}

    def likeness(self, name: str, operation: Operation) -> int:
        """Return 2 for a name like the tap's, 1 for one with the number of its layer, 0 for any other."""
        if self._taps.get(name) == operation.tap:
            return 2
        return int(operation.layer is not None and operation.layer in self._numbers.get(name, ()))

    def like(self, operation: Operation) -> list[str]:
        """Return the names like the tap's."""
        return [name for name, tap in self._taps.items() if tap == operation.tap]

    def _tap(self, name: str) -> str | None:
        """Return the tap whose path is the longest in a name; none for the input of a module."""
        words = f" {_words(name)} "
        path = max((path for path in self._paths if path in words), key=len, default=None)
        return None if path is None or _INPUT in words.rpartition(path)[2].split() else self._paths[path]


def elsewhere(known: Mapping[int, str], layer: int) -> Iterator[str]:
    """Yield the names that a tensor of one layer may have by those of other layers.

    Numbers in a name may grow from layer to layer: the layer's own, a call's, a place in the run.
    """
    for (low, first), (high, second) in combinations(sorted(known.items()), 2):
        if (name := _on_line(low, first, high, second, layer)) is not None:
            yield name
    for known_layer, name in known.items():
        for number in re.finditer(r"\d+", name):
            if int(number[0]) == known_layer:
                yield name[: number.start()] + str(layer).zfill(_width(number[0])) + name[number.end() :]


def _on_line(low: int, first: str, high: int, second: str, layer: int) -> str | None:
    """Return the name whose numbers lie on the line through those of two layers; None if the names differ otherwise."""
    parts, others = re.split(r"(\d+)", first), re.split(r"(\d+)", second)
    if parts[::2] != others[::2]:
        return None
    for at in range(1, len(parts), 2):
        grown, rest = divmod((int(others[at]) - int(parts[at])) * (layer - low), high - low)
        number = int(parts[at]) + grown
        if rest or number < 0:
            return None
        parts[at] = str(number).zfill(_width(parts[at]))
    return "".join(parts)


def _width(number: str) -> int:
    """Return to how many digits numbers are filled with zeros."""
    return len(number) if number.startswith("0") else 1


def _words(name: str) -> str:
    return " ".join(re.findall(r"[a-z]+|\d+", name.lower()))
