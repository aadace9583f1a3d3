"""Rotary embeddings over positions of several axes (M-RoPE): axes, sections and the way over an image gone wrong.

`R` rows, `A` axes, `P` pairs of a head, `T` tokens of a request.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.rotary.positions import places
from harness.judge.explain.rotary.rotation import heads_read
from harness.oracle.images import DecoderInputs, decoder_inputs
from harness.oracle.rotation import Rotation, rotations

_AXES = ("time", "height", "width")


@dataclass(frozen=True, kw_only=True)
class _Rotated:
    """The rotation of rows by the axis that each pair of a head follows."""

    failure: Failure
    rotation: Rotation
    axes: torch.Tensor
    """[P] int64."""
    tables: dict[int, torch.Tensor]
    """[A, T] of each request."""
    kinds: dict[int, torch.Tensor]
    """[T] of each request: not 0 where a token is a part of an image."""

    def turn(self, positions: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate the rows for positions [A, R]."""
        own, x = self.rotation, self.failure.inputs[0].flatten(1)
        phases = positions.to(torch.float32)[self.axes if axes is None else axes].T * own.frequencies
        return own.turned(own.heads(x), *own.table(phases.to(torch.float64)))

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the positions [A, R] of other tokens of the rows' requests; those before the first are its own."""
        pairs = zip(self.failure.rows.request.tolist(), indices.clamp(min=0).tolist(), strict=True)
        return torch.stack([self.tables[request][:, index] for request, index in pairs], dim=1)

    @cached_property
    def own(self) -> torch.Tensor:
        """[A, R]: the right positions."""
        return self.at(self.failure.positions)

    @cached_property
    def in_image(self) -> torch.Tensor:
        """[R] bool."""
        pairs = zip(self.failure.rows.request.tolist(), self.failure.positions.tolist(), strict=True)
        return torch.tensor([bool(self.kinds[request][index]) for request, index in pairs])

    @cached_property
    def starts(self) -> torch.Tensor:
        """[R] int64: index of the first token of each row's image; of text its own."""
        found = []
        for request, index in zip(self.failure.rows.request.tolist(), self.failure.positions.tolist(), strict=True):
            kinds = self.kinds[request].tolist()
            while kinds[index] and index and kinds[index - 1]:
                index -= 1
            found.append(index)
        return torch.tensor(found)


def along_axes(failure: Failure) -> Iterator[Hypothesis]:
    """Rows are rotated for the positions of another axis, of other tokens, or by other frequencies of an axis."""
    found = _rotated(failure)
    if found is None:
        return
    for cause, positions in (*_of_axes(found), *_of_tokens(found)):
        if not torch.equal(positions, found.own):
            yield Hypothesis(cause=cause, output=found.turn(positions))
    sizes = _sizes(found.axes)
    for layout, other in _sections(sizes):
        if not torch.equal(other, found.axes):
            shown = ", ".join(map(str, _sizes(other)))
            cause = f"M-RoPE sections {layout}: {shown} frequencies for {', '.join(_AXES[: len(sizes)])}"
            yield Hypothesis(cause=cause, output=found.turn(found.own, other))


def _rotated(failure: Failure) -> _Rotated | None:
    """Return the model's own rotation over axes; None where it has none, or another operation is between."""
    if not failure.hf.has_images:
        return None
    handed = _handed(failure)
    axes = next((len(each.positions) for each in handed.values() if each and each.positions is not None), 0)
    tables, kinds = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    for request in failure.recording.manifest.requests:
        own, count = handed.get(request.id), torch.arange(len(request.token_ids))
        has_axes = own is not None and own.positions is not None
        tables[request.id] = own.positions.cpu() if own and own.positions is not None else count.expand(axes, -1)
        types = next(iter(own.types.values()), None) if own is not None and has_axes else None
        kinds[request.id] = torch.zeros_like(count) if types is None else types.cpu()
    read = heads_read(failure.inputs[0].flatten(1), failure.expected, failure.hf.head_dim)
    failure = replace(failure, inputs=[read, *failure.inputs[1:]])
    if not axes or read.shape != failure.expected.shape:
        return None
    for own in rotations(failure.hf):
        followed = _followed(own, axes)
        if followed is None or read.shape[1] % own.head_dim:
            continue
        found = _Rotated(failure=failure, rotation=own, axes=followed, tables=tables, kinds=kinds)
        if failure.is_expected(found.turn(found.own)):
            return found
    return None


def _handed(failure: Failure) -> dict[int, DecoderInputs | None]:
    wanted = set(failure.rows.request.tolist())
    requests = [each for each in failure.recording.manifest.requests if each.id in wanted]
    return {each.id: decoder_inputs(failure.hf, each) if each.inputs else None for each in requests}


def _followed(own: Rotation, num_axes: int) -> torch.Tensor | None:
    """[P] int64: the axis that each pair follows, found by HF's own table of one position after the other."""
    num_pairs = len(own.frequencies)
    followed = torch.full((num_pairs,), -1)
    for axis in range(num_axes):
        positions = torch.zeros(num_axes, 1, 1, dtype=torch.int64, device=getattr(own.module, own.name).device)
        positions[axis] = 1
        try:
            _, sin = own.module(torch.zeros(1, 1, device=positions.device), positions)
        except Exception:  # a table that is made of something else than positions
            return None
        if sin.numel() != 2 * num_pairs:
            return None
        pairs = sin.flatten()[::2] if own.is_interleaved and not own.is_regrouped else sin.flatten()[:num_pairs]
        followed[pairs.cpu() != 0] = axis
    return followed if bool((followed >= 0).all()) else None


def _of_axes(found: _Rotated) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield positions whose axes are taken for one another."""
    names = _AXES[: len(found.own)]
    for order in permutations(range(len(names))):
        moved = [at for at, axis in enumerate(order) if at != axis]
        if len(moved) == 2:
            yield f"positions of {names[moved[0]]} and {names[moved[1]]} are swapped", found.own[list(order)]
        elif moved:
            yield (
                f"positions of {', '.join(names[axis] for axis in order)} for {', '.join(names)}",
                found.own[list(order)],
            )


def _of_tokens(found: _Rotated) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield positions that are right elsewhere, or of one axis alone."""
    index, own, image = found.failure.positions, found.own, found.in_image
    first, chunk = found.at(found.starts), places(found.failure)["chunk"]
    counted = index.expand_as(own)
    if bool(image.any()):
        yield "positions have one axis: every token is at its place in the sequence", counted
    else:
        yield "positions do not restart after an image: text goes on at its place in the sequence", counted
    yield "the parts of an image are numbered one after the other", (first + index - found.starts).where(image, own)
    yield "every part of an image is at the position of its first", first.where(image, own)
    yield "positions restart in every step: the chunk's offset is forgotten", found.at(chunk)
    begins_inside = image & (index - chunk > found.starts)
    yield (
        "a chunk that begins inside of an image begins at the image's first position",
        found.at(torch.where(begins_inside, found.starts + chunk, index)),
    )
    for offset in (1, -1):
        yield f"positions are off by one ({offset:+d})", own + offset


def _sizes(axes: torch.Tensor) -> list[int]:
    return [int((axes == axis).sum()) for axis in range(int(axes.max()) + 1)]


def _sections(sizes: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the axis of each pair [P] under every layout of the sections."""
    number = torch.arange(len(sizes))
    for order in sorted(set(permutations(sizes))):
        counts = torch.tensor(order)
        yield "one after the other", number.repeat_interleave(counts)
        in_turn = torch.zeros(sum(sizes), dtype=torch.int64)
        for axis, size in list(enumerate(order))[1:]:  # as Qwen3-VL: what is left is the first axis's
            in_turn[axis : size * len(order) : len(order)] = axis
        yield "in turn", in_turn


EXPLANATIONS: tuple[Callable[[Failure], Any], ...] = (along_axes,)
