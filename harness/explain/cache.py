"""Ways in which the cache gives back something else than was written: another row, another tensor, a coarser dtype."""

from collections.abc import Iterator

import torch

from harness.explain.contents import KEY, RAW_KEY, VALUE, Contents, describe_writes
from harness.explain.hypothesis import Hypothesis
from harness.explain.memory import Write
from harness.explain.scene import Scene
from harness.results import Provenance

_COARSE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def coarser_dtype(scene: Scene) -> Iterator[Hypothesis]:
    """What was written comes back rounded."""
    for dtype in _COARSE_DTYPES:
        output = scene.expected.to(dtype).to(torch.float64)
        yield Hypothesis(cause=f"the cache is in a lower dtype: {str(dtype).removeprefix('torch.')}", output=output)


def never_written(scene: Scene) -> Iterator[Hypothesis]:
    """Zeros come back."""
    yield Hypothesis(
        cause=f"never written: zeros come back{_at_boundary(scene)}",
        output=torch.zeros_like(scene.expected),
        provenance=lambda: _provenance(scene, 0),
    )


def other_tensor(scene: Scene) -> Iterator[Hypothesis]:
    """The same row of another tensor: the value for the key, the key before rotary, another layer's."""
    is_key = scene.operation.site == "k_cache"
    contents = _contents(scene)
    other = {contents.taps[VALUE if is_key else KEY]: "K and V are written to each other's cache"}
    if is_key and RAW_KEY in contents.taps:
        other[contents.taps[RAW_KEY]] = "keys are cached before rotary"
    for layer in scene.graph.layers:
        attention = scene.graph.attention_of(layer)
        if attention is not None and layer != scene.operation.layer:
            other[attention.inputs[1 if is_key else 2]] = f"the cache holds what layer {layer} wrote"
    for tap, cause in other.items():
        tensor = _written(scene, tap)
        if tensor is not None and tensor.shape == scene.actual.shape:
            yield Hypothesis(cause=cause, output=tensor, provenance=lambda: _provenance(scene, 0))


def _written(scene: Scene, tap: str) -> torch.Tensor | None:
    """Return a tap at the rows that were read back, from the steps that computed them."""
    found = scene.locator.find(tap, scene.rows) if tap in scene.locator.taps() else None
    if found is None or bool((found[:, 0] < 0).any()):
        return None
    return scene.locator.gather(tap, found).to(torch.float64).flatten(1)


def played_back(scene: Scene) -> Iterator[Hypothesis]:
    """The engine's own block table leads to slots that something else, or nothing, was written to."""
    memory, own = scene.memory, scene.operation.inputs[0]
    if not memory.is_known:
        return
    places: list[tuple[int, Write | None]] = []
    for request, position, step in zip(
        scene.rows.request.tolist(), scene.positions.tolist(), scene.rows.step.tolist(), strict=True
    ):
        slots = memory.slots(memory.table(step, request), position + 1)
        places.append((position, memory.writer(slots[position], step) if position < len(slots) else None))
    content = memory.content([write for _, write in places], own)
    if content is None:
        return
    unwritten = torch.tensor([write is None for _, write in places])
    yield Hypothesis(
        cause=_cause(scene, places),
        output=torch.where(unwritten[:, None], scene.actual, content),  # what nobody wrote may be anything
        detail=describe_writes(places),
        provenance=lambda: _provenance(scene, 0),
    )


def other_row(scene: Scene) -> Iterator[Hypothesis]:
    """Each row is matched with all that was ever written to this cache; how they came there is the cause."""
    contents = _contents(scene)
    kind = KEY if scene.operation.site == "k_cache" else VALUE
    if kind not in contents.tensors:
        return
    index, distance = contents.nearest(scene.actual, kind)
    is_zero = scene.actual.norm(dim=1) < distance  # nearer to nothing than to any row
    output = torch.where(is_zero[:, None], 0.0, contents.tensors[kind][index])
    found = contents.rows[kind].select(index)
    places = [
        (
            int(scene.positions[at]),
            None if is_zero[at] else _write(found.step[at], found.request[at], found.position[at]),
        )
        for at in range(len(index))
    ]
    yield Hypothesis(
        cause=_cause(scene, places),
        output=output,
        detail=describe_writes(places),
        freedom=1,
        provenance=lambda: _provenance(scene, 0),
    )


def nobodys_row(scene: Scene) -> Iterator[Hypothesis]:
    """What comes back is nothing that any row has: memory as it was found. The last resort, for it always holds."""
    yield Hypothesis(
        cause=f"never written: the slot holds what no recorded row has{_at_boundary(scene)}",
        output=scene.actual,
        freedom=9,
        provenance=lambda: _provenance(scene, 0),
    )


def _at_boundary(scene: Scene) -> str:
    """Say so where only the first positions of blocks are wrong, which is where a slot mapping goes wrong."""
    size = scene.memory.block_size or 1
    at_boundary = size > 1 and bool((scene.positions % size == 0).all()) and bool((scene.positions > 0).all())
    return ", at a block boundary (slot mapping)" if at_boundary else ""


def _write(step: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> Write:
    return Write(step=int(step), row=0, request=int(request), position=int(position))


def _cause(scene: Scene, places: list[tuple[int, Write | None]]) -> str:
    if _is_misplaced(scene):
        return "K and V are written to a wrong slot: the slot mapping does not follow the block table"
    writes = [write for _, write in places if write is not None]
    own = int(scene.rows.request[0])
    if not writes:
        return "the slot was never written"
    if all(write.request != own for write in writes):
        return "the slot holds what another request wrote: shared, freed or given out wrongly"
    shifts = {write.position - position for position, write in places if write is not None}
    if len(shifts) == 1:
        shift = f"the slot holds the token {shifts.pop():+d} positions away: written to a wrong slot"
        return shift + _at_boundary(scene)
    return f"the slot holds another position: written to a wrong slot, or read from one{_at_boundary(scene)}"


def _is_misplaced(scene: Scene) -> bool:
    memory = scene.memory
    places = set(zip(scene.rows.request.tolist(), scene.rows.position.tolist(), strict=True))
    steps = range(int(scene.rows.step.max()) + 1)
    return memory.is_known and any(
        (request, position) in places for step in steps for request, position, _, _ in memory.misplaced(step)
    )


def _contents(scene: Scene) -> Contents:
    return Contents(scene.recording, scene.graph, scene.operation.layer or 0, scene.dtype)


def _provenance(scene: Scene, at: int) -> Provenance:
    return _contents(scene).provenance(
        scene.memory,
        step=int(scene.rows.step[at]),
        request=int(scene.rows.request[at]),
        position=int(scene.positions[at]),
        content=scene.actual[at],
        meant=scene.expected[at],
        head_dim=scene.hf.head_dim,
    )


EXPLANATIONS = (coarser_dtype, played_back, never_written, other_tensor, other_row, nobodys_row)
