"""Requests side by side through HF's own cache: padded on the left, forked, preempted, gone back."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import CacheLayerMixin

from harness.engines.adapter import Part, Workload, engine_refusals
from harness.engines.poison import fill
from harness.engines.record import write_read_back, write_states
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Kind, Operation, prefix_of
from harness.oracle.caches import new_cache
from harness.oracle.decode import HFDecoder, Snapshot
from harness.oracle.images import DecoderInputs, handing
from harness.oracle.model import HFModel
from harness.oracle.watch import Seeing, as_rows, chosen_positions, watching


@dataclass(frozen=True, slots=True)
class ShownTap:
    """A tap, and which dimension of what the model shows of it counts the tokens."""

    operation: Operation
    token_dim: int


@dataclass(slots=True)
class BatchForward:
    """One forward of a batch: its input, and which of its rows are real."""

    ids: list[list[int]]
    positions: list[list[int]]
    kept: list[int] = field(default_factory=list)
    """Indices of real rows into batch * tokens."""
    request: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    """Indices into the kept rows."""
    lanes: list[int] = field(default_factory=list)
    """Row of the batch of each of them."""
    owners: list[list[int]] = field(default_factory=list)
    """[batch, tokens] ids of the requests whose rows they are; those of padding do not matter."""
    following: list[list[int]] = field(default_factory=list)
    """Of each row of the batch the tokens of its request that come next."""
    columns: list[int] = field(default_factory=list)
    """Column of each of them, counted from the end: -1 is the last one."""

    def last_rows(self) -> list[tuple[int, int, int]]:
        """Return the last real row of each lane: lane, request, position."""
        last = {}
        for place, request, position in zip(self.kept, self.request, self.position, strict=True):
            last[place // len(self.ids[0])] = request, position
        return [(lane, *row) for lane, row in last.items()]


class Recorder(Seeing):
    """Writes the taps of one forward: the rows of tokens that are a request's own."""

    def __init__(
        self,
        hf: HFModel,
        sources: Mapping[str, ShownTap],
        forward: BatchForward,
        writer: RecordingWriter,
        dtypes: dict[str, torch.dtype],
        padding: Sequence[int],
    ) -> None:
        super().__init__(self.write)
        self._dtypes, self._padding = dtypes, padding
        self._sources, self._forward, self._writer = sources, forward, writer
        self._kept = torch.tensor(forward.kept, device=hf.device)
        self._head = hf.graph.head
        self._shape = len(forward.ids), len(forward.ids[0])

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """Write a choice, one among the tokens so far by their positions: columns of the cache without the padding."""
        shown = self._sources.get(source)
        if shown is not None and shown.operation.among_tokens:
            padding = torch.tensor(self._padding, device=chosen.device)[:, None, None]
            chosen = (chosen_positions(chosen, scores, shown.operation.shape[0]) - padding).clamp(min=-1)
        self.write(source, chosen)

    def write(self, source: str, value: torch.Tensor) -> None:
        """Write one value, if it is a tap."""
        shown = self._sources.get(source)
        if shown is None:
            return
        operation, dim = shown.operation, shown.token_dim
        num_requests, num_tokens = self._shape
        if operation.tap in self._head:
            if self._forward.lanes:
                self._writer.tap(operation.tap, value[self._forward.lanes, self._forward.columns])
            return
        if dim and value.shape[dim] > num_tokens:  # all of the history comes with the new tokens
            value = value.narrow(dim, value.shape[dim] - num_tokens, num_tokens)
        rows = as_rows(value, dim, num_requests, num_tokens)[self._kept]
        # HF may keep a value in float32 in prefill and not in decode: one recording has one dtype for it.
        self._writer.tap(operation.tap, rows.to(self._dtypes.setdefault(operation.tap, rows.dtype)))


@dataclass(slots=True)
class _Lane:
    """One request as a row of a left-padded batch."""

    request: RequestInfo
    num_padding: int
    num_fed: int = 0
    is_read_back: bool = False
    is_lost: bool = False
    """Whether the cache no longer counts: what the batch computes of it from now on is ignored."""


class HFBatch:
    """Some requests computed together, the shorter ones padded on the left."""

    def __init__(
        self,
        hf: HFModel,
        attention: str | None,
        sources: Mapping[str, ShownTap],
        requests: Sequence[RequestInfo],
        writer: RecordingWriter,
        workload: Workload,
        dtypes: dict[str, torch.dtype],
        images: Mapping[int, DecoderInputs],
    ) -> None:
        self._hf, self._attention, self._sources, self._writer = hf, attention, sources, writer
        self._images = images
        self._poison, self._is_served = workload.poison, workload.is_served
        self._longest = max(request.prompt_length for request in requests)
        self._lanes = [_Lane(request, self._longest - request.prompt_length) for request in requests]
        self._mask: list[list[int]] = [[] for _ in requests]
        self._dtypes = dtypes
        """Dtype of each tap in the first step of the run."""
        self.read_back: set[str] = set()
        """Caches that could be read back: families cache other things than keys and values, or nothing."""
        self._sees_history = _sees_history(hf)
        self._takes_positions = _takes(hf.model, "position_ids")

    def run(self, chunk_size: int | None) -> None:
        """Compute all requests, prompts whole or in chunks."""
        with HFDecoder(self._hf) as decoder:
            self._run_prompts(chunk_size, decoder)
            self._run_decode(decoder)

    def run_with_forks(self, forks: Mapping[int, RequestInfo]) -> None:
        """Fork each request once its prompt is computed: the fork goes on from a copy of its cache, beside it.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: HF's cache of this family cannot be copied by request.
        """
        with HFDecoder(self._hf) as decoder, engine_refusals("transformers", "--schedule forked"):
            self._run_prompts(None, decoder)
            decoder.take_lanes([*range(len(self._lanes)), *range(len(self._lanes))])
            self._mask += [list(row) for row in self._mask]
            copies = [replace(lane, request=forks[lane.request.id], is_read_back=False) for lane in self._lanes]
            first = len(self._lanes)
            rows = [(first + at, copy.request.id, copy.num_fed - 1) for at, copy in enumerate(copies)]
            self._lanes += copies
            self._write_states(rows, decoder)
            self._run_decode(decoder)

    def run_preempted(self) -> None:
        """Drop the cache of every request but the first half way through its decode, and compute it again."""
        lost = self._lanes[1:] or self._lanes
        num_steps = max(len(lane.request.token_ids) - lane.request.prompt_length for lane in lost) // 2
        with HFDecoder(self._hf) as decoder:
            self._run_prompts(None, decoder)
            self._run_decode(decoder, num_steps)
            for lane in lost:
                lane.is_lost = lane.num_fed < len(lane.request.token_ids)
            self._run_decode(decoder)
        for lane in (item for item in lost if item.is_lost):
            self._lanes, self._mask = [_Lane(lane.request, 0)], [[]]
            with HFDecoder(self._hf) as decoder:
                self._forward_of([(lane.request, range(lane.num_fed))], self._lanes[0], decoder)
                self._run_decode(decoder)

    def _run_prompts(self, chunk_size: int | None, decoder: HFDecoder) -> None:
        for columns in self._columns(chunk_size):
            self._forward(self._next_forward(columns), decoder)
            self._read_back_finished(decoder)

    def _run_decode(self, decoder: HFDecoder, num_steps: int | None = None) -> None:
        """Feed one token of each request after the other, to the end of all or for so many steps."""
        left = max((len(lane.request.token_ids) - lane.num_fed for lane in self._lanes if not lane.is_lost), default=0)
        for _ in range(left if num_steps is None else min(left, num_steps)):
            self._forward(self._next_forward(1), decoder)
            self._read_back_finished(decoder)

    def run_on_prefix(self, known: dict[tuple[object, ...], Snapshot]) -> None:
        """Compute one request, from where the cache holds its prompt without the last token.

        Args:
            known: what the cache held after the prompts and images so far; this one's is added.
        """
        (lane,) = self._lanes
        length = lane.request.prompt_length - 1
        prefix = (lane.request.inputs, *lane.request.token_ids[:length])
        with HFDecoder(self._hf) as decoder:
            if prefix in known:
                decoder.restore(known[prefix])
                lane.num_fed, self._mask[0] = length, [1] * length
                self._write_states([(0, lane.request.id, length - 1)], decoder)
            for positions in _pieces(lane.request, lane.num_fed):
                self._forward_of([(lane.request, positions)], lane, decoder)
                if lane.num_fed == length:
                    with engine_refusals("transformers", "--schedule prefix-hit"):
                        known[prefix] = decoder.snapshot()
            self._read_back_finished(decoder)

    def run_with_drafts(self, workload: Workload) -> None:
        """Compute one request, its drafts included, and crop HF's cache where it goes back.

        A cache of states goes back to the last of the request's own steps, whose rows are computed again.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: HF's cache of this family cannot go back.
        """
        (lane,) = self._lanes
        has_states = bool(self._hf.graph.states)
        steps = workload.steps(lane.request)
        kept: tuple[int, Snapshot] | None = None
        with HFDecoder(self._hf) as decoder, engine_refusals("transformers", f"--schedule {workload.schedule}"):
            if not has_states:
                decoder.keep_past()
            for parts in _with_last_token_apart(steps) if has_states else steps:
                begin, again = parts[0][1].start, list[Part]()
                if begin < lane.num_fed:
                    self._go_back(lane, begin, kept, decoder)
                    again = [(lane.request, range(lane.num_fed, begin))] if lane.num_fed < begin else []
                for forward_parts in filter(None, (again, parts)):
                    if has_states and forward_parts[0][0] is lane.request:
                        kept = lane.num_fed, decoder.snapshot()
                    self._forward_of(forward_parts, lane, decoder)
            self._read_back_finished(decoder)

    def _go_back(self, lane: _Lane, begin: int, kept: tuple[int, Snapshot] | None, decoder: HFDecoder) -> None:
        """Forget what follows a position; where a snapshot is kept, go back to that."""
        if kept is None:
            decoder.rewind(lane.num_fed - begin)
        else:
            begin = kept[0]
            decoder.restore(kept[1])
        del self._mask[0][begin - lane.num_fed :]
        lane.num_fed = begin

    def _forward_of(self, parts: Sequence[Part], lane: _Lane, decoder: HFDecoder) -> None:
        """Compute some parts of the only lane."""
        forward = BatchForward(ids=[], positions=[])
        self._add(forward, lane, 0, parts)
        self._forward(forward, decoder)

    def _columns(self, chunk_size: int | None) -> Iterator[int]:
        """Yield the width of each forward over the padded prompts, whole or in chunks."""
        at, size = 0, chunk_size or self._longest
        while at < self._longest:
            end = min(at + size, self._longest)
            while any(self._sees_ahead(lane, end - lane.num_padding) for lane in self._lanes):
                end += 1
            yield end - at
            at = end

    def _sees_ahead(self, lane: _Lane, position: int) -> bool:
        """Whether attention looks from before a position to after it: an image's token may see all of it (Gemma 3)."""
        images = self._images.get(lane.request.id)
        if images is None or not images.is_seen_whole or not 0 < position < lane.request.prompt_length:
            return False
        return any(bool(types[position - 1] and types[position]) for types in images.types.values())

    def _token_types(self) -> dict[str, torch.Tensor]:
        """Return the types of the forward's tokens and of all before them, padding included, by the argument's name."""
        tables = {}
        for name in {name for images in self._images.values() for name in images.types}:
            table = torch.zeros(len(self._lanes), len(self._mask[0]), dtype=torch.int64, device=self._hf.device)
            for line, lane in zip(table, self._lanes, strict=True):
                if (images := self._images.get(lane.request.id)) is not None:
                    types = images.types[name][: len(line) - lane.num_padding]
                    line[lane.num_padding : lane.num_padding + len(types)] = types
            tables[name] = table
        return tables

    def _forward(self, forward: BatchForward, decoder: HFDecoder) -> None:
        prompts = {lane.request.id: lane.request.prompt_length for lane in self._lanes}
        in_prompt = {
            position < prompts.get(request, 0)
            for request, position in zip(forward.request, forward.position, strict=True)
        }
        self._writer.begin_step(
            phase="mixed" if len(in_prompt) > 1 else "prefill" if True in in_prompt else "decode",
            request=forward.request,
            position=forward.position,
            sampled_rows=forward.sampled,
            partial_rows=dict.fromkeys(self._hf.graph.head, forward.sampled) if forward.sampled else None,
        )
        logits = self._compute(forward, decoder)
        self._writer.end_step(logits[forward.lanes, forward.columns].argmax(dim=-1).tolist())
        self._write_states(forward.last_rows(), decoder)

    def _write_states(self, rows: Sequence[tuple[int, int, int]], decoder: HFDecoder) -> None:
        """Write the states after some rows: of each its lane, request and position."""
        self.read_back |= write_states(self._writer, self._hf.graph, decoder.states, rows)

    def _compute(self, forward: BatchForward, decoder: HFDecoder) -> torch.Tensor:
        is_padded = any(lane.num_padding for lane in self._lanes)
        options: dict[str, Any] = dict(self._token_types())
        if self._takes_positions:
            options["position_ids"] = torch.tensor(forward.positions, device=self._hf.device)
        if is_padded:
            # Without attention HF multiplies the mask with the rows of this forward: it is of these alone.
            begin = 0 if self._sees_history else len(self._mask[0]) - len(forward.ids[0])
            options["attention_mask"] = torch.tensor([row[begin:] for row in self._mask], device=self._hf.device)
        if _takes(self._hf.model, "logits_to_keep"):
            options["logits_to_keep"] = max((-column for column in forward.columns), default=1)
        padding = [lane.num_padding for lane in self._lanes]
        recorder = Recorder(self._hf, self._sources, forward, self._writer, self._dtypes, padding)
        cells = [
            [(self._images.get(owner), at) for owner, at in zip(*line, strict=True)]
            for line in zip(forward.owners, forward.positions, strict=True)
        ]
        with (
            self._poisoned(forward, decoder),
            handing(self._hf, cells),
            self._hf.followed_by(forward.following),
            self._watched(recorder),
        ):
            decoder.feed(forward.ids, **options)
            assert decoder.logits is not None
            recorder.see("logits", decoder.logits)
        return decoder.logits

    @contextmanager
    def _watched(self, recorder: Recorder) -> Iterator[None]:
        """Show the values of a forward; as served, let the model run as it is, with the attention that was chosen."""
        if not self._is_served:
            with watching(self._hf, attention=self._attention) as watch, watch.showing(recorder):
                yield
            return
        before = self._hf.config._attn_implementation
        if self._attention is not None:
            self._hf.model.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            if self._attention is not None:
                self._hf.model.set_attn_implementation(before)

    @contextmanager
    def _poisoned(self, forward: BatchForward, decoder: HFDecoder) -> Iterator[None]:
        """Fill what must not reach the rows of a forward: the cache before it, and the embeddings of padding in it."""
        if self._poison is None:
            yield
            return
        poison = self._poison
        lanes = {lane.request.id: index for index, lane in enumerate(self._lanes)}
        victim = None if poison.victim is None else lanes.get(poison.victim)
        poison.before_step(_Memory(len(self._lanes), decoder), victim)
        is_live = torch.zeros(len(forward.ids) * len(forward.ids[0]), dtype=torch.bool, device=self._hf.device)
        is_live[forward.kept] = True
        embedding = self._hf.model.get_input_embeddings()
        hook = embedding.register_forward_hook(lambda _m, _a, out: poison.fill_rows(out.flatten(0, 1), is_live))
        try:
            yield
        finally:
            hook.remove()

    def _next_forward(self, columns: int) -> BatchForward:
        forward = BatchForward(ids=[], positions=[])
        for index, lane in enumerate(self._lanes):
            start = len(self._mask[index])
            num_padding = min(max(lane.num_padding - start, 0), columns)
            positions = range(lane.num_fed, lane.num_fed + columns - num_padding)
            self._add(forward, lane, index, [(lane.request, positions)], num_padding)
        return forward

    def _add(self, forward: BatchForward, lane: _Lane, index: int, parts: Sequence[Part], num_padding: int = 0) -> None:
        """Add rows of a lane, after its padding; a request that is done is fed zeros, and its output is ignored."""
        ids, positions, owners = [0] * num_padding, [0] * num_padding, [-1] * num_padding
        num_columns = num_padding + sum(len(part) for _, part in parts)
        for request, part in parts:
            tokens = [] if lane.is_lost else request.token_ids[part.start : part.stop]
            forward.kept += range(index * num_columns + len(ids), index * num_columns + len(ids) + len(tokens))
            forward.request += [request.id] * len(tokens)
            forward.position += part[: len(tokens)]
            num_sampled = max(0, part.start + len(tokens) - max(part.start, request.prompt_length - 1))
            forward.sampled += range(len(forward.kept) - num_sampled, len(forward.kept))
            forward.lanes += [index] * num_sampled
            first_column = len(ids) + len(tokens) - num_sampled - num_columns
            forward.columns += range(first_column, first_column + num_sampled)
            ids += tokens + [0] * (len(part) - len(tokens))
            positions += part
            owners += [request.id] * len(tokens) + [-1] * (len(part) - len(tokens))
        forward.owners.append(owners)
        forward.following.append([token for request, part in parts[-1:] for token in request.token_ids[part.stop :]])
        forward.ids.append(ids)
        forward.positions.append(positions)
        self._mask[index] += [0] * num_padding + [1] * (num_columns - num_padding)
        if parts and not lane.is_lost:
            lane.num_fed = parts[-1][1].stop

    def _read_back_finished(self, decoder: HFDecoder) -> None:
        """Read each request's cache when it is done: after a window, padding soon takes the place of its rows."""
        for index, lane in enumerate(self._lanes):
            if lane.num_fed >= len(lane.request.token_ids) and not lane.is_read_back and not lane.is_lost:
                lane.is_read_back = True
                self._read_back(index, lane, decoder)

    def _read_back(self, index: int, lane: _Lane, decoder: HFDecoder) -> None:
        """Write what the cache holds of a request: of a sliding window, its last rows."""
        caches = {op.tap: prod(op.shape) for op in self._hf.graph if op.kind is Kind.CACHE}
        layers = list(getattr(next(iter(decoder.cache.values()), None), "layers", ()))
        parts = {}
        attentions = [op for op in self._hf.graph if op.kind is Kind.ATTENTION and op.layer is not None]
        if len({op.layer for op in attentions}) < len(attentions):
            return  # layers that run more than once cache more than once
        for operation in attentions:
            layer = layers[operation.layer] if operation.layer is not None and operation.layer < len(layers) else None
            for name in ("keys", "values"):
                states = getattr(layer, name, None)
                tap = f"{prefix_of(operation.tap)}{name[0]}_cache"
                if tap not in caches or not isinstance(states, torch.Tensor) or states.dim() != 4:
                    continue
                rows = states[index].transpose(0, 1)
                if len(rows) and rows[0].numel() == caches[tap]:  # some families cache other tensors than are read
                    parts[tap] = rows
        self.read_back |= set(parts)
        num_columns, held = len(self._mask[index]), {}
        for tap, states in parts.items():
            kept, columns = self._kept_rows(lane, len(states), num_columns)
            held[tap] = kept, states[columns]
        write_read_back(self._writer, lane.request, held)

    @staticmethod
    def _kept_rows(lane: _Lane, num_kept: int, num_columns: int) -> tuple[range, slice]:
        """Return the positions of a request that are among the last columns, and where they stand among them."""
        first_column = num_columns - num_kept
        begin = max(0, first_column - lane.num_padding)
        end = len(lane.request.token_ids)
        offset = lane.num_padding - first_column
        return range(begin, end), slice(begin + offset, end + offset)


def _pieces(request: RequestInfo, begin: int) -> Iterator[range]:
    """Yield the positions of a request's steps: the prompt without its last token, then one after the other."""
    end = request.prompt_length - 1
    if begin < end:
        yield range(begin, end)
    yield from (range(at, at + 1) for at in range(end, len(request.token_ids)))


def _with_last_token_apart(steps: Iterator[list[Part]]) -> Iterator[list[Part]]:
    """Give the last token of a prompt a step of its own: a request goes back to before it."""
    for parts in steps:
        request, positions = parts[0]
        end = request.prompt_length - 1
        if positions.start < end < positions.stop:
            yield [(request, range(positions.start, end))]
            parts = [(request, range(end, positions.stop)), *parts[1:]]
        yield parts


@dataclass(frozen=True, slots=True)
class _Memory:
    """The cache of a batch as memory to poison: each lane's part of all that its layers keep, states included."""

    num_lanes: int
    decoder: HFDecoder

    def fill_states(self, request: int, value: float) -> int:
        """See `FillsStates`; the request is named by its lane."""
        layers = [layer for cache in self.decoder.cache.values() for layer in getattr(cache, "layers", ())]
        kept = [leave for leave in tree_leaves([vars(layer) for layer in layers]) if isinstance(leave, torch.Tensor)]
        return sum(fill(item[request], value) for item in kept if item.dim() > 1 and len(item) == self.num_lanes)


def _sees_history(hf: HFModel) -> bool:
    """Whether a forward reads earlier tokens, and a mask is of them, too; families may show no attention that does."""
    layers = getattr(new_cache(hf), "layers", ())
    keeps_tokens = any(isinstance(layer, CacheLayerMixin) for layer in layers)
    return keeps_tokens or any(operation.kind is Kind.ATTENTION for operation in hf.graph)


def _takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward takes an argument, if only to hand it on to that of a class which it derives from."""
    parameters = inspect.signature(model.forward).parameters
    if name in parameters:
        return True
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    forwards = (vars(item)["forward"] for item in type(model).__mro__ if "forward" in vars(item))
    return hands_on and any(name in inspect.signature(item).parameters for item in forwards)
