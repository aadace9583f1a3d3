"""The wrong rows, in words: every row, decode rows, one request, from a position on."""

from collections.abc import Iterator

import torch

from harness.formats.recording import Recording
from harness.judge.compare.align import Rows


def scope(rows: Rows, bad: torch.Tensor, recording: Recording) -> str:
    """Return the simplest description that holds for exactly the rows where the mask `bad` does."""
    requests = rows.request[bad].unique()
    of_request = torch.isin(rows.request, requests)
    names = ", ".join(str(request) for request in requests.tolist()[:6])
    of = f"request{'s' if len(requests) > 1 else ''} {names}" if len(requests) <= 6 else f"{len(requests)} requests"
    for candidates in (list(_by_step(rows, recording)), list(_by_position(rows, bad))):
        for name, mask in candidates:
            if torch.equal(mask, bad):
                return name
        for name, mask in candidates:
            if not bool(of_request.all()) and torch.equal(mask & of_request, bad):
                return of if name == "every row" else f"{name} of {of}"
    return f"{int(bad.sum())} of {len(rows)} rows"


def _by_step(rows: Rows, recording: Recording) -> Iterator[tuple[str, torch.Tensor]]:
    everything = torch.ones(len(rows), dtype=torch.bool)
    yield "every row", everything
    yield "every row but those at position 0", rows.position > 0
    lengths = {request.id: request.prompt_length for request in recording.manifest.requests}
    prompt = torch.tensor([lengths[request] for request in rows.request.tolist()], dtype=torch.int64)
    yield "decode rows", rows.position >= prompt
    yield "prefill rows", rows.position < prompt
    yield "the last row of each prompt", rows.position == prompt - 1
    starts = _chunk_starts(rows)
    yield "rows of a prompt behind its first chunk", (rows.position < prompt) & (starts > 0)
    yield "rows that are not in their request's first step", starts > 0
    yield "rows in steps of one request alone", ~_in_batch(rows)
    yield "rows in steps of several requests", _in_batch(rows)


def _by_position(rows: Rows, bad: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    first = int(rows.position[bad].min())
    yield f"rows from position {first} on", rows.position >= first
    positions = rows.position[bad].unique()
    if len(positions) == 1:
        yield f"rows at position {first}", rows.position == first
    if len(positions) > 1 and len(steps := (positions[1:] - positions[:-1]).unique()) == 1 and int(steps) > 1:
        is_there = (rows.position >= first) & ((rows.position - first) % int(steps) == 0)
        yield f"rows at every {int(steps)}th position from {first} on", is_there


def _chunk_starts(rows: Rows) -> torch.Tensor:
    """[rows]: first position that the row's request computed in the row's step."""
    keys = rows.step * (1 << 32) + rows.request
    unique, inverse = keys.unique(return_inverse=True)
    starts = torch.full((len(unique),), torch.iinfo(torch.int64).max).scatter_reduce(0, inverse, rows.position, "amin")
    return starts[inverse]


def _in_batch(rows: Rows) -> torch.Tensor:
    """[rows] bool: the row's step holds rows of several requests."""
    unique, inverse = rows.step.unique(return_inverse=True)
    lowest, highest = (
        torch.zeros(len(unique), dtype=torch.int64).scatter_reduce(0, inverse, rows.request, how, include_self=False)
        for how in ("amin", "amax")
    )
    return (lowest != highest)[inverse]
