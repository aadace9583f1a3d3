"""All keys and values that were recorded of one layer, to find out whose content a place of the cache holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording
from harness.formats.taps import Graph, Kind
from harness.judge.compare.align import Rows, is_readback, step_rows
from harness.judge.compare.sequences import SlotHistory, Write
from harness.results.check import Provenance

KEY, RAW_KEY, VALUE, ZERO = "key", "key before rotary", "value", "zeros"
_MAX_ROWS = 1 << 14
_TOLERANCE = 4.0
"""Roundings within which two rows are one and the same content."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Whose content a row is."""

    kind: str
    request: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        if self.request is None:
            return self.kind
        return f"the {self.kind} of request {self.request}, position {self.position}"


class ContentIndex:
    """Keys, keys before rotary and values of one layer, at every row that computed them."""

    def __init__(self, recording: Recording, graph: Graph, layer: int, dtype: torch.dtype) -> None:
        self.layer = layer
        self.taps = _taps(graph, layer)
        self._tolerance = _TOLERANCE * rounding_unit(dtype)
        self.rows: dict[str, Rows] = {}
        self.tensors: dict[str, torch.Tensor] = {}
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
        """Return whose content one row [K*H] is; None if it is nobody's."""
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
        """Trace one place of the cache: where it is, who wrote it last, and whose content it holds.

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
        if content is None and writer is not None:
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
    """Return the taps of what a layer caches as keys and values; empty if it has none that HF's interface shows."""
    attention = graph.attention_of(layer)
    if attention is None:
        return {}
    kept = {operation.site: operation.inputs[0] for operation in graph.of_layer(layer) if operation.kind is Kind.CACHE}
    _, key, value = attention.inputs
    key, value = kept.get("k_cache", key), kept.get("v_cache", value)
    raw = {RAW_KEY: graph[key].inputs[0]} if graph[key].kind is Kind.ROTARY else {}
    return {KEY: key, VALUE: value, **raw}


def _head(content: torch.Tensor | None, meant: torch.Tensor | None, head_dim: int) -> int | None:
    """Return the KV head that is furthest off; None if all are off alike, within a factor of two."""
    if content is None or meant is None or content.shape != meant.shape or len(content) % head_dim:
        return None
    error = (content - meant).view(-1, head_dim).norm(dim=1)
    return int(error.argmax()) if float(error.max()) > 2 * float(error.min()) else None


def describe_writes(wrong: Sequence[tuple[int, Write | None]]) -> str:
    """List positions and who wrote there: `16: request 1, position 3, step 7`."""
    parts = [f"{position}: {'nobody' if write is None else write}" for position, write in wrong[:4]]
    return "written last, by position: " + "; ".join(parts) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
