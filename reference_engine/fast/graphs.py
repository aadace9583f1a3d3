"""Decode steps recorded once and replayed, so that the host does not launch every kernel of every step.

A recorded step has a fixed number of rows, block tables of a fixed width, and reads fixed tensors. A batch is copied
into them, and the rows that are left over are padding: token 0 of a request without keys, whose K and V go to the null
block. Narrow tables have recordings of their own: attention over a short context is then launched in fewer parts.

Shapes: R requests, B blocks, V vocab.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from reference_engine.batch import Batch
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.layers import MLP, Linear
from reference_engine.model import Attention, Decoder, Forward
from reference_engine.observer import Observer, StepInfo

__all__ = ["Capture", "CudaCapture", "DecodeGraphs", "graph_sizes", "is_capturable", "table_widths"]

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records a call; returns what replays it, and the tensor in which its result then lies."""

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8
NARROWEST = 16
"""Blocks of the narrowest table that is recorded; each next one is four times as wide."""


def is_capturable(decoder: Decoder) -> bool:
    """Tell whether what a decode step launches depends on shapes alone.

    Which experts run is known on the host alone, as are the numbers of states and the length that rotary frequencies
    follow, and sums over ranks may go through it.
    """
    parts = [(getattr(layer, "attention", None), getattr(layer, "mlp", None)) for layer in decoder.layers]
    has_mlps = all(isinstance(mixer, Attention) and isinstance(mlp, MLP) for mixer, mlp in parts)
    return has_mlps and isinstance(decoder.lm_head, Linear) and not decoder.rotary.follows_length


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that are recorded: 1, 2, 4, multiples of 8, and always the largest batch there can be."""
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, max_num_seqs, SIZE_STEP), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def table_widths(max_blocks: int) -> list[int]:
    """Return the widths of block tables that are recorded, in blocks: 16, 64, 256 and so on, and always the widest."""
    widths = [max_blocks]
    width = NARROWEST
    while width < max_blocks:
        widths.append(width)
        width *= 4
    return sorted(widths)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The tensors that a recorded step reads."""

    rows_4R: torch.Tensor
    """int64: token ids, positions, slots and context lengths, of which the batch has views."""
    batch: Batch

    def fill(self, batch: Batch) -> None:
        """Copy a batch over the first rows, and make padding of the others. Few calls: the GPU waits for them."""
        num_rows, width = batch.block_tables_RB.shape
        rows = (batch.token_ids_T, batch.positions_T, batch.slot_mapping_T, batch.context_lens_R)
        self.rows_4R[:, :num_rows].copy_(_joined(rows))
        tables_RB = self.batch.block_tables_RB
        tables_RB[:num_rows, :width].copy_(batch.block_tables_RB)
        if width < tables_RB.shape[1]:
            tables_RB[:num_rows, width:].fill_(NULL_BLOCK)
        if num_rows < len(tables_RB):
            self.rows_4R[:, num_rows:].zero_()
            tables_RB[num_rows:].fill_(NULL_BLOCK)


def _joined(rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return [4, R]: a view where they lie one after the other, as `build_batch` has moved them, else a copy."""
    first, num_rows = rows[0], len(rows[0])
    places = [first.data_ptr() + at * num_rows * first.itemsize for at in range(len(rows))]
    is_one_piece = [x.data_ptr() for x in rows] == places and first.is_contiguous()
    return first.as_strided((len(rows), num_rows), (num_rows, 1)) if is_one_piece else torch.stack(rows)


@dataclass(frozen=True, slots=True)
class _Taps:
    """An observer within a recording: it keeps a copy of each intermediate, which every replay makes again."""

    copies: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin_step(self, step: StepInfo) -> None:
        """See `Observer.begin_step`."""

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        """See `Observer.tap`."""
        self.copies[name] = tensor.clone()

    def end_step(self, sampled: Sequence[int]) -> None:
        """See `Observer.end_step`."""

    def show(self, observer: Observer, num_rows: int) -> None:
        """Show the copies of the rows that are no padding, in the order in which they were made."""
        for name, copy in self.copies.items():
            observer.tap(name, copy[:num_rows])


@dataclass(frozen=True, slots=True)
class _Recorded:
    fixed: _Fixed
    replay: Callable[[], None]
    logits_RV: torch.Tensor
    taps: _Taps | None
    """Those of a step that is watched."""


class DecodeGraphs:
    """Runs the steps that decode one token for each of some requests; each shape is recorded when it first occurs.

    The largest is recorded before any other, so that all others find room in the memory that it has left.

    Args:
        max_num_seqs: the largest batch.
        max_blocks: width of the block tables that are recorded; a batch with a longer table is left to others.
        device: where the batches are.
        capture: records a call.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks: int, device: torch.device, capture: Capture) -> None:
        self._sizes = graph_sizes(max_num_seqs)
        self._widths = table_widths(max_blocks)
        self._device = device
        self._capture = capture
        self._recorded: dict[tuple[int, int, bool], _Recorded] = {}
        self._logits_RV: torch.Tensor | None = None
        """Of the latest step, whatever its shape: logits of its own for each recording would take gigabytes."""

    def run(self, forward: Forward, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V], valid until the next step; or None if this batch is not one of them.

        `forward` computes the logits with nothing that waits for the device or depends on its numbers. An observer of
        the batch is shown what the recording has kept.
        """
        num_rows = len(batch.query_lens)
        if not self._is_served(batch):
            return None
        shape = _fitting(self._sizes, num_rows), _fitting(self._widths, batch.block_tables_RB.shape[1])
        is_watched = batch.observer is not None
        for needed in ((self._sizes[-1], self._widths[-1], is_watched), (*shape, is_watched)):
            if needed not in self._recorded:
                self._recorded[needed] = self._record(forward, *needed)
        recorded = self._recorded[*shape, is_watched]
        recorded.fixed.fill(batch)
        recorded.replay()
        if batch.observer is not None and recorded.taps is not None:
            recorded.taps.show(batch.observer, num_rows)
        return recorded.logits_RV[:num_rows]

    def _is_served(self, batch: Batch) -> bool:
        num_rows = len(batch.query_lens)
        is_decode = batch.num_single == num_rows and batch.sampled_rows_ is None and len(batch.sampled_rows) > 0
        return is_decode and num_rows <= self._sizes[-1] and batch.block_tables_RB.shape[1] <= self._widths[-1]

    def _record(self, forward: Forward, size: int, width: int, is_watched: bool) -> _Recorded:
        fixed, taps = _padding(size, width, self._device), _Taps() if is_watched else None
        watched = replace(fixed.batch, observer=taps)

        def compute() -> torch.Tensor:
            logits_RV = forward(watched)
            assert logits_RV is not None, "every row of a decode step is sampled"
            if self._logits_RV is None:  # the first call, before anything is recorded
                self._logits_RV = logits_RV.new_empty(self._sizes[-1], logits_RV.shape[1])
            return self._logits_RV[:size].copy_(logits_RV)

        replay, logits_RV = self._capture(compute)
        return _Recorded(fixed, replay, logits_RV, taps)


def _fitting(known: list[int], number: int) -> int:
    """Return the smallest of some sizes, in order, that is large enough."""
    return known[bisect_left(known, number)]


def _padding(size: int, width: int, device: torch.device) -> _Fixed:
    """Return a batch of nothing but padding."""
    rows_4R = torch.zeros((4, size), dtype=torch.int64, device=device)
    batch = Batch(
        token_ids_T=rows_4R[0],
        positions_T=rows_4R[1],
        slot_mapping_T=rows_4R[2],
        block_tables_RB=torch.full((size, width), NULL_BLOCK, dtype=torch.int64, device=device),
        block_tables=[],
        context_lens_R=rows_4R[3],
        query_lens=[1] * size,
        context_lens=[0] * size,
        sampled_rows=list(range(size)),
        sampled_rows_=None,
        observer=None,
    )
    return _Fixed(rows_4R, batch)


class CudaCapture:
    """Records calls as CUDA graphs: all from one stream, whose workspaces they share, and in one pool of memory.

    So only one of them may run at a time, and none is valid beyond the next one's replay but its result.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Streams are those of the current device, which need not be `device`: a call on another one is not recorded.
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record a call, after it has run once, where libraries set themselves up."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = function()
        return graph.replay, result
