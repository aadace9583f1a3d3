"""The wrong rows, in words: every row, decode rows, one request, from a position on."""

from collections.abc import Iterator
from typing import Any

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


def first_bad_row(
    rows: Rows, bad: torch.Tensor, recording: Recording, config: Any, block_size: int | None
) -> tuple[str, bool]:
    """Say which row of a request is the first bad one, and what begins there; and whether anything does.

    Args:
        rows: that were judged.
        bad: [rows] bool.
        recording: the engine's.
        config: HF's.
        block_size: of the KV cache; None if it is not known.
    """
    order = torch.argsort(rows.request * (1 << 32) + rows.position)
    first = int(order[bad[order]][0])
    request, position = int(rows.request[first]), int(rows.position[first])
    names = [name for name, at in dict(_edges(recording, request, config)).items() if at == position]
    if block_size and position and position % block_size == 0:
        names.append(f"block {position // block_size}")
    what = f", where {' and '.join(names)} begin{'s' if len(names) == 1 else ''}" if names else ""
    return f"the first bad row is at position {position} of request {request}{what}", bool(names)


def _edges(recording: Recording, request: int, config: Any) -> Iterator[tuple[str, int]]:
    """Yield what begins at some position of a request, and where."""
    prompts = {item.id: item.prompt_length for item in recording.manifest.requests}
    yield "decode", prompts[request]
    own = [step for step in recording.steps if bool((step.request == request).any()) and step.phase != "readback"]
    starts = [int(step.position[step.request == request].min()) for step in own]
    if len(starts) > 1 and starts[1] < prompts[request]:
        went_on = starts[1] == int(own[0].position[own[0].request == request].max()) + 1
        yield "the second chunk of the prompt" if went_on else "what is computed after going back", starts[1]
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int):
        yield f"what is beyond the sliding window of {window}", window
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(chunk, int):
        yield f"the second chunk of {chunk} that attention sees by itself", chunk
    parameters = getattr(config, "rope_parameters", None) or {}
    for parameter in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        length = parameter.get("original_max_position_embeddings")
        if isinstance(length, int):
            yield f"what is beyond the original context length of {length}", length


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
    yield "rows of a prompt after its first chunk", (rows.position < prompt) & (starts > 0)
    yield "rows that are not in their request's first step", starts > 0
    yield "rows in steps of one request alone", ~_in_batch(rows, recording)
    yield "rows in steps of several requests", _in_batch(rows, recording)


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


def _in_batch(rows: Rows, recording: Recording) -> torch.Tensor:
    """[rows] bool: the row's step holds rows of several requests; a draft is of its request."""
    drafts = {request.id: request.draft_of for request in recording.manifest.requests if request.draft_of is not None}
    requests = torch.tensor([drafts.get(item, item) for item in rows.request.tolist()], dtype=torch.int64)
    unique, inverse = rows.step.unique(return_inverse=True)
    lowest, highest = (
        torch.zeros(len(unique), dtype=torch.int64).scatter_reduce(0, inverse, requests, how, include_self=False)
        for how in ("amin", "amax")
    )
    return (lowest != highest)[inverse]
