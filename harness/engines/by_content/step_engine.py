"""Adapter for a live torch engine that finds the tensor of each tap by its values."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, count, takewhile
from pathlib import Path

import torch

from harness.base.numerics import Numerics
from harness.engines.adapter import Capabilities, Part, Workload
from harness.engines.by_content.forwards import SiteRows, StepForward, run_step
from harness.engines.by_content.kept import KeptCache, KeptStates, Places, find_places
from harness.engines.by_content.learn import learn_map
from harness.engines.by_content.rows import RequestWork
from harness.engines.by_content.steps import (
    RETURNED,
    Site,
    Stepper,
    finish,
    module_paths,
    recomputes,
    rewinds,
    watched_run,
    with_following,
)
from harness.engines.by_content.tap_map import StepBatch, TapMap
from harness.engines.declared import declared_numerics
from harness.engines.module_settings import settings_of_modules
from harness.engines.record import write_read_back, write_states
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph, Kind
from harness.oracle.model import load_model
from harness.results.check import SeenTensors, TapSource
from harness.results.settings import ModelSettings

_SCHEDULES = ("plain", "chunked", "batched", "mixed")
_WITH_DRAFTS = ("rewound", "speculative")
_WITH_PREFIXES = "prefix-hit"
_NUMBERS = count(1 << 20)
"""Numbers of requests: an engine that is checked again may still hold the earlier ones."""
_NUM_KEPT = 3
"""Tokens of the request with which the adapter tests whether the engine shows its cache."""


class StepEngine:
    """Runs any object with a method `step(work)`; the tensor of each tap is found by its values.

    `work` is a list of (request, token ids, position of the first token). `step` computes these tokens, keeps what
    later tokens need, and returns the logits of the last token of each request, [requests, vocabulary].

    Optional methods and attributes of the object:

    - `finish(request)` is called when a request has ended, before the next step.
    - `reset()` is called before each schedule. It empties every cache. Without it, what an earlier schedule left is
      recognised by what `begin` returns.
    - `cached(request)` is called before `finish`. It returns the cached keys and values, {layer: ([positions, KV heads,
      head size] twice)}.
    - `states(request)` is called after a step. It returns the recurrent states, {layer: {"conv_state": tensor,
      "recurrent_state": tensor}} as in the cache of HF for one request; or {layer: [tensor, ...]} in any order and
      layout, which are then identified by their values.
    - `begin(request, token_ids)` is called under `prefix-hit`, with the prompt, before the first step of a request. It
      assigns the cached prefix to the request, and returns its number of tokens, which is less than that of the prompt.
    - `rewinds`: if true, a step at a position that was computed before discards the cache from that position on.
    - `tokens_ahead`: number of MTP layers that it runs (`--mtp`). Each entry of `work` then ends with a list of the
      next tokens of the request, as many as there are layers and tokens.
    - `cache_dtype`, `cache_scale` and `numerics` declare arithmetic: see `harness.engines.declared`.
    - `fill_unused` and `fill_states` give `harness fuzz poison` access to its memory: see `harness.engines.poison`.
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
        tap_names: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the adapter; nothing is opened yet.

        Args:
            open_stepper: opens the engine; called before each run, and may return the same object every time.
            name: name of the engine, for reports.
            folder: checkpoint of the model that it runs.
            dtype: dtype of the engine.
            numerics: arithmetic that is not in this dtype.
            open_first: opens a different engine to learn the map from: the same engine with unquantised weights.
            tap_names: of its tensors, as reports name them, and the taps that they are for certain.
        """
        self._open_first = open_first or open_stepper
        self._numerics, self._tap_names = numerics, tap_names
        self.name, self._open, self._folder = name, open_stepper, folder
        self._dtype = getattr(torch, dtype)
        self._numbers = _NUMBERS
        self._graph: Graph | None = None
        self.map: TapMap | None = None
        self._places: Places = {}
        self.capabilities = Capabilities(schedules=(*_SCHEDULES, *_WITH_DRAFTS, _WITH_PREFIXES), keeps_cache=False)

    @cached_property
    def _first(self) -> Stepper:
        """The engine before its first run, which shows its settings and from which the map is learned."""
        return self._open_first()

    def match_taps(self, graph: Graph) -> None:
        """Learn the map; see `TapMatcher.match_taps`. Of an engine whose tensors hold no value of HF's: the logits."""
        stepper, self._graph = self._first, graph
        hf = load_model(self._folder, dtype=torch.float32, stays=True, mtp=graph.has_mtp)
        with _telling_what_stays(stepper):
            learned = learn_map(stepper, hf, dtype=self._dtype, numbers=self._numbers, tap_names=self._tap_names)
        self.map = learned
        kept = self._kept(stepper, graph, learned)
        places = self._places = find_places(stepper, hf, next(self._numbers))
        kept |= {tap for (at, name), tap in graph.states.items() if at is not None and places.get((at, name))}
        self.capabilities = Capabilities(
            schedules=tuple(_schedules(learned.batch, stepper, has_mtp=graph.has_mtp)),
            keeps_states=hasattr(stepper, "states"),
            numerics=declared_numerics(stepper, graph) or self._numerics,
            not_served=_shows_by_itself(stepper),
            unsupported_taps=(*graph.not_shown(learned.taps), *graph.not_shown(kept, caches=True)),
            sampled_only=tuple(
                tap for tap, mapped in learned.taps.items() if mapped.is_sampled_only and tap not in graph.head
            ),
            notes=(*_notes(learned, graph), *getattr(stepper, "notes", ())),
            seen=_seen(learned, stepper, graph, kept),
            sources=_sources(learned, stepper),
        )
        del self._first  # runs open the engine again

    def _kept(self, stepper: Stepper, graph: Graph, learned: TapMap) -> set[str]:
        """Return the taps of the cache that the engine shows after a step."""
        number, cache = next(self._numbers), KeptCache(stepper, graph, learned)
        if not cache.is_shown:
            return set()
        with torch.no_grad():
            stepper.step(with_following(stepper, [(number, list(range(_NUM_KEPT)), 0)]))
        kept = set(cache.read(number, _NUM_KEPT))
        finish(stepper, number)
        return kept

    def resolved_settings(self) -> ModelSettings:
        """Return the settings that the engine shows, or else those of its torch modules; see `SettingsShower`."""
        stepper = self._first
        show_settings: Callable[[], ModelSettings] | None = getattr(stepper, "resolved_settings", None)
        if show_settings is not None:
            return show_settings()
        return settings_of_modules({path: module for module, path in module_paths(stepper).items()})

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """See `Engine.run`."""
        assert self.map is not None, "call match_taps first"
        assert self._graph is not None
        stepper = self._open()
        getattr(stepper, "reset", lambda: None)()
        run = _Run(stepper, self.map, self._places, self._graph, writer, self._numbers, workload)
        for batch in workload.batches:
            has_hits = workload.schedule.trigger == "prefix_hit"
            cached = {request.id: run.begin(request) for request in batch} if has_hits else {}
            for work, ended in _steps(batch, workload, cached):
                with _telling_what_stays(stepper):
                    run.step(work)
                for request in ended:
                    run.finish(request)
        if run.num_outlived and not workload.is_served:
            self.capabilities = replace(
                self.capabilities, notes=(*self.capabilities.notes, _outlived(workload, run.num_outlived))
            )


@contextmanager
def _telling_what_stays(stepper: Stepper) -> Iterator[None]:
    """Note on what an engine raises that it frees no request: it may have run out of memory."""
    try:
        yield
    except Exception as error:
        if not hasattr(stepper, "finish"):
            error.add_note(
                "it may be out of memory: without a method finish(request) it frees no request, not even those that "
                "its tensors were learned from"
            )
        raise


class _Run:
    def __init__(
        self,
        stepper: Stepper,
        tap_map: TapMap,
        places: Places,
        graph: Graph,
        writer: RecordingWriter,
        numbers: Iterator[int],
        workload: Workload,
    ) -> None:
        self._stepper, self._map, self._graph, self._writer = stepper, tap_map, graph, writer
        self._poison, self._is_served = workload.poison, workload.is_served
        embeddings = (tap_map.taps[op.tap] for op in graph if op.kind is Kind.EMBEDDING and op.tap in tap_map.taps)
        self._embedding = next((mapped.sources for mapped in embeddings), ())
        self._sampled_only = {
            tap for tap, mapped in tap_map.taps.items() if mapped.is_sampled_only or tap in graph.head
        }
        self._sites = tap_map.sites
        self._numbers, self._number_of = numbers, dict[int, int]()
        self._cache, self._states = KeptCache(stepper, graph, tap_map), KeptStates(stepper, places)
        self._num_computed = Counter[int]()
        """Rows of each request, by its number in the engine; includes rejected rows and a prefix that it may reuse."""
        self._longest = 0
        """Length of the longest request that has ended: a wrong prefix hit may leave as many tokens in the cache."""
        self._ended: list[Sequence[int]] = []
        """Tokens of the requests that have ended."""
        self.num_outlived = 0
        """Prompt tokens that were cached though no step of this run had computed them."""

    def begin(self, request: RequestInfo) -> int:
        """Return the number of prompt tokens that the engine has cached and does not compute.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the engine returns no valid number.
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
        if num_outlived := max(0, cached - self._num_computed_before(request)):
            self.num_outlived += num_outlived
            self._compute_apart(request)
        return cached

    def _num_computed_before(self, request: RequestInfo) -> int:
        """Return the length of the longest prefix of a request that an ended request of this run has computed."""
        shared = (
            takewhile(lambda pair: pair[0] == pair[1], zip(request.token_ids, ids, strict=False)) for ids in self._ended
        )
        return max((sum(1 for _ in pairs) for pairs in shared), default=0)

    def _compute_apart(self, request: RequestInfo) -> None:
        """Record all of a prompt under another number in the engine: the rows that the cached ones must equal."""
        cached = self._number_of.pop(request.id)
        self.step([[(request, range(request.prompt_length))]])
        finish(self._stepper, self._number_of[request.id])
        self._number_of[request.id] = cached

    def step(self, work: list[list[Part]]) -> None:
        """Compute and record some positions of some requests, each with those of its rejected draft."""
        parts = [part for request_parts in work for part in request_parts]
        rows = [(request, at) for request, positions in parts for at in positions]
        lengths = [sum(len(positions) for _, positions in request_parts) for request_parts in work]
        last = [end - 1 for end in accumulate(lengths)]
        sampled = [row for row, (request, at) in enumerate(rows) if at >= request.prompt_length - 1]
        verifies = not set(sampled) <= set(last)  # each row of a draft chooses a token
        chosen = [at for at, row in enumerate(sampled if verifies else last) if row in sampled]
        phases = {"decode" if request.prompt_length <= at else "prefill" for request, at in rows}
        phase = phases.pop() if len(phases) == 1 else "mixed"
        if self._poison is not None:
            victim = None if self._poison.victim is None else self._number_of.get(self._poison.victim)
            self._poison.before_step(self._stepper, victim)
        for request_parts, length in zip(work, lengths, strict=True):
            self._num_computed[self._number(request_parts[0][0])] += length
        taps, logits, ambiguous = self._compute(work, last, sampled if verifies else None)
        taps = {tap: self._kept(tap, *rows_of_tap, sampled) for tap, rows_of_tap in taps.items()}
        taps = {tap: (values, kept) for tap, (values, kept) in taps.items() if kept}
        partial = {tap: kept for tap, (_, kept) in taps.items() if len(kept) < len(rows) or tap in self._sampled_only}
        self._writer.begin_step(
            phase=phase,
            request=[request.id for request, _ in rows],
            position=[at for _, at in rows],
            sampled_rows=sampled,
            partial_rows=partial,
            ambiguous_rows=ambiguous,
        )
        for tap, (values, _) in taps.items():
            self._writer.tap(tap, values.reshape(-1, *self._graph[tap].shape))
        self._writer.end_step(logits[chosen].argmax(dim=-1).tolist())
        for request_parts in work:
            self._write_states(*request_parts[-1])

    def _kept(
        self, tap: str, values: torch.Tensor, rows: list[int], sampled: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Return the values and rows to record: all, or the sampled rows if an engine may compute those alone."""
        if tap not in self._sampled_only:
            return values, rows
        wanted = {*sampled}
        kept = [at for at, row in enumerate(rows) if row in wanted]
        return values[kept], [rows[at] for at in kept]

    def _write_states(self, request: RequestInfo, positions: range) -> None:
        """Record the recurrent states of a request, if the engine shows them."""
        states = {key: state[None] for key, state in self._states.read(self._number(request)).items()}
        write_states(self._writer, self._graph, states, [(0, request.id, positions.stop - 1)])

    def finish(self, request: RequestInfo) -> None:
        """Record the cache of a request that has ended, and let the engine free it."""
        number = self._number_of.pop(request.id)
        held = self._cache.read(number, len(request.token_ids), self._num_computed.pop(number))
        write_read_back(self._writer, request, held)
        self._longest = max(self._longest, len(request.token_ids))
        self._ended.append(request.token_ids)
        finish(self._stepper, number)

    def _compute(
        self, work: list[list[Part]], last: list[int], rows: list[int] | None
    ) -> tuple[dict[str, tuple[torch.Tensor, list[int]]], torch.Tensor, list[int]]:
        """Run a step; return the values of each tap and their rows, the logits, and the rows that are ambiguous.

        As served it has the logits alone.

        Args:
            work: of the step.
            last: row of each request's last token.
            rows: whose logits are verified; None for the last ones.
        """
        teller = self._map.teller
        starts = [request_parts[0][1].start for request_parts in work]
        tokens = [_tokens(request_parts) for request_parts in work]
        asked = [
            RequestWork([*request_parts[0][0].token_ids[:start], *computed], start)
            for request_parts, start, computed in zip(work, starts, tokens, strict=True)
        ]
        numbers = [self._number(request_parts[0][0]) for request_parts in work]
        engine_work = list(zip(numbers, tokens, starts, strict=True))
        following = [request_parts[-1][0].token_ids[request_parts[-1][1].stop :] for request_parts in work]
        returned = Site("", 0, RETURNED)
        if self._is_served:
            logits = watched_run(self._stepper, engine_work, None, rows=rows, following=following)
            return self._map.read({returned: _returned_rows(logits, rows, sum(map(len, tokens)))}, last), logits, []

        def keep(forwards: Sequence[StepForward], site: Site, tensor: torch.Tensor) -> torch.Tensor:
            self._fill_padding(forwards, asked, site, tensor)
            return tensor.clone()

        forwards, logits = run_step(
            self._stepper,
            engine_work,
            teller,
            keep=keep,
            only=self._sites,
            rows=rows,
            following=following,
        )
        told = teller.tell(forwards, asked)
        shown = teller.in_order(forwards, asked, told)
        shown[returned] = _returned_rows(logits, rows, sum(map(len, tokens)))
        return self._map.read(shown, last), logits, sorted(told.ambiguous)

    def _fill_padding(
        self, forwards: Sequence[StepForward], work: Sequence[RequestWork], site: Site, tensor: torch.Tensor
    ) -> None:
        """Fill padding rows of the embedding."""
        if self._poison is None or hasattr(self._stepper, "watching"):  # an engine with `watching` shows copies
            return
        if any(source.site == site for source in self._embedding):
            padding = self._map.teller.padding_of(forwards, work, site, tensor.shape)
            if padding is not None:
                dim, is_padding = padding
                self._poison.fill_rows(tensor.movedim(dim, 0), ~is_padding.to(tensor.device))

    def _number(self, request: RequestInfo) -> int:
        """Return the number of the request in the engine, new in each run; a draft has that of its request."""
        request_id = request.id if request.draft_of is None else request.draft_of
        if request_id not in self._number_of:
            self._number_of[request_id] = next(self._numbers)
        return self._number_of[request_id]


def _schedules(batch: StepBatch, stepper: Stepper, *, has_mtp: bool = False) -> Iterator[str]:
    """Yield the schedules that an engine can follow. A padded batch cannot mix chunks with decode.

    Args:
        batch: what a step may hold.
        stepper: the engine.
        has_mtp: whether MTP layers are judged. They read the next token, which would be wrong for a draft.
    """
    recomputes_all = recomputes(stepper)  # each step computes all earlier tokens of its request
    if batch is StepBatch.MIXED:
        yield from _SCHEDULES
    else:
        yield "plain"
        if not recomputes_all:
            yield "chunked"
            if batch is StepBatch.PADDED:
                yield "batched"
    if rewinds(stepper) and not has_mtp:
        yield from _WITH_DRAFTS
    if hasattr(stepper, "begin"):
        yield _WITH_PREFIXES


def _steps(
    requests: list[RequestInfo], workload: Workload, cached: Mapping[int, int]
) -> Iterator[tuple[list[list[Part]], list[RequestInfo]]]:
    """Yield the work of each step, and the requests that end with it.

    Prompts come whole or in chunks, then one token (or the drafts) of each request.

    The first `cached` tokens of a prompt, by the id of its request, are left out.
    """
    ahead = {
        request.id: [
            [
                (part, range(max(positions.start, cached.get(request.id, 0)), positions.stop))
                for part, positions in parts
            ]
            for parts in workload.steps(request)
        ]
        for request in requests
    }
    while any(ahead.values()):
        ready = [request for request in requests if ahead[request.id]]
        taken = ready if workload.schedule.is_batched else ready[:1]
        work = [ahead[request.id].pop(0) for request in taken]
        yield work, [request for request in taken if not ahead[request.id]]


def _returned_rows(logits: torch.Tensor, rows: Sequence[int] | None, num_rows: int) -> SiteRows:
    """Return logits as rows of the work: of some rows, or of each request's last one."""
    if rows is None:
        return SiteRows(logits, torch.ones(len(logits), dtype=torch.bool), is_by_request=True)
    values, is_known = logits.new_zeros(num_rows, logits.shape[1]), torch.zeros(num_rows, dtype=torch.bool)
    values[rows], is_known[rows] = logits, True
    return SiteRows(values, is_known, is_by_request=False)


def _tokens(parts: list[Part]) -> list[int]:
    return [token for request, positions in parts for token in request.token_ids[positions.start : positions.stop]]


def _notes(learned: TapMap, graph: Graph) -> Iterator[str]:
    """Yield notes on the map for the report."""
    if learned.refusal is not None:
        yield f"each step has one request, since one of two raised {learned.refusal}"
    num_tokens = graph[graph.logits].shape[-1]
    if learned.num_columns > num_tokens:
        yield (
            f"the step returns {learned.num_columns:,} logits for {num_tokens:,} tokens: of the others it was judged "
            "only that none is the largest"
        )
    guessed = [mapped.tap for mapped in learned.taps.values() if mapped.evidence not in ("content", "definition")]
    if guessed:
        yield f"found by what is around them, since their own value is another: {', '.join(guessed[:4])}"


_NO_CACHE = "the engine has no method cached(request), or it does not return this layer"
_REORDERED = "its rows lie in another order than the token ids that are looked up"
_NOT_HELD = "no tensor of the engine holds it in rows that were told: it may be computed inside of another operation"
_NONE_HELD = (
    "no tensor of the engine holds a value of HF's, so that the logits are judged alone: it is compiled, runs outside "
    "of torch or in another process, or looks token ids up outside of torch and in several forwards"
)


def _seen(learned: TapMap, stepper: Stepper, graph: Graph, kept: Collection[str]) -> SeenTensors:
    """Return what was seen of an engine."""
    lost = dict.fromkeys(graph.not_shown(kept, caches=True), _NO_CACHE)
    not_held = _REORDERED if learned.teller.has_reordered else _NOT_HELD
    if set(learned.taps) <= {graph.logits}:
        not_held = _NONE_HELD
    for name in graph.not_shown(learned.taps):
        taps = [op.tap for op in graph if name in (op.tap, op.site)]
        lost[name] = next((learned.uncertain[tap] for tap in taps if tap in learned.uncertain), not_held)
    return SeenTensors(
        attached=getattr(stepper, "attached", "a step object"),
        rows_by="the token ids that it looks up" if learned.teller.lookups else "the order of the work",
        num_tensors=learned.num_tensors,
        num_taps=dict(Counter(mapped.evidence.value for mapped in learned.taps.values())),  # `asdict` breaks a Counter
        num_forwards=learned.num_forwards,
        lost=lost,
    )


def _shows_by_itself(stepper: Stepper) -> str | None:
    """Return why an engine that has its own `watching` does not run as served: it may be opened in order to be seen."""
    return f"{type(stepper).__name__} is watched in a way of its own" if hasattr(stepper, "watching") else None


def _outlived(workload: Workload, num_tokens: int) -> str:
    return (
        f"{workload.schedule}: the cache outlives a schedule: {num_tokens} prompt tokens were cached before this "
        "schedule computed them. They were computed once more, to judge what was cached: a method reset() empties it"
    )


def _sources(learned: TapMap, stepper: Stepper) -> dict[str, TapSource]:
    """Return the tensor of each tap, with its line of code; for the output of a module, the line of its forward."""
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
