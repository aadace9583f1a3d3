"""A live torch engine as an engine under test, without a table of its tensors."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, count
from pathlib import Path

import torch

from harness.base.numerics import Numerics
from harness.engines.adapter import Capabilities, Part, Workload
from harness.engines.by_content.columns import RowOrder
from harness.engines.by_content.kept import KeptCache, KeptStates, Places, find_places
from harness.engines.by_content.learn import learn_map
from harness.engines.by_content.steps import (
    Site,
    Stepper,
    Work,
    module_paths,
    recomputes,
    rewinds,
    watched_run,
    with_following,
)
from harness.engines.by_content.tap_map import TapMap
from harness.engines.module_settings import settings_of_modules
from harness.engines.poison import Poison
from harness.engines.record import write_read_back, write_states
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph, Kind
from harness.oracle.model import load_model
from harness.results.check import TapSource
from harness.results.settings import ModelSettings

_SCHEDULES = ("plain", "chunked", "batched", "mixed")
_WITH_DRAFTS = ("rewound", "speculative")
_WITH_PREFIXES = "prefix-hit"
_NUM_KEPT = 3
"""Tokens of a request whose cache is looked at."""


class StepEngine:
    """Runs any object with `step(work)`; which of its tensors are which taps is found by what they hold.

    `work` is a list of (request, token ids, position of the first of them). `step` computes these tokens, keeps what
    later ones need of them, and returns the logits of each request's last token, [requests, vocabulary]. Where the
    object has a method `finish(request)`, it is called when a request has ended. Before it `cached(request)` is called
    where there is one: it returns the keys and values that are kept, {layer: ([positions, KV heads, head size] twice)}.
    `states(request)`, called after a step, returns the states that are kept, {layer: {"conv_state": tensor,
    "recurrent_state": tensor}}, as HF's cache has them of one request; or {layer: [tensor, ...]} in any order and
    layout, of which each is found by what it holds.
    `begin(request, token_ids)` is called before a request's first step under `prefix-hit`, with its prompt: it makes
    what is cached of its first tokens the request's own, and returns their number, which is less than the prompt's.
    Where it has an attribute `rewinds` that is true, a first position that it has computed before tells it to forget
    what it holds from there on. One that runs layers that predict further tokens (`--mtp`) has an attribute
    `tokens_ahead`, the number of these layers: each entry of `work` then ends with a list of the tokens that follow in
    the request, as many as there are layers and tokens. `fill_unused` and `fill_states` let `harness fuzz poison`
    into its memory: see `harness.engines.poison`.
    """

    def __init__(
        self,
        open_stepper: Callable[[], Stepper],
        *,
        name: str,
        folder: Path,
        dtype: str,
        numerics: Numerics | None = None,
        open_first: Callable[[], Stepper] | None = None,
    ) -> None:
        """Take what opens the engine.

        Args:
            open_stepper: called before each run; may return the same object every time.
            name: of the engine, for reports.
            folder: checkpoint of the model that it runs.
            dtype: of the engine.
            numerics: what is not in its dtype.
            open_first: opens the engine that the map is learned from, in place of the checked one: the same engine
                with weights that HF multiplies as they are.
        """
        self._open_first = open_first or open_stepper
        self._numerics = numerics
        self.name, self._open, self._folder = name, open_stepper, folder
        self._dtype = getattr(torch, dtype)
        self._numbers = count(1 << 20)
        self._graph: Graph | None = None
        self.map: TapMap | None = None
        self._places: Places = {}
        self.capabilities = Capabilities(schedules=(*_SCHEDULES, *_WITH_DRAFTS, _WITH_PREFIXES), keeps_cache=False)

    @cached_property
    def _first(self) -> Stepper:
        """The engine before its first run: its settings and its map are of one."""
        return self._open_first()

    def match_taps(self, graph: Graph) -> None:
        """Learn the map; see `TapMatcher.match_taps`.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: nothing of the engine is what HF computes.
        """
        stepper, self._graph = self._first, graph
        hf = load_model(self._folder, dtype=torch.float32, stays=True, mtp=graph.has_mtp)
        self.map = learned = learn_map(stepper, hf, dtype=self._dtype, numbers=self._numbers)
        if set(learned.taps) <= {graph.logits}:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"none of the {learned.num_tensors} tensors that {self.name} computes holds a value of HF's",
                where=self.name,
                expected=f"tensors of {self._folder}",
                hint="an engine that is compiled or runs in another process shows no tensors",
            )
        kept = self._kept(stepper, graph, learned)
        places = self._places = find_places(stepper, hf, next(self._numbers))
        kept |= {tap for (at, name), tap in graph.states.items() if at is not None and places.get((at, name))}
        self.capabilities = Capabilities(
            schedules=tuple(_schedules(learned.row_order, stepper, has_mtp=graph.has_mtp)),
            keeps_states=hasattr(stepper, "states"),
            numerics=self._numerics,
            unsupported_taps=(*graph.not_shown(learned.taps), *graph.not_shown(kept, caches=True)),
            sampled_only=tuple(
                tap for tap, item in learned.taps.items() if item.is_sampled_only and tap not in graph.head
            ),
            notes=(*_notes(learned), *getattr(stepper, "notes", ())),
            sources=_sources(learned, stepper),
        )
        del self._first  # the runs have their own

    def _kept(self, stepper: Stepper, graph: Graph, learned: TapMap) -> set[str]:
        """Return the taps of the cache that the engine shows after a step."""
        number, cache = next(self._numbers), KeptCache(stepper, graph, learned)
        if not cache.is_shown:
            return set()
        with torch.no_grad():
            stepper.step(with_following(stepper, [(number, list(range(_NUM_KEPT)), 0)]))
        return set(cache.read(number, _NUM_KEPT))

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: those that the engine shows itself, or else what its torch modules show."""
        stepper = self._first
        show_settings: Callable[[], ModelSettings] | None = getattr(stepper, "resolved_settings", None)
        if show_settings is not None:
            return show_settings()
        return settings_of_modules({path: module for module, path in module_paths(stepper).items()})

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """See `Engine.run`."""
        assert self.map is not None, "match_taps comes first"
        assert self._graph is not None
        run = _Run(self._open(), self.map, self._places, self._graph, writer, self._numbers, workload.poison)
        for batch in workload.batches:
            has_hits = workload.schedule.trigger == "prefix_hit"
            cached = {request.id: run.begin(request) for request in batch} if has_hits else {}
            for work in _steps(batch, workload, cached):
                run.step(work)
            run.finish(batch)


class _Run:
    def __init__(
        self,
        stepper: Stepper,
        tap_map: TapMap,
        places: Places,
        graph: Graph,
        writer: RecordingWriter,
        numbers: Iterator[int],
        poison: Poison | None,
    ) -> None:
        self._stepper, self._map, self._graph, self._writer = stepper, tap_map, graph, writer
        self._poison = poison
        embeddings = (tap_map.taps[op.tap] for op in graph if op.kind is Kind.EMBEDDING and op.tap in tap_map.taps)
        self._embedding = next((mapped.sources for mapped in embeddings), ())
        self._lasting = {tap for tap, item in tap_map.taps.items() if item.is_sampled_only or tap in graph.head}
        self._sites = tap_map.sites
        self._numbers, self._own = numbers, dict[int, int]()
        self._cache, self._states = KeptCache(stepper, graph, tap_map), KeptStates(stepper, places)
        self._num_computed = Counter[int]()
        """Rows of each request, by its number in the engine, with those that it has given up or may have taken over."""
        self._longest = 0
        """Tokens of the longest request that has ended: a wrong hit may leave as many in the cache."""

    def begin(self, request: RequestInfo) -> int:
        """Return how many of a prompt's tokens the engine has cached, which it then does not compute.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the engine says no such number.
        """
        number = self._number(request)
        begin: Callable[[int, list[int]], int] | None = getattr(self._stepper, "begin", None)
        cached = None if begin is None else begin(number, list(request.token_ids[: request.prompt_length]))
        if not isinstance(cached, int) or not 0 <= cached < request.prompt_length:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"the engine does not say how many tokens of request {request.id} are cached",
                where=f"{type(self._stepper).__name__}.begin",
                expected=f"a number from 0 to {request.prompt_length - 1}",
                actual=cached,
                hint="the prompt's last token is computed always: its logits choose the next one",
            )
        self._num_computed[number] += self._longest if cached else 0
        return cached

    def step(self, work: list[list[Part]]) -> None:
        """Compute some positions of some requests, each with those of the draft that it gives up, and record them."""
        parts = [part for item in work for part in item]
        rows = [(request, at) for request, positions in parts for at in positions]
        lengths = [sum(len(positions) for _, positions in item) for item in work]
        last = [end - 1 for end in accumulate(lengths)]
        sampled = [row for row, (request, at) in enumerate(rows) if at >= request.prompt_length - 1]
        verifies = not set(sampled) <= set(last)  # each row of a draft chooses a token
        chosen = [at for at, row in enumerate(sampled if verifies else last) if row in sampled]
        phases = {"decode" if request.prompt_length <= at else "prefill" for request, at in rows}
        phase = phases.pop() if len(phases) == 1 else "mixed"
        self._writer.begin_step(
            phase=phase,
            request=[request.id for request, _ in rows],
            position=[at for _, at in rows],
            sampled_rows=sampled,
            partial_rows=dict.fromkeys(self._lasting, sampled) if sampled else None,
        )
        if self._poison is not None:
            victim = None if self._poison.victim is None else self._own.get(self._poison.victim)
            self._poison.before_step(self._stepper, victim)
        for item, length in zip(work, lengths, strict=True):
            self._num_computed[self._number(item[0][0])] += length
        engine_work = [(self._number(item[0][0]), _tokens(item), item[0][1].start) for item in work]
        spans = [range(start, start + len(tokens)) for _, tokens, start in engine_work]
        following = [item[-1][0].token_ids[item[-1][1].stop :] for item in work]
        shown, logits, num_computed = self._watched(engine_work, sampled if verifies else None, spans, following)
        num_sampled = num_computed, len(logits)  # the logits themselves are fewer where the engine returned more
        for tap, value in self._map.read(shown, spans=spans, num_sampled=num_sampled).items():
            tap_rows = value.reshape(-1, *self._graph[tap].shape)
            if tap not in self._lasting:
                self._writer.tap(tap, tap_rows)
            elif sampled:
                is_few = self._map.taps[tap].is_sampled_only and len(tap_rows) < len(rows)
                self._writer.tap(tap, tap_rows[chosen if is_few else sampled])
        self._writer.end_step(logits[chosen].argmax(dim=-1).tolist())
        for item in work:
            self._write_states(*item[-1])

    def _write_states(self, request: RequestInfo, positions: range) -> None:
        """Write what the engine keeps of states, where it shows them."""
        states = {key: state[None] for key, state in self._states.read(self._number(request)).items()}
        write_states(self._writer, self._graph, states, [(0, request.id, positions.stop - 1)])

    def finish(self, requests: list[RequestInfo]) -> None:
        """Let the engine free what it keeps of requests."""
        free = getattr(self._stepper, "finish", None)
        for request in requests:
            number = self._own.pop(request.id)
            held = self._cache.read(number, len(request.token_ids), self._num_computed.pop(number))
            write_read_back(self._writer, request, held)
            self._longest = max(self._longest, len(request.token_ids))
            if free is not None:
                free(number)

    def _watched(
        self, work: Work, rows: list[int] | None, spans: Sequence[range], following: Sequence[Sequence[int]]
    ) -> tuple[dict[Site, torch.Tensor], torch.Tensor, int]:
        shown = dict[Site, torch.Tensor]()

        def see(site: Site, tensor: torch.Tensor) -> None:
            self._fill_padding(site, tensor, spans)
            shown[site] = tensor.clone()

        return shown, *watched_run(self._stepper, work, see, only=self._sites, rows=rows, following=following)

    def _fill_padding(self, site: Site, tensor: torch.Tensor, spans: Sequence[range]) -> None:
        """Fill rows of padding in the embedding: those after the rows of the tokens."""
        if self._poison is None or hasattr(self._stepper, "watching"):  # its own way shows copies
            return
        for source in self._embedding:
            if source.site == site:
                rows = tensor.movedim(source.layout.dim, 0)
                is_live = torch.arange(len(rows), device=rows.device) < source.num_rows(spans) * source.layout.parts
                self._poison.fill_rows(rows, is_live)

    def _number(self, request: RequestInfo) -> int:
        """Return the request's number in the engine, which has never seen it; a draft has that of its request."""
        request_id = request.id if request.draft_of is None else request.draft_of
        if request_id not in self._own:
            self._own[request_id] = next(self._numbers)
        return self._own[request_id]


def _schedules(order: RowOrder | None, stepper: Stepper, *, has_mtp: bool = False) -> Iterator[str]:
    """Yield the schedules of an engine: in a padded batch there are no chunks beside decode.

    Args:
        order: of the rows of several requests.
        stepper: the engine.
        has_mtp: whether MTP layers are judged: they are given the next token, and a draft would be another one.
    """
    is_again = recomputes(stepper)  # each step computes all earlier tokens of its request
    if order is RowOrder.PACKED:
        yield from _SCHEDULES
    else:
        yield "plain"
        if not is_again:
            yield "chunked"
            if order is not None:
                yield "batched"
    if rewinds(stepper) and not has_mtp:
        yield from _WITH_DRAFTS
    if hasattr(stepper, "begin"):
        yield _WITH_PREFIXES


def _steps(requests: list[RequestInfo], workload: Workload, cached: Mapping[int, int]) -> Iterator[list[list[Part]]]:
    """Yield the work of each step: prompts, whole or in chunks, then one token of each request, or what it verifies.

    Of a prompt, what is not cached: the first `cached` tokens of a request, by its id.
    """
    ahead = {
        item.id: [
            [(request, range(max(at.start, cached.get(item.id, 0)), at.stop)) for request, at in parts]
            for parts in workload.steps(item)
        ]
        for item in requests
    }
    while any(ahead.values()):
        ready = [request for request in requests if ahead[request.id]]
        yield [ahead[request.id].pop(0) for request in (ready if workload.schedule.is_batched else ready[:1])]


def _tokens(parts: list[Part]) -> list[int]:
    return [token for request, at in parts for token in request.token_ids[at.start : at.stop]]


def _notes(learned: TapMap) -> Iterator[str]:
    """Yield what a reader of the verdict should know of the map."""
    yield f"{len(learned.taps)} taps were found by content among {learned.num_tensors} tensors"
    if learned.refusal is not None:
        yield f"each step has one request, since one of two raised {learned.refusal}"
    guessed = [tap.tap for tap in learned.taps.values() if tap.evidence not in ("content", "definition")]
    if guessed:
        yield f"found by what is around them, since their own value is another: {', '.join(guessed[:4])}"
    if learned.uncertain:
        tap, why = next(iter(learned.uncertain.items()))
        yield f"{len(learned.uncertain)} taps are not judged: {tap}: {why}"


def _sources(learned: TapMap, stepper: Stepper) -> dict[str, TapSource]:
    """Return where each tap is, with the line of code: of a module's result, that of its forward."""
    modules = {path: module for module, path in module_paths(stepper).items()}
    sources = {}
    for tap, mapped in learned.taps.items():
        source = mapped.sources[0]
        forward = getattr(type(modules.get(source.site.path)), "forward", None)
        code = getattr(forward, "__code__", None)
        line = None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        tensor = f"{source.site}, {source.columns}"
        sources[tap] = TapSource(tensor=tensor, code=source.site.line or line, evidence=mapped.evidence.help)
    return sources
