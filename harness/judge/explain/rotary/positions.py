"""Rows are rotated for wrong positions: of one axis, or of several (M-RoPE: time, height and width of an image).

`R` rows, `A` axes, `P` pairs of a head (or candidate positions), `T` tokens of a request.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from harness.judge.compare.align import is_readback, last_index
from harness.judge.explain.core.drafts import computed_before, given_up, name_of_row
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.rotary.rotation import Causes, heads_read, turned_by, with_rotation
from harness.oracle.images import decoder_inputs
from harness.oracle.rotation import Rotation, rotations

_MAX_POSITIONS = 1 << 15
_MIN_ROWS_OF_REQUEST = 2
_AXES = ("time", "height", "width")


@with_rotation
def other_positions(wrong: WrongOperation, right: Rotation) -> Causes:
    """Each row is rotated for the position that fits it best; what those positions have in common is the cause."""
    if not wrong.can_be_fitted:
        for cause, positions in known_positions(wrong).items():
            is_right = torch.equal(positions, wrong.positions)
            yield Hypothesis(cause=cause, output=wrong.expected if is_right else right.turn(wrong.inputs[0], positions))
        return
    # As far as positions get that run on through the largest step, or one too far.
    highest = int(wrong.positions.max()) + 2 + max(len(step.position) for step in wrong.recording.steps)
    if highest > _MAX_POSITIONS:
        return
    best = _best_positions(wrong, right, highest)
    pairs = sorted(set(zip(wrong.positions.tolist(), best.tolist(), strict=True)))
    shown = ", ".join(f"{position} as {fitted}" for position, fitted in pairs[:6])
    named = _named_positions(wrong, best)
    yield Hypothesis(
        cause=named or "rotary at wrong positions",
        output=right.turn(wrong.inputs[0], best),
        detail=f"positions: {shown}",
        num_fitted=0 if named else len(best),
        is_cause=named is not None,
        is_vague=not bool(best.any()),  # position 0 for every row is no rotation
    )


def _best_positions(wrong: WrongOperation, right: Rotation, highest: int) -> torch.Tensor:
    """[R] int64: the position whose rotation takes each row's input nearest to its output; it may be negative."""
    turned, positions = turned_by(wrong, right), torch.arange(-highest, highest)
    phases = right.phases(positions)
    table = torch.polar(torch.ones_like(phases), phases)
    return positions[(turned @ table.conj().T).real.argmax(dim=1)]


def _named_positions(wrong: WrongOperation, best: torch.Tensor) -> str | None:
    """Say what the positions that were used have in common."""
    expected = wrong.positions
    if (behind := _behind_given_up(wrong, best)) is not None:
        return behind
    for name, positions in known_positions(wrong).items():
        if torch.equal(best, positions):
            return name
    if (bounded := _bounded(expected, best)) is not None:
        return bounded
    offsets = (best - expected).unique().tolist()
    if len(offsets) == 1:
        return f"rotary at a position off by {offsets[0]:+d}"
    return _offsets_by_request(wrong, best - expected)


def known_positions(wrong: WrongOperation) -> dict[str, torch.Tensor]:
    """Return the positions [R] of every row under the mistakes that engines are known to make."""
    expected, of = wrong.positions, places_in_step(wrong)
    in_decode = (expected >= of["prompt"]).to(expected.dtype)
    steps = "one step" if _is_one_of_several_chunks(wrong) else "every step"
    return {
        "rotary at a position off by one (+1)": expected + 1,
        "rotary at a position off by one (-1)": expected - 1,
        f"positions restart at 0 in {steps}: the chunk's offset is forgotten": of["chunk"],
        f"positions restart at 1 in {steps}: the chunk's offset is forgotten": of["chunk"] + 1,
        "rotary at the position of the first row of its step": expected - of["chunk"],
        "positions run on through the batch instead of restarting for each request": of["batch"],
        "positions restart at 0 after the prompt": expected - of["prompt"],
        "positions restart at 0 in decode": expected - in_decode * of["prompt"],
        "rotary in decode at a position off by one (+1)": expected + in_decode,
        "rotary in decode at a position off by one (-1)": expected - in_decode,
        "rotary at position 0 for every row": torch.zeros_like(expected),
        "the rows of other requests before it in the step are added to the position": expected + of["others"],
        "rotary at the position of the row before it in the batch": of["before"],
    }


def _is_one_of_several_chunks(wrong: WrongOperation) -> bool:
    """Whether a request has chunks of which one is wrong and others are not, the first one aside."""
    chunks, wrong_steps = dict[int, set[int]](), dict[int, set[int]]()
    for index, step in enumerate(wrong.recording.steps):
        for request in [] if is_readback(step) else step.request.unique().tolist():
            positions = step.position[step.request == request]
            if len(positions) > 1 and int(positions.min()) > 0:
                chunks.setdefault(request, set()).add(index)
    for request, _, wrong_step in wrong.rows.identities():
        wrong_steps.setdefault(request, set()).add(wrong_step)
    is_one = all(len(steps) == 1 for steps in wrong_steps.values())
    return is_one and any(chunks.get(request, set()) - steps for request, steps in wrong_steps.items())


def _behind_given_up(wrong: WrongOperation, best: torch.Tensor) -> str | None:
    """Say so if every row has the position that it would have if its request had never gone back."""
    ends, first = [], None
    for request, position, step in wrong.rows.identities():
        drafts = [item for item in given_up(wrong.recording, request) if item.step < step]
        first = first or next(iter(drafts), None)
        ends.append(len(computed_before(wrong.recording, request, position, step)) - 1 if drafts else position)
    if first is None or not torch.equal(best, torch.tensor(ends)):
        return None
    name = name_of_row(wrong.recording, int(first.rows.position[0]), int(first.rows.step[0]))
    return f"positions go on behind {name}: the request never went back"


def _bounded(expected: torch.Tensor, best: torch.Tensor) -> str | None:
    """Say up to where the positions go, if they stay there or begin again; None if they go on.

    Every row after that place is wrong then, so the first wrong one is where it begins.
    """
    first, highest = int(expected.min()), int(best.max())
    if first == highest + 1 > 1 and torch.equal(best, expected.clamp(max=highest)):
        return f"positions stop at {highest}: rows after it are all rotated for it"
    if first > highest and torch.equal(best, expected % first):
        return f"positions begin at 0 again after {first - 1}: they are taken modulo {first}"
    return None


def _offsets_by_request(wrong: WrongOperation, offsets: torch.Tensor) -> str | None:
    """Say by how much the positions of each request are off if that is the same in all rows of it."""
    offset_of = {}
    for request in wrong.rows.request.unique().tolist():
        of_request = offsets[wrong.rows.request == request]
        if len(of_request) < _MIN_ROWS_OF_REQUEST or len(of_request.unique()) > 1:
            return None
        offset_of[request] = int(of_request[0])
    shown = ", ".join(f"{offset:+d} in request {request}" for request, offset in list(offset_of.items())[:4])
    return f"rotary at positions off by a number that each request has for itself: {shown}"


def places_in_step(wrong: WrongOperation) -> dict[str, torch.Tensor]:
    """Each row's index among its request's rows of the step, among all rows of it, its prompt's length, and so on.

    `others` are rows of other requests before it in the step, `before` is the position of the row before it there.

    Rows of drafts count as those of the request that they are of. A row that the request found in the cache has its own
    position for its index: which step computed it is not known here.
    """
    requests = wrong.recording.manifest.requests
    lengths = {request.id: request.prompt_length for request in requests}
    drafts = {request.id: request.draft_of for request in requests if request.draft_of is not None}
    places = []
    for request, position, step in wrong.rows.identities():
        rows = wrong.recording.steps[step]
        original = drafts.get(request, request)
        if bool(((rows.request == request) & (rows.position == position)).any()):
            at = last_index(rows, request, position)
            index = sum(drafts.get(item, item) == original for item in rows.request[:at].tolist())
            before = int(rows.position[at - 1])
        else:
            at = index = before = position
        places.append((index, at, lengths[original], at - index, before))
    names = ("chunk", "batch", "prompt", "others", "before")
    return dict(zip(names, torch.tensor(places, dtype=torch.int64).view(-1, len(names)).unbind(1), strict=True))


@dataclass(frozen=True, kw_only=True)
class _Rotated:
    """Rows that are rotated by the positions of the axis that each pair of a head follows."""

    wrong: WrongOperation
    rotation: Rotation
    axes: torch.Tensor
    """[P] int64."""
    tables: Mapping[int, torch.Tensor]
    """[A, T] of each request: the right positions."""
    firsts: Mapping[int, torch.Tensor]
    """[T] of each request: see `_firsts`."""

    def turn(self, positions: torch.Tensor, axes: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate the rows for positions [A, R]."""
        rotation, x = self.rotation, self.wrong.inputs[0].flatten(1)
        phases = positions.to(torch.float32)[self.axes if axes is None else axes].T * rotation.frequencies
        return rotation.turned(rotation.heads(x), *rotation.table(phases.to(torch.float64)))

    def at(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the positions [A, R] of other tokens [R] of the rows' requests."""
        return self.of_rows(self.tables, tokens)

    def of_rows(self, tables: Mapping[int, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """[..., R] of a table [..., T] for each request."""
        pairs = zip(self.wrong.rows.request.tolist(), tokens.clamp(min=0).tolist(), strict=True)
        return torch.stack([tables[request][..., token] for request, token in pairs], dim=-1)


def along_axes(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Rows are rotated for the positions of another axis, of other tokens, or by other frequencies of an axis.

    Causes: positions of several axes (M-RoPE): *axis* and *axis* are swapped; positions have one axis; do not restart
    after an image; the parts of an image are numbered one after the other, or are all at the position of its first; a
    chunk that begins inside of an image begins at the image's first position; positions restart in every step; are off
    by one (+1); M-RoPE sections in turn, or one after the other: *n, n, n* frequencies.
    """
    rotated = _rotated(wrong) if wrong.hf.has_images else None
    if rotated is None:
        return
    expected = rotated.at(wrong.positions)
    for cause, positions in (*_of_axes(expected), *_of_tokens(rotated, expected)):
        if not torch.equal(positions, expected):
            yield Hypothesis(cause=cause, output=rotated.turn(positions))
    for layout, layout_axes in _sections(_sizes(rotated.axes)):
        if not torch.equal(layout_axes, rotated.axes):
            shown = ", ".join(map(str, _sizes(layout_axes)))
            cause = f"M-RoPE sections {layout}: {shown} frequencies for {', '.join(_AXES[: len(expected)])}"
            yield Hypothesis(cause=cause, output=rotated.turn(expected, layout_axes))


def _rotated(wrong: WrongOperation) -> _Rotated | None:
    """Return the model's own rotation over axes; None where it has none, or another operation is between."""
    requests = [item for item in wrong.recording.manifest.requests if item.id in set(wrong.rows.request.tolist())]
    handed = {item.id: decoder_inputs(wrong.hf, item) for item in requests if item.inputs is not None}
    tables = {request: item.positions.cpu() for request, item in handed.items() if item.positions is not None}
    read = heads_read(wrong.inputs[0].flatten(1), wrong.expected, wrong.head_dim)
    if not tables or read.shape != wrong.expected.shape or read.shape[1] % wrong.head_dim:
        return None
    num_axes = len(next(iter(tables.values())))
    kinds = {request: next(iter(item.types.values())).cpu() for request, item in handed.items()}
    firsts = {item.id: _firsts(kinds.get(item.id, torch.zeros(len(item.token_ids)).long())) for item in requests}
    tables |= {item.id: torch.arange(len(item.token_ids)).expand(num_axes, -1) for item in requests if not item.inputs}
    wrong = replace(wrong, inputs=[read, *wrong.inputs[1:]])
    for rotation in rotations(wrong.hf, wrong.head_dim):
        axes = _followed(rotation, num_axes)
        if axes is not None:
            rotated = _Rotated(wrong=wrong, rotation=rotation, axes=axes, tables=tables, firsts=firsts)
            if wrong.is_expected(rotated.turn(rotated.at(wrong.positions))):
                return rotated
    return None


def _followed(rotation: Rotation, num_axes: int) -> torch.Tensor | None:
    """[P] int64: the axis that each pair follows, found by HF's own table of one position after the other."""
    num_pairs = len(rotation.frequencies)
    followed = torch.full((num_pairs,), -1)
    for axis in range(num_axes):
        positions = torch.zeros(
            num_axes, 1, 1, dtype=torch.int64, device=getattr(rotation.module, rotation.name).device
        )
        positions[axis] = 1
        try:
            _, sin = rotation.module(torch.zeros(1, 1, device=positions.device), positions)
        except Exception:  # a table that is made of something else than positions
            return None
        if sin.numel() != 2 * num_pairs:
            return None
        pairs = (
            sin.flatten()[::2] if rotation.is_interleaved and not rotation.is_regrouped else sin.flatten()[:num_pairs]
        )
        followed[pairs.cpu() != 0] = axis
    return followed if bool((followed >= 0).all()) else None


def _of_axes(expected: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield positions whose axes are taken for one another."""
    for order in permutations(range(len(expected))):
        moved = [_AXES[axis] for at, axis in enumerate(order) if at != axis]
        if len(moved) == 2:
            yield f"positions of {moved[1]} and {moved[0]} are swapped", expected[list(order)]
        elif moved:
            yield f"positions of {', '.join(moved)} for {', '.join(_AXES)}", expected[list(order)]


def _of_tokens(rotated: _Rotated, expected: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield positions that are those of other tokens, or of one axis."""
    index, chunk = rotated.wrong.positions, places_in_step(rotated.wrong)["chunk"]
    first = rotated.of_rows(rotated.firsts, index)
    image, counted = first >= 0, index.expand_as(expected)
    if bool(image.any()):
        yield "positions have one axis: every token is at its place in the sequence", counted
    else:
        yield "positions do not restart after an image: text goes on at its place in the sequence", counted
    yield (
        "the parts of an image are numbered one after the other",
        (rotated.at(first) + index - first).where(image, expected),
    )
    yield "every part of an image is at the position of its first", rotated.at(first).where(image, expected)
    yield "positions restart in every step: the chunk's offset is forgotten", rotated.at(chunk)
    begins_inside = image & (index - chunk > first)
    yield (
        "a chunk that begins inside of an image begins at the image's first position",
        rotated.at(torch.where(begins_inside, first + chunk, index)),
    )
    for offset in (1, -1):
        yield f"positions are off by one ({offset:+d})", expected + offset


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
