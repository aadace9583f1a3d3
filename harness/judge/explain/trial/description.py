"""The wrong rows in words: which rows are wrong, and how they differ from what they should be."""

from collections.abc import Iterator
from typing import Any

import torch

from harness.formats.recording import Recording
from harness.formats.taps import KINDS
from harness.judge.compare.align import Rows
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.explain.core.wrong_operation import WrongOperation

_UNRELATED = 0.3
"""Cosine below which two rows have nothing to do with each other."""
_TREND = 0.8
"""Correlation of ranks from which an error is said to grow with the position."""
_JUMP = 4.0
"""Times the largest error before it, in shares of the bound, from which the first bad row is where something begins."""


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


def first_bad_row(errors: LocalErrors, recording: Recording, config: Any, block_size: int | None) -> tuple[str, bool]:
    """Say which row of a request is the first bad one, and what begins there; and whether anything does.

    Nothing begins where the rows before are nearly as far off: a mistake in all rows leaves the bound somewhere.

    Args:
        errors: of all rows that were judged.
        recording: the engine's.
        config: HF's, of the layer.
        block_size: of the KV cache; None if it is not known.
    """
    rows = errors.rows
    first = rows.first(errors.bad)
    request, position = int(rows.request[first]), int(rows.position[first])
    shares = (errors.roundings / errors.bound.clamp(min=1)).nan_to_num(nan=0.0)
    before = shares[(rows.request == request) & (rows.position < position)]
    if len(before) and float(shares[first]) < _JUMP * float(before.max()):
        return f"the first row beyond its bound is at position {position} of request {request}", False
    names = [name for name, at in dict(_edges(recording, request, config)).items() if at == position]
    if block_size and position and position % block_size == 0:
        names.append(f"block {position // block_size}")
    what = f", where {' and '.join(names)} begin{'s' if len(names) == 1 else ''}" if names else ""
    return f"the first bad row is at position {position} of request {request}{what}", bool(names)


def _edges(recording: Recording, request: int, config: Any) -> Iterator[tuple[str, int]]:
    """Yield what begins at some position of a request, and where."""
    prompts = {item.id: item.prompt_length for item in recording.manifest.requests}
    yield "decode", prompts[request]
    steps = [step for step in recording.steps if bool((step.request == request).any()) and step.phase != "readback"]
    starts = [int(step.position[step.request == request].min()) for step in steps]
    if len(starts) > 1 and starts[1] < prompts[request]:
        went_on = starts[1] == int(steps[0].position[steps[0].request == request].max()) + 1
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


def pattern(wrong: WrongOperation) -> str:
    """Describe the difference between what is and what should be."""
    parts = [_size(wrong), _blocks(wrong), _growth(wrong)]
    return "; ".join(part for part in parts if part)


def _size(wrong: WrongOperation) -> str:
    actual, expected = wrong.actual, wrong.expected
    cosine = float(torch.nn.functional.cosine_similarity(actual, expected, dim=1).median())
    ratio = float((actual.norm(dim=1) / expected.norm(dim=1)).median())
    if abs(cosine) < _UNRELATED:
        return f"unrelated to what it should be (cosine {cosine:.2g}, norm {ratio:.3g} times)"
    error = float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median())
    return f"off by {error:.2g} of the row's norm (cosine {cosine:.6g}, norm {ratio:.6g} times)"


def _blocks(wrong: WrongOperation) -> str:
    """Name the heads that carry the error, or the run of elements if that is not all of them."""
    error = (wrong.actual - wrong.expected).norm(dim=0)
    head_dim = wrong.head_dim if KINDS[wrong.operation.kind].has_heads else 0
    if head_dim and len(error) > head_dim and not len(error) % head_dim:
        per_head = error.view(-1, head_dim).norm(dim=1)
        heads = (per_head > 0.01 * per_head.max()).nonzero()[:, 0].tolist()
        if len(heads) < len(per_head):
            return f"only in heads {', '.join(map(str, heads))} of {len(per_head)}"
    elements = (error > 0.01 * error.max()).nonzero()[:, 0]
    first, last = int(elements[0]), int(elements[-1])
    if len(elements) == last - first + 1 < len(error):
        return f"only in elements {first} to {last} of {len(error)}"
    return f"only in {len(elements)} of {len(error)} elements" if len(elements) < len(error) else ""


def _growth(wrong: WrongOperation) -> str:
    error = (wrong.actual - wrong.expected).norm(dim=1) / wrong.expected.norm(dim=1)
    if len(error) < 8 or len(wrong.positions.unique()) < 8:
        return ""
    ranks = [x.argsort().argsort().double() for x in (wrong.positions, error)]
    correlation = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    if abs(correlation) < _TREND:
        return ""
    return f"{'grows' if correlation > 0 else 'falls'} with the position (rank correlation {correlation:.2f})"
