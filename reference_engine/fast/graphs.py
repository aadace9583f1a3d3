"""Decode steps recorded once and replayed, so that the host does not launch every kernel of every step.

A recorded step has a fixed number of rows and reads fixed tensors. A batch is copied into them, and the rows that are
left over are padding: token 0 of a request without keys, whose K and V go to the null block. On a GPU this is
unmeasured: no session had one to run it on.

Shapes: R requests, B blocks, V vocab.
"""

# ruff: noqa: N815 (shape suffixes on fields are this field's notation)

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from reference_engine.batch import Batch
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.layers import MLP, Linear
from reference_engine.model import Attention, Decoder, Forward

__all__ = ["Capture", "CudaCapture", "DecodeGraphs", "graph_sizes", "is_capturable"]

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records a call; returns what replays it, and the tensor in which its result then lies."""

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8


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


@dataclass(frozen=True, slots=True)
class _Recorded:
    batch: Batch
    """The fixed tensors."""
    replay: Callable[[], None]
    logits_RV: torch.Tensor


class DecodeGraphs:
    """Runs the steps that decode one token for each of some requests; each size is recorded when it first occurs.

    The largest is recorded before any other, so that all others find room in the memory that it has left.

    Args:
        max_num_seqs: the largest batch.
        max_blocks: width of the block tables that are recorded; a batch with a longer table is left to others.
        device: where the batches are.
        capture: records a call.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks: int, device: torch.device, capture: Capture) -> None:
        self._sizes = graph_sizes(max_num_seqs)
        self._max_blocks = max_blocks
        self._device = device
        self._capture = capture
        self._recorded: dict[int, _Recorded] = {}

    def run(self, forward: Forward, batch: Batch) -> torch.Tensor | None:
        """Return the logits [R, V], valid until the next step; or None if this batch is not one of them.

        `forward` computes the logits with nothing that waits for the device or depends on its numbers.
        """
        num_rows = len(batch.query_lens)
        if not self._is_served(batch):
            return None
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        for needed in (self._sizes[-1], size):
            if needed not in self._recorded:
                self._recorded[needed] = self._record(forward, needed)
        recorded = self._recorded[size]
        _fill(recorded.batch, batch)
        recorded.replay()
        return recorded.logits_RV[:num_rows]

    def _is_served(self, batch: Batch) -> bool:
        num_rows = len(batch.query_lens)
        is_decode = batch.num_single == num_rows and batch.sampled_rows_ is None and len(batch.sampled_rows) > 0
        return is_decode and num_rows <= self._sizes[-1] and batch.block_tables_RB.shape[1] <= self._max_blocks

    def _record(self, forward: Forward, size: int) -> _Recorded:
        batch = _padding(size, self._max_blocks, self._device)

        def compute() -> torch.Tensor:
            logits_RV = forward(batch)
            assert logits_RV is not None, "every row of a decode step is sampled"
            return logits_RV

        replay, logits_RV = self._capture(compute)
        return _Recorded(batch, replay, logits_RV)


def _padding(size: int, max_blocks: int, device: torch.device) -> Batch:
    """Return a batch of nothing but padding."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return Batch(
        token_ids_T=zeros(size),
        positions_T=zeros(size),
        slot_mapping_T=zeros(size),
        block_tables_RB=torch.full((size, max_blocks), NULL_BLOCK, dtype=torch.int64, device=device),
        block_tables=[],
        context_lens_R=zeros(size),
        query_lens=[1] * size,
        context_lens=[0] * size,
        sampled_rows=list(range(size)),
        sampled_rows_=None,
        observer=None,
    )


def _fill(recorded: Batch, batch: Batch) -> None:
    """Copy a batch over the first rows, and make padding of the others."""
    num_rows, width = batch.block_tables_RB.shape
    for fixed, own in (
        (recorded.token_ids_T, batch.token_ids_T),
        (recorded.positions_T, batch.positions_T),
        (recorded.slot_mapping_T, batch.slot_mapping_T),
        (recorded.context_lens_R, batch.context_lens_R),
    ):
        fixed[:num_rows].copy_(own)
        fixed[num_rows:].zero_()
    recorded.block_tables_RB.fill_(NULL_BLOCK)
    recorded.block_tables_RB[:num_rows, :width].copy_(batch.block_tables_RB)


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
