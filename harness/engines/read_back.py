"""What a KV cache holds of a request that ends, as a step of its recording."""

from collections.abc import Mapping

import torch

from harness.formats.recording import RecordingWriter, RequestInfo


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
