"""Rotary embeddings over positions of several axes (M-RoPE): axes, sections and the way over an image gone wrong.

`R` rows, `A` axes, `P` pairs of a head, `T` tokens of a request.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.rotary.positions import places
from harness.judge.explain.rotary.rotation import heads_read
from harness.oracle.images import decoder_inputs
from harness.oracle.rotation import Rotation, rotations

_AXES = ("time", "height", "width")


@dataclass(frozen=True, kw_only=True)
class _Rotated:
    """Rows that are rotated by the positions of the axis that each pair of a head follows."""

    failure: Failure
    rotation: Rotation
    axes: torch.Tensor
    """[P] int64."""
    tables: Mapping[int, torch.Tensor]
    """[A, T] of each request: the right positions."""
    firsts: Mapping[int, torch.Tensor]
    """[T] of each request: see `_firsts`."""

    def turn(self, positions: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate the rows for positions [A, R]."""
        own, x = self.rotation, self.failure.inputs[0].flatten(1)
        phases = positions.to(torch.float32)[self.axes if axes is None else axes].T * own.frequencies
        return own.turned(own.heads(x), *own.table(phases.to(torch.float64)))

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the positions [A, R] of other tokens [R] of the rows' requests."""
        return self.of_rows(self.tables, tokens)

    def of_rows(self, tables: Mapping[int, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """[..., R] of a table [..., T] for each request."""
        pairs = zip(self.failure.rows.request.tolist(), tokens.clamp(min=0).tolist(), strict=True)
        return torch.stack([tables[request][..., token] for request, token in pairs], dim=-1)


def along_axes(failure: Failure) -> Iterator[Hypothesis]:
    """Rows are rotated for the positions of another axis, of other tokens, or by other frequencies of an axis."""
    found = _rotated(failure) if failure.hf.has_images else None
    if found is None:
        return
    own = found.at(failure.positions)
    for cause, positions in (*_of_axes(own), *_of_tokens(found, own)):
        if not torch.equal(positions, own):
            yield Hypothesis(cause=cause, output=found.turn(positions))
    for layout, other in _sections(_sizes(found.axes)):
        if not torch.equal(other, found.axes):
            shown = ", ".join(map(str, _sizes(other)))
            cause = f"M-RoPE sections {layout}: {shown} frequencies for {', '.join(_AXES[: len(own)])}"
            yield Hypothesis(cause=cause, output=found.turn(own, other))


def _rotated(failure: Failure) -> _Rotated | None:
    """Return the model's own rotation over axes; None where it has none, or another operation is between."""
    requests = [item for item in failure.recording.manifest.requests if item.id in set(failure.rows.request.tolist())]
    handed = {item.id: decoder_inputs(failure.hf, item) for item in requests if item.inputs is not None}
    tables = {request: item.positions.cpu() for request, item in handed.items() if item.positions is not None}
    read = heads_read(failure.inputs[0].flatten(1), failure.expected, failure.hf.head_dim)
    if not tables or read.shape != failure.expected.shape or read.shape[1] % failure.hf.head_dim:
        return None
    num_axes = len(next(iter(tables.values())))
    kinds = {request: next(iter(item.types.values())).cpu() for request, item in handed.items()}
    firsts = {item.id: _firsts(kinds.get(item.id, torch.zeros(len(item.token_ids)).long())) for item in requests}
    tables |= {item.id: torch.arange(len(item.token_ids)).expand(num_axes, -1) for item in requests if not item.inputs}
    failure = replace(failure, inputs=[read, *failure.inputs[1:]])
    for own in rotations(failure.hf):
        axes = _followed(own, num_axes)
        if axes is not None:
            found = _Rotated(failure=failure, rotation=own, axes=axes, tables=tables, firsts=firsts)
            if failure.is_expected(found.turn(found.at(failure.positions))):
                return found
    return None


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


def _of_axes(own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield positions whose axes are taken for one another."""
    for order in permutations(range(len(own))):
        moved = [_AXES[axis] for at, axis in enumerate(order) if at != axis]
        if len(moved) == 2:
            yield f"positions of {moved[1]} and {moved[0]} are swapped", own[list(order)]
        elif moved:
            yield f"positions of {', '.join(moved)} for {', '.join(_AXES)}", own[list(order)]


def _of_tokens(found: _Rotated, own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield positions that are those of other tokens, or of one axis."""
    index, chunk = found.failure.positions, places(found.failure)["chunk"]
    first = found.of_rows(found.firsts, index)
    image, counted = first >= 0, index.expand_as(own)
    if bool(image.any()):
        yield "positions have one axis: every token is at its place in the sequence", counted
    else:
        yield "positions do not restart after an image: text goes on at its place in the sequence", counted
    yield "the parts of an image are numbered one after the other", (found.at(first) + index - first).where(image, own)
    yield "every part of an image is at the position of its first", found.at(first).where(image, own)
    yield "positions restart in every step: the chunk's offset is forgotten", found.at(chunk)
    begins_inside = image & (index - chunk > first)
    yield (
        "a chunk that begins inside of an image begins at the image's first position",
        found.at(torch.where(begins_inside, first + chunk, index)),
    )
    for offset in (1, -1):
        yield f"positions are off by one ({offset:+d})", own + offset


def _firsts(kinds: torch.Tensor) -> torch.Tensor:
    """[T] int64: the first token of the image that a token is a part of, by the kinds of the tokens; -1 for text."""
    firsts = torch.full_like(kinds, -1)
    for token in kinds.nonzero()[:, 0].tolist():
        firsts[token] = firsts[token - 1] if token and kinds[token - 1] else token
    return firsts


def _sizes(axes: torch.Tensor) -> list[int]:
    return [int((axes == axis).sum()) for axis in range(int(axes.max()) + 1)]


def _sections(sizes: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the axis of each pair [P] under every layout of the sections."""
    number = torch.arange(len(sizes))
    for order in sorted(set(permutations(sizes))):
        yield "one after the other", number.repeat_interleave(torch.tensor(order))
        in_turn = torch.zeros(sum(sizes), dtype=torch.int64)
        for axis, size in list(enumerate(order))[1:]:  # as Qwen3-VL: what is left is the first axis's
            in_turn[axis : size * len(order) : len(order)] = axis
        yield "in turn", in_turn


EXPLANATIONS = (along_axes,)
