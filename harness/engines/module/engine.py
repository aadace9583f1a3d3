"""A user's `nn.Module` as an engine: one request at a time.

One run over a few tokens finds its taps by the paths of its modules, or by names that the user gives for HF's paths.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from typing import Any, NoReturn

import torch
from torch import nn

from harness.engines.adapter import Capabilities, Workload
from harness.engines.declared import declared_numerics
from harness.engines.module.forward import INPUT, Forward, evaluating, showing_values
from harness.engines.module_settings import settings_of_modules
from harness.engines.record import write_states
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.caches import held_states
from harness.oracle.watch import as_rows, token_dim
from harness.results.settings import ModelSettings

_ANY = "*"
"""Matches one component of a path, for example the number of a layer."""


class ModuleNames:
    """Translates the names of a module's values into HF's.

    A name is a module's path for its output, `PATH:1` for a second output, `PATH:input` for its input: as in
    `Operation.source`. A value without an entry in the mapping keeps its name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        """Take a mapping from paths in the module to HF's paths; an entry also applies to all submodules.

        Raises:
            HarnessError: BAD_OPTION: an entry is no pair of names, or its sides have different numbers of `*`.
        """
        self._entries = [_Entry.of(theirs, ours) for theirs, ours in names.items()]

    def translate(self, name: str) -> str:
        """Return HF's name, by the most specific entry that fits."""
        path, _, part = name.partition(":")
        translations = [
            (entry, translated) for entry in self._entries if (translated := entry.translated(path, part)) is not None
        ]
        return max(translations, key=lambda ranked: ranked[0].rank)[1] if translations else name

    def check(self, module: str, paths: Collection[str], graph: Graph) -> None:
        """Refuse entries that fit no module, name nothing in HF's model, or give two modules the same name.

        Raises:
            HarnessError: BAD_OPTION.
        """
        known, taken = _known_names(graph), dict[str, str]()
        for entry in self._entries:
            matching = [path for path in paths if len(_components(path)) == len(entry.path) and entry.fits(path)]
            if not matching:
                _refuse(f"{module} has no module {entry.theirs!r}", entry, _nearest(entry.theirs, paths))
            for path in matching:
                ours = entry.translated(path, entry.part) or ""
                if ours and ours not in known:
                    _refuse(f"HF's model has nothing called {ours!r}", entry, _nearest(ours, known))
                taken_by = taken.setdefault(ours, path)
                if taken_by != path:
                    _refuse(f"{taken_by!r} and {path!r} are both called {ours!r}", entry, ["one name for each module"])


def operation_of(graph: Graph, name: str) -> Operation | None:
    """Return the operation whose tap has this name in HF's model; None if it is no tap."""
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
        """Sort key: a more specific entry has a higher rank."""
        return bool(self.part), len(self.path), -self.path.count(_ANY)

    def fits(self, path: str) -> bool:
        """Whether the entry names this module, or a module that contains it."""
        components = _components(path)
        pairs = zip(self.path, components, strict=False)
        return len(components) >= len(self.path) and all(wanted in (_ANY, component) for wanted, component in pairs)

    def translated(self, path: str, part: str) -> str | None:
        """Return HF's name of a value; None if the entry does not fit it."""
        components = _components(path)
        if not self.fits(path) or (self.part and (self.part != part or len(components) > len(self.path))):
            return None
        numbers = iter(component for wanted, component in zip(self.path, components, strict=False) if wanted == _ANY)
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


_LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a tap in the module."""

    operation: Operation
    source: str
    """HF's name of the value."""
    shown: str
    """The module's own name of it."""
    index: int
    """Its index among the tensors that are shown."""
    has_batch: bool
    """Whether the first dimension counts requests, of which there is one."""
    token_dim: int
    """1 or 2, counted with the batch."""

    def rows(self, tensors: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor | None:
        """Return [tokens, ...]; None if the value has another shape than in the run it was found in."""
        if len(tensors) <= self.index:
            return None
        tensor = tensors[self.index] if self.has_batch else tensors[self.index][None]
        if tensor.numel() != num_tokens * prod(self.operation.shape) or tensor.dim() <= self.token_dim:
            return None
        return as_rows(tensor, self.token_dim, 1, num_tokens) if tensor.shape[self.token_dim] == num_tokens else None


@dataclass(slots=True)
class ModuleTaps:
    """The taps that a module shows."""

    names: ModuleNames
    graph: Graph
    num_tokens: int
    """Length of the run that finds the taps."""
    by_tap: dict[str, Place] = field(default_factory=dict)
    misshapen: dict[str, list[list[int]]] = field(default_factory=dict)
    """By name in the module: shapes of values that have the name of a tap but not its shape."""

    def see(self, shown: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors that the run shows under a name; the first place of a tap counts.

        Raises:
            HarnessError: BAD_OPTION: two modules have the same name.
        """
        for source, only in self._sources(shown, len(tensors)):
            operation = operation_of(self.graph, source)
            if operation is None or operation.tap == self.graph.logits:
                continue
            place = _place(operation, source, shown, tensors, only, self.num_tokens)
            before = self.by_tap.get(operation.tap)
            if before is not None and before.source == source and before.shown != shown:
                _refuse_twice(before, shown)
            if before is None and place is not None:
                self.by_tap[operation.tap] = place
            if place is None:
                self.misshapen[shown] = [list(tensor.shape) for tensor in tensors]

    def _sources(self, shown: str, num_tensors: int) -> Iterator[tuple[str, int | None]]:
        """Yield HF's names of the tensors, each with the index of its tensor; None for any of them."""
        name, at, number = shown.partition("@")
        yield self.names.translate(name) + at + number, None
        if not name.endswith(f":{INPUT}"):
            for index in range(num_tensors):
                yield self.names.translate(f"{name}:{index}") + at + number, index


def unmistakable_length(module: nn.Module, graph: Graph) -> int:
    """Return a number of tokens that is not the size of any dimension of the model."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    sizes |= {size for operation in graph for size in operation.shape}
    return next((length for length in _LENGTHS if length not in sizes), _LENGTHS[-1])


def unmatched_hint(paths: Collection[str], graph: Graph) -> str:
    """Return a hint for a module of which no submodule has a name of HF's."""
    sources = {operation.module for operation in graph if operation.source}
    for path in paths:
        longer = next((source for source in sorted(sources) if source.endswith(f".{path}")), None)
        if longer is not None:
            prefix = longer.removesuffix(f".{path}")
            return f'names={{"": "{prefix}"}}, since {path!r} may be {longer!r}'
        shorter = next((source for source in sorted(sources) if path.endswith(f".{source}")), None)
        if shorter is not None:
            return f'names={{"{path.removesuffix(f".{shorter}")}": ""}}, since {path!r} may be {shorter!r}'
    return 'names={"blocks.*.attn.wq": "model.layers.*.self_attn.q_proj", ...}; names={} compares the logits alone'


def _place(
    operation: Operation,
    source: str,
    shown: str,
    tensors: Sequence[torch.Tensor],
    only: int | None,
    num_tokens: int,
) -> Place | None:
    """Return the tensor that fits a tap; None if none does, or several do.

    A norm may return its result and the sum that it normalised. Of other operations, two tensors of one shape are
    ambiguous.
    """
    fitting = [(index, _token_dim(tensor, num_tokens, operation)) for index, tensor in enumerate(tensors)]
    places = [(index, dim) for index, dim in fitting if dim and only in (None, index)]
    is_norm = operation.kind is Kind.NORM and not shown.partition("@")[0].endswith(f":{INPUT}")
    if not places or (len(places) > 1 and not is_norm):
        return None
    index, dim = places[0]
    has_batch = _has_batch(tensors[index])
    return Place(operation=operation, source=source, shown=shown, index=index, has_batch=has_batch, token_dim=dim)


def _token_dim(tensor: torch.Tensor, num_tokens: int, operation: Operation) -> int | None:
    """Return the token dimension, counted with the batch; None if the others do not form rows of the operation."""
    if tensor.numel() != num_tokens * prod(operation.shape):
        return None
    return token_dim(tensor if _has_batch(tensor) else tensor[None], 1, num_tokens)


def _has_batch(tensor: torch.Tensor) -> bool:
    return tensor.shape[0] == 1


def _refuse_twice(before: Place, shown: str) -> None:
    raise HarnessError(
        Code.BAD_OPTION,
        "two modules have the same name",
        where="names=",
        expected="one module for each of HF's",
        actual=f"{before.shown!r} and {shown!r} are both {before.source!r}",
        hint="give the module that is something else another name",
    )


_PADDED = "if it pads its input, give it a method step(work): token ids tell its rows, docs/check-any-engine.md"
_NOT_CALLED = "call the module itself, module(x): hooks see neither module.forward(x) nor a use of its weight"


class TorchEngine:
    """Runs a module whose forward takes token ids and returns logits.

    A module that takes and returns a cache gets each token once. A module without a cache gets the whole sequence for
    every new token. The module stays unchanged: the engine removes its hooks and restores the mode.
    """

    def __init__(self, module: nn.Module, *, device: str, names: Mapping[str, str] | None = None) -> None:
        """Inspect the signature of the module's forward.

        Args:
            module: with its weights, on one device.
            device: where it is.
            names: paths of its modules, and HF's paths of the same; None if the module uses HF's names. With an empty
                mapping, only the logits are compared.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the forward cannot be called; BAD_OPTION: the names are not valid.
        """
        self.name = type(module).__name__
        self._module, self._names = module, ModuleNames(names or {})
        self._wants_logits_alone = names is not None and not names
        self._device = torch.device(device)
        self._forward = Forward(module, self._device)
        self._places: dict[str, list[Place]] = {}
        self._shown = self._places
        """The taps that the present run records."""
        self._graph, self._heads = Graph(()), frozenset[str]()
        self._logits = ""
        self._has_cache = self._forward.takes_cache
        self.capabilities = self._capabilities(())

    def match_taps(self, graph: Graph) -> None:
        """See `TapMatcher.match_taps`.

        Raises:
            HarnessError: BAD_OPTION: a name fits nothing, or no module has a name of HF's.
        """
        paths = [path for path, _ in self._module.named_modules() if path]
        self._names.check(self.name, ["", *paths], graph)
        places = ModuleTaps(self._names, graph, unmistakable_length(self._module, graph))
        vocabulary = graph[graph.logits].shape[-1]
        ids = torch.randint(0, vocabulary, (places.num_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
        with evaluating(self._module):
            self._forward.leave_out_what_it_refuses(ids)
            with showing_values(self._module, paths, places.see):
                answer = self._forward(ids, 0)
        self._forward.check_vocabulary(answer, vocabulary)
        if not places.by_tap and not self._wants_logits_alone:
            self._refuse_strangers(paths, graph, places)
        self._places = {}
        for place in places.by_tap.values():
            self._places.setdefault(place.shown, []).append(place)
        self._graph, self._heads, self._logits = graph, graph.head, graph.logits
        self._has_cache = answer.cache is not None
        capabilities = self._capabilities(graph.not_shown({*places.by_tap, graph.logits}))
        self.capabilities = replace(
            capabilities,
            keeps_states=bool(held_states(answer.cache)),
            numerics=declared_numerics(self._module, graph),
        )

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`."""
        return settings_of_modules(dict(self._module.named_modules()))

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Feed the requests one after the other; see `Engine.run`."""
        self._shown = {} if workload.is_served else self._places
        with evaluating(self._module):
            for request in workload.requests:
                cache = None
                for positions in workload.schedule.pieces(request.prompt_length, len(request.token_ids)):
                    cache = self._step(request, positions, cache, writer)

    def _capabilities(self, unsupported_taps: tuple[str, ...]) -> Capabilities:
        schedules = ("plain", "chunked") if self._has_cache else ("plain",)
        return Capabilities(schedules=schedules, keeps_cache=False, unsupported_taps=unsupported_taps, not_served=None)

    def _step(self, request: RequestInfo, positions: range, cache: Any, writer: RecordingWriter) -> Any:
        """Compute the rows at some positions, record them, and return the cache."""
        last = [len(positions) - 1] if positions.stop >= request.prompt_length else []
        writer.begin_step(
            phase="prefill" if positions.start < request.prompt_length else "decode",
            request=[request.id] * len(positions),
            position=positions,
            sampled_rows=last,
            partial_rows=dict.fromkeys(self._heads, last) if last else None,
        )
        start = positions.start if self._has_cache else 0

        def see(shown: str, tensors: tuple[torch.Tensor, ...]) -> None:
            """Write the new rows. A value of another shape is not written, and its rows count as missing."""
            for place in self._shown.get(shown, ()):
                rows, tap = place.rows(tensors, positions.stop - start), place.operation.tap
                if rows is not None and (last or tap not in self._heads):
                    writer.tap(tap, rows[-1:] if tap in self._heads else rows[-len(positions) :])

        paths = dict.fromkeys(shown.partition("@")[0].partition(":")[0] for shown in self._shown)
        with showing_values(self._module, paths, see):
            answer = self._forward(request.token_ids[start : positions.stop], start, cache)
        if last:
            writer.tap(self._logits, answer.logits[-1:])
        writer.end_step(answer.logits[-1:].argmax(dim=-1).tolist() if last else ())
        write_states(writer, self._graph, held_states(answer.cache), [(0, request.id, positions.stop - 1)])
        return answer.cache if self._has_cache else None

    def _refuse_strangers(self, paths: list[str], graph: Graph, places: ModuleTaps) -> None:
        known = [path for path in paths if operation_of(graph, self._names.translate(path)) is not None]
        if known:
            self._refuse_unseen(known[0], graph, places)
        raise HarnessError(
            Code.BAD_OPTION,
            f"no module of {self.name} has a name of HF's, so no operation can be judged",
            where="names=",
            expected=", ".join(operation.source for operation in list(graph)[:4]),
            actual=", ".join(paths[:4]) or "no modules",
            hint=unmatched_hint(paths, graph),
        )

    def _refuse_unseen(self, path: str, graph: Graph, places: ModuleTaps) -> None:
        """Refuse a module with a name of HF's whose output has no rows of tokens."""
        shapes = places.misshapen.get(path)
        operation = operation_of(graph, self._names.translate(path))
        assert operation is not None
        rows = [1, places.num_tokens, *operation.shape]
        raise HarnessError(
            Code.BAD_OPTION,
            f"modules of {self.name} have HF's names, but none of them shows one row for each token",
            where=f"{path}, which is {operation.tap}",
            expected=f"{rows}, or the same without the 1",
            actual="it was not called" if shapes is None else ", ".join(map(str, shapes)) or "no tensor of numbers",
            hint=_NOT_CALLED if shapes is None else _PADDED,
        )
