"""One forward of a batch: its input, which of its rows are real, and their taps as they are recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.formats.recording import RecordingWriter
from harness.formats.taps import Operation
from harness.oracle.model import HFModel
from harness.oracle.rows import as_rows, chosen_positions
from harness.oracle.watch import Seeing


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
