"""Writes what a cache holds of a request as a step: keys and values at its end, states after any step."""

from collections.abc import Mapping, Sequence

import torch

from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Graph


def write_read_back(
    writer: RecordingWriter, request: RequestInfo, held: Mapping[str, tuple[range, torch.Tensor]]
) -> None:
    """Write what a cache holds of a request: nothing if that is nothing.

    Args:
        writer: of the recording.
        request: the one that ends.
        held: of each tap the positions, and their rows [positions, KV heads, head size].
    """
    if not held:
        return
    num_rows = len(request.token_ids)
    writer.begin_step(
        phase="readback",
        request=[request.id] * num_rows,
        position=range(num_rows),
        partial_rows={tap: kept for tap, (kept, _rows) in held.items() if len(kept) < num_rows} or None,
    )
    for tap, (_kept, rows) in held.items():
        writer.tap(tap, rows)
    writer.end_step()


def write_states(
    writer: RecordingWriter,
    graph: Graph,
    states: Mapping[tuple[int, str], torch.Tensor],
    rows: Sequence[tuple[int, int, int]],
) -> set[str]:
    """Write the states that a cache holds of some requests, and return their taps: nothing if that is nothing.

    Args:
        writer: of the recording.
        graph: of the model.
        states: [requests, ...] by layer and name (`conv_state`, `recurrent_state`).
        rows: of each request its place in the batch, its id, and the position of the last row that is in its states.
    """
    held = {graph.states[key]: state for key, state in states.items() if key in graph.states}
    if not held or not rows:
        return set()
    places, requests, positions = zip(*rows, strict=True)
    writer.begin_step(phase="readback", request=requests, position=positions)
    for tap, state in held.items():
        writer.tap(tap, state[list(places)])
    writer.end_step()
    return set(held)
