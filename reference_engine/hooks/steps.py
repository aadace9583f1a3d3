"""Describing steps to an observer; used only when there is one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from reference_engine.attention.backend import AttentionBackend
from reference_engine.batch import sampled_rows, slots_of
from reference_engine.families.state_cache import StateCache
from reference_engine.observer import Observer, StepInfo
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["describe", "show_cache", "show_states"]


def describe(scheduled: Seq[ScheduledChunk], computed: Seq[ScheduledChunk], backend: AttentionBackend) -> StepInfo:
    """Say what the rows of a step are: those of `computed`, which without a cache begin before `scheduled`."""
    are_decodes = {chunk.is_decode for chunk in scheduled}
    phase = "mixed" if len(are_decodes) == 2 else "decode" if are_decodes == {True} else "prefill"
    return _step_info(phase, computed, sampled_rows(computed), backend)


def show_cache(
    sequence: Sequence, backend: AttentionBackend, layers: Seq[int], observer: Observer, *, has_latents: bool
) -> None:
    """Show K and V of all computed positions as they stand in the cache, as a step of phase `readback`.

    Of latent attention, K is the latent and V the rotated part of the keys, as transformers caches them.
    """
    num_tokens = sequence.num_computed_tokens
    whole = ScheduledChunk(sequence, 0, num_tokens)
    observer.begin_step(_step_info("readback", [whole], [], backend))
    for number, layer in enumerate(layers):
        k_CKH, v_CKH = backend.read_back(number, sequence.block_table, num_tokens)
        if has_latents:
            k_CKH, v_CKH = v_CKH, k_CKH[..., v_CKH.shape[-1] :]
        observer.tap(f"model.layers.{layer}.k_cache", k_CKH)
        observer.tap(f"model.layers.{layer}.v_cache", v_CKH)
    observer.end_step([])


def show_states(chunks: Seq[ScheduledChunk], states: StateCache, layers: Seq[int], observer: Observer) -> None:
    """Show the states after the last row of each chunk, as a step of phase `readback` of these rows."""
    last = [ScheduledChunk(chunk.sequence, chunk.stop - 1, chunk.stop) for chunk in chunks]
    blocks = [chunk.sequence.block_table[chunk.start // states.block_size] for chunk in last]
    observer.begin_step(
        StepInfo(
            phase="readback",
            request_ids=[chunk.sequence.request_id for chunk in last],
            positions=[chunk.start for chunk in last],
            sampled_rows=[],
            slot_mapping=[],
            block_tables={},
        )
    )
    for number, layer in enumerate(layers):
        observer.tap(f"model.layers.{layer}.conv_state", states.conv_LBCW[number, blocks])
        observer.tap(f"model.layers.{layer}.recurrent_state", states.recurrent_LBNAH[number, blocks])
    observer.end_step([])


def _step_info(phase: str, chunks: Seq[ScheduledChunk], rows: Seq[int], backend: AttentionBackend) -> StepInfo:
    has_blocks = backend.has_blocks
    return StepInfo(
        phase=phase,
        request_ids=[chunk.sequence.request_id for chunk in chunks for _ in range(chunk.num_tokens)],
        positions=[position for chunk in chunks for position in range(chunk.start, chunk.stop)],
        sampled_rows=rows,
        slot_mapping=[slot for chunk in chunks for slot in slots_of(chunk, backend.block_size)] if has_blocks else [],
        block_tables={c.sequence.request_id: list(c.sequence.block_table) for c in chunks} if has_blocks else {},
    )
