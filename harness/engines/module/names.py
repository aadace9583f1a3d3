"""HF's names for the modules of a user's model."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Operation

_ANY = "*"
"""Stands for one component of a path, the number of a layer for example."""


class ModuleNames:
    """Translates the names of a module's values into HF's.

    A name is a module's path for its output, `PATH:1` for a second output, `PATH:input` for its input: as in
    `Operation.source`. What no entry of the mapping is about is called as HF calls it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        """Take a mapping from paths of the module's to HF's; an entry holds for all that is in the module, too.

        Raises:
            HarnessError: BAD_OPTION: an entry is no pair of names, or has more `*` on one side than on the other.
        """
        self._entries = [_Entry.of(theirs, ours) for theirs, ours in names.items()]

    def translate(self, name: str) -> str:
        """Return HF's name; of several entries the most specific one counts."""
        path, _, part = name.partition(":")
        found = [(entry, other) for entry in self._entries if (other := entry.translated(path, part)) is not None]
        return max(found, key=lambda each: each[0].rank)[1] if found else name

    def check(self, module: str, paths: Collection[str], graph: Graph) -> None:
        """Refuse entries that are about no module, lead to nothing of HF's, or lead two modules to one place.

        Raises:
            HarnessError: BAD_OPTION.
        """
        known, taken = _known_names(graph), dict[str, str]()
        for entry in self._entries:
            own = [path for path in paths if len(_components(path)) == len(entry.path) and entry.fits(path)]
            if not own:
                _refuse(f"{module} has no module {entry.theirs!r}", entry, _nearest(entry.theirs, paths))
            for path in own:
                ours = entry.translated(path, entry.part) or ""
                if ours and ours not in known:
                    _refuse(f"HF's model has nothing called {ours!r}", entry, _nearest(ours, known))
                other = taken.setdefault(ours, path)
                if other != path:
                    _refuse(f"{other!r} and {path!r} are both called {ours!r}", entry, ["one name for each module"])


def operation_of(graph: Graph, name: str) -> Operation | None:
    """Return the operation whose tap HF shows under a name; None if that is no tap."""
    return graph.by_source.get(name) or graph.by_tap.get(graph.canonical(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One entry of the mapping."""

    theirs: str
    """As the user wrote it."""
    path: tuple[str, ...]
    part: str
    """`input` or the number of an output; empty for a module and all that is in it."""
    ours: tuple[str, ...]

    @classmethod
    def of(cls, theirs: object, ours: object) -> "_Entry":
        if not isinstance(theirs, str) or not isinstance(ours, str):
            raise HarnessError(
                Code.BAD_OPTION,
                "names must map paths to paths",
                where="names=",
                expected='{"blocks.*.attn.wq": "model.layers.*.self_attn.q_proj"}',
                actual={theirs: ours},
            )
        path, _, part = theirs.partition(":")
        entry = cls(theirs=theirs, path=_components(path), part=part, ours=_components(ours))
        if entry.path.count(_ANY) != entry.ours.count(_ANY):
            _refuse(f"{theirs!r} and {ours!r} have another number of {_ANY}", entry, ["as many on both sides"])
        return entry

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The higher, the more specific."""
        return bool(self.part), len(self.path), -self.path.count(_ANY)

    def fits(self, path: str) -> bool:
        """Whether the entry is about a module, or about one that it is in."""
        components = _components(path)
        pairs = zip(self.path, components, strict=False)
        return len(components) >= len(self.path) and all(own in (_ANY, other) for own, other in pairs)

    def translated(self, path: str, part: str) -> str | None:
        """Return HF's name of a value; None if the entry is not about it."""
        components = _components(path)
        if not self.fits(path) or (self.part and (self.part != part or len(components) > len(self.path))):
            return None
        numbers = iter(component for own, component in zip(self.path, components, strict=False) if own == _ANY)
        ours = [next(numbers) if our == _ANY else our for our in self.ours]
        name = ".".join([*ours, *components[len(self.path) :]])
        return f"{name}:{part}" if part and not self.part else name


def _components(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def _known_names(graph: Graph) -> set[str]:
    """Return the names of all taps, and of all modules that one is in."""
    names = {name for op in graph for name in (op.tap, op.source)} | set(graph.aliases) - {""}
    return names | {above for name in names for above in _above(name.partition(":")[0])}


def _above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _nearest(name: str, names: Iterable[str]) -> Sequence[str]:
    candidates = sorted(item for item in names if item and ":" not in item)
    return get_close_matches(name, candidates, n=3, cutoff=0.3) or candidates[:3]


def _refuse(what: str, entry: _Entry, expected: Sequence[str]) -> NoReturn:
    raise HarnessError(
        Code.BAD_OPTION,
        what,
        where="names=",
        expected=", ".join(expected),
        actual={entry.theirs: ".".join(entry.ours)},
        hint="names={path in your module: path in HF's model}",
    )
