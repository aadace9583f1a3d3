"""What attention would have read: the history of each row gathered by slots, as the engine's own record has it.

`T` query rows, `S` history rows, `M` known rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from harness.compare.align import Rows
from harness.compare.slot_history import Write
from harness.explain.contents import Contents
from harness.explain.scene import Scene, gathered
from harness.explain.view import View
from harness.results import Provenance


@dataclass(frozen=True, slots=True)
class Read:
    """The rows of one request in one step, and what they would read."""

    view: View
    writes: list[Write | None]
    """Who wrote what each position of the history is read from."""
    step: int
    request: int


def played_back(scene: Scene, slots_of: Callable[[int, int, int], Sequence[int]]) -> list[Read] | None:
    """Play the cache back: for (step, request, number of positions), `slots_of` gives the slots that are read."""
    keys, values = (scene.operation.inputs[1], scene.operation.inputs[2])
    reads = []
    for view in scene.views:
        for step in dict.fromkeys(view.rows.step.tolist()):
            here = (view.rows.step == step).nonzero()[:, 0]
            part = view.select(here)
            request, length = int(part.rows.request[0]), int(part.rows.position.max()) + 1
            slots = slots_of(step, request, length)
            writes = [scene.memory.writer(slot, step) for slot in slots]
            writes += [None] * (length - len(writes))
            key, value = scene.memory.content(writes, keys), scene.memory.content(writes, values)
            if key is None or value is None:
                return None
            head_dim = part.query.shape[-1]
            part = replace(
                part,
                key=key.unflatten(1, (-1, head_dim)),
                value=value.unflatten(1, (-1, head_dim)),
                key_step=torch.full((len(writes),), -1, dtype=torch.int64),
            )
            reads.append(Read(part, writes, step, request))
    return reads


def in_order(scene: Scene, reads: Sequence[Read], attend: Callable[[Read], torch.Tensor]) -> torch.Tensor:
    """[R, N*H] in the order of the scene's rows; reads are grouped by request and step."""
    output = torch.empty_like(scene.expected)
    keys = row_keys(scene.rows)
    for read in reads:
        output[torch.isin(keys, row_keys(read.view.rows))] = attend(read)
    return output


def row_keys(rows: Rows) -> torch.Tensor:
    """Return [rows] int64: one number for each request, position and step."""
    return (rows.step << 42) + (rows.request << 21) + rows.position


def history(scene: Scene, view: View, tap: str) -> torch.Tensor | None:
    """[S, K, H] of a tap at the rows of a view's history, where all of them are the request's own."""
    position = torch.arange(len(view.key))
    request = torch.full_like(position, int(view.rows.request[0]))
    rows = Rows(request=request, position=position, step=view.key_step)
    found = scene.locator.find(tap, rows) if tap in scene.locator.taps() else None
    if found is None or bool((found[:, 0] < 0).any()):
        return None
    same = Rows(request=request, position=position, step=found[:, 0])
    tensor = gathered(scene.locator, tap, same)
    return None if tensor is None or tensor.shape[1] != view.key[0].numel() else tensor.view_as(view.key)


def contents_of(scene: Scene) -> Contents:
    """Return all keys and values that were recorded of the scene's layer."""
    return Contents(scene.recording, scene.graph, scene.operation.layer or 0, scene.dtype)


def provenance_of(scene: Scene, step: int, request: int, position: int, content: torch.Tensor) -> Provenance:
    """Trace one place of a request's history that holds `content` [K*H], as of a step."""
    return contents_of(scene).provenance(
        scene.memory,
        step=step,
        request=request,
        position=position,
        content=content,
        meant=_meant(scene, request, position),
        head_dim=scene.hf.head_dim,
    )


def _meant(scene: Scene, request: int, position: int) -> torch.Tensor | None:
    for view in scene.views:
        if int(view.rows.request[0]) == request and position < len(view.key):
            return view.key[position].flatten()
    return None
