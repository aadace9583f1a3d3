"""What the cache of a layer held: the recorded keys and values by content, and a history read back slot by slot.

`T` query rows, `S` history rows, `M` known rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording
from harness.formats.taps import Graph, Kind
from harness.judge.compare.align import Rows, is_readback, step_rows
from harness.judge.compare.evidence import AttentionContext
from harness.judge.compare.sequences import SlotHistory, Write
from harness.judge.explain.core.wrong_operation import KEY, VALUE, KeptRows, WrongOperation, latest
from harness.results.check import Provenance

RAW_KEY, ZERO = "key before rotary", "zeros"
_MAX_ROWS = 1 << 14
_TOLERANCE = 4.0
"""Roundings within which two rows are one and the same content."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The row and tensor that some content belongs to."""

    kind: str
    request: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        if self.request is None:
            return self.kind
        return f"the {self.kind} of request {self.request}, position {self.position}"


class ContentIndex:
    """Keys, keys before rotary and values of one layer, at every row that computed them."""

    def __init__(
        self, recording: Recording, graph: Graph, layer: int, dtype: torch.dtype, unshown: KeptRows | None = None
    ) -> None:
        self.layer = layer
        self.taps = _taps(graph, layer)
        self._tolerance = _TOLERANCE * rounding_unit(dtype)
        self.rows: dict[str, Rows] = {kind: rows for kind, (rows, _) in (unshown or {}).items()}
        self.tensors: dict[str, torch.Tensor] = {kind: x for kind, (_, x) in (unshown or {}).items()}
        """[rows, K*H] float64 of each kind."""
        for kind, tap in self.taps.items():
            steps = [step for step in recording.steps if not is_readback(step) and step.has(tap)]
            if steps:
                rows = Rows.concat([step_rows(step, tap) for step in steps])
                tensor = torch.cat([step.tap(tap).flatten(1) for step in steps])[:_MAX_ROWS]
                self.rows[kind] = rows.select(torch.arange(len(tensor)))
                self.tensors[kind] = tensor.to(torch.float64)

    def nearest(
        self, content: torch.Tensor, kind: str, likelier: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [rows] indices and distances of the known row of a kind that is nearest to each row [rows, K*H].

        Of several that are alike, as values of the first layer are for equal tokens, the `likelier` [rows, known] is
        taken.
        """
        distance = torch.cdist(content, self.tensors[kind])
        least = distance.amin(dim=1)
        if likelier is None:
            return distance.argmin(dim=1), least
        is_near = distance <= (least + self._tolerance * content.norm(dim=1))[:, None]
        return (is_near * (1 + likelier)).argmax(dim=1), least

    def whose(self, content: torch.Tensor) -> Match | None:
        """Return the owner of the content of one row [K*H]; None if no recorded row has it."""
        if not bool(content.any()):
            return Match(kind=ZERO)
        for kind in (KEY, VALUE, RAW_KEY):
            if kind in self.tensors and self.tensors[kind].shape[1] == len(content):
                index, distance = self.nearest(content[None], kind)
                if float(distance) <= self._tolerance * float(content.norm()):
                    at = int(index)
                    rows = self.rows[kind]
                    return Match(kind=kind, request=int(rows.request[at]), position=int(rows.position[at]))
        return None

    def provenance(
        self,
        memory: SlotHistory,
        *,
        step: int,
        request: int,
        position: int,
        content: torch.Tensor | None,
        meant: torch.Tensor | None = None,
        head_dim: int,
    ) -> Provenance:
        """Trace one place of the cache: its slot, the last writer, and the owner of its content.

        Args:
            memory: who wrote what.
            step: as of the end of this step.
            request: whose history the place belongs to.
            position: where in that history.
            content: what it holds, [K*H]; None to take what was written there last.
            meant: what it should hold, to find the head that is furthest off.
            head_dim: elements of a head.
        """
        table = memory.table(step, request)
        slots = memory.slots(table, position + 1)
        slot = slots[position] if memory.is_known and position < len(slots) else None
        writer = None if slot is None else memory.writer(slot, step)
        if content is None and writer is not None and KEY in self.taps:
            written = memory.content([writer], self.taps[KEY])
            content = None if written is None else written[0]
        match = Match(kind=ZERO) if content is None else self.whose(content)
        return Provenance(
            layer=self.layer,
            head=_head(content, meant, head_dim),
            request=request,
            position=position,
            block=None if slot is None or memory.block_size is None else slot // memory.block_size,
            slot=slot,
            writer_request=None if writer is None else writer.request,
            writer_step=None if writer is None else writer.step,
            holds="content that no recorded row has" if match is None else str(match),
        )


def _taps(graph: Graph, layer: int) -> dict[str, str]:
    """Return the taps of the keys and values that a layer caches; empty if HF's interface shows none."""
    attention = graph.attention_of(layer)
    if attention is None:
        return {}
    kept = {operation.site: operation.inputs[0] for operation in graph.of_layer(layer) if operation.kind is Kind.CACHE}
    _, key, value = attention.inputs
    key, value = kept.get("k_cache", key), kept.get("v_cache", value)
    raw = {RAW_KEY: graph[key].inputs[0]} if graph[key].kind is Kind.ROTARY else {}
    return {KEY: key, VALUE: value, **raw}


def _head(content: torch.Tensor | None, meant: torch.Tensor | None, head_dim: int) -> int | None:
    """Return the KV head with the largest error; None if all errors are within a factor of two."""
    if content is None or meant is None or content.shape != meant.shape or len(content) % head_dim:
        return None
    error = (content - meant).view(-1, head_dim).norm(dim=1)
    return int(error.argmax()) if float(error.max()) > 2 * float(error.min()) else None


def describe_writes(wrong: Sequence[tuple[int, Write | None]]) -> str:
    """List positions and their writers: `16: request 1, position 3, step 7`."""
    parts = [f"{position}: {'nobody' if write is None else write}" for position, write in wrong[:4]]
    return "written last, by position: " + "; ".join(parts) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The rows of one request in one step, and what they would read."""

    view: AttentionContext
    writes: list[Write | None]
    """Writers of the slots that the history is read from."""
    step: int
    request: int


def replayed_reads(wrong: WrongOperation, slots_of: Callable[[int, int, int], Sequence[int]]) -> list[CacheRead] | None:
    """Play the cache back: for (step, request, number of positions), `slots_of` gives the slots that are read."""
    keys, values = (wrong.operation.inputs[1], wrong.operation.inputs[2])
    reads = []
    for view in wrong.views:
        for step in dict.fromkeys(view.rows.step.tolist()):
            here = (view.rows.step == step).nonzero()[:, 0]
            part = view.select(here)
            request, length = int(part.rows.request[0]), int(part.rows.position.max()) + 1
            slots = slots_of(step, request, length)
            writes = [wrong.slot_history.writer(slot, step) for slot in slots]
            writes += [None] * (length - len(writes))
            key, value = wrong.slot_history.content(writes, keys), wrong.slot_history.content(writes, values)
            if key is None or value is None:
                return None
            part = replace(
                part,
                key=key.unflatten(1, part.key.shape[1:]),
                value=value.unflatten(1, part.value.shape[1:]),
                key_step=torch.full((len(writes),), -1, dtype=torch.int64),
            )
            reads.append(CacheRead(part, writes, step, request))
    return reads


def in_order(
    wrong: WrongOperation, reads: Sequence[CacheRead], attend: Callable[[CacheRead], torch.Tensor]
) -> torch.Tensor:
    """[R, N*H] in the order of the wrong rows; reads are grouped by request and step."""
    output = torch.empty_like(wrong.expected)
    keys = row_keys(wrong.rows)
    for read in reads:
        output[torch.isin(keys, row_keys(read.view.rows))] = attend(read)
    return output


def row_keys(rows: Rows) -> torch.Tensor:
    """Return [rows] int64: one number for each request, position and step."""
    return (rows.step << 42) + (rows.request << 21) + rows.position


def history(wrong: WrongOperation, view: AttentionContext, tap: str, like: torch.Tensor) -> torch.Tensor | None:
    """[S, K, H], the shape of `like`: a tap at the rows of a view's history; None unless it was recorded."""
    position = torch.arange(len(view.key))
    whose = torch.full_like(position, int(view.rows.request[0]))
    tensor = latest(wrong.locator, tap, Rows(request=whose, position=position, step=view.key_step))
    return None if tensor is None or tensor.shape[1] != like[0].numel() else tensor.view_as(like)


def contents_of(wrong: WrongOperation) -> ContentIndex:
    """Return all keys and values that were recorded of the operation's layer."""
    return ContentIndex(wrong.recording, wrong.graph, wrong.operation.layer or 0, wrong.dtype, wrong.kept_rows)


def provenance_of(wrong: WrongOperation, step: int, request: int, position: int, content: torch.Tensor) -> Provenance:
    """Trace one place of a request's history that holds `content` [K*H], at the time of a step."""
    return contents_of(wrong).provenance(
        wrong.slot_history,
        step=step,
        request=request,
        position=position,
        content=content,
        meant=_meant(wrong, request, position),
        head_dim=wrong.views[0].key.shape[-1],
    )


def _meant(wrong: WrongOperation, request: int, position: int) -> torch.Tensor | None:
    for view in wrong.views:
        if int(view.rows.request[0]) == request and position < len(view.key):
            return view.key[position].flatten()
    return None
