"""Ways to rotate rows for other positions than their own, and what these positions have in common.

`R` rows, `P` candidate positions.
"""

import torch

from harness.judge.compare.align import is_readback, last_index
from harness.judge.explain.core.drafts import computed_before, given_up, name_of_row
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.rotary.rotation import Causes, turned_by, with_rotation
from harness.oracle.rotation import Rotation

_MAX_POSITIONS = 1 << 15
_MIN_ROWS_OF_REQUEST = 2


@with_rotation
def other_positions(failure: Failure, own: Rotation) -> Causes:
    """Each row is rotated for the position that fits it best; what those positions have in common is the cause."""
    # As far as positions get that run on through the largest step, or one too far.
    highest = int(failure.positions.max()) + 2 + max(len(step.position) for step in failure.recording.steps)
    if highest > _MAX_POSITIONS:
        return
    best = _best_positions(failure, own, highest)
    pairs = sorted(set(zip(failure.positions.tolist(), best.tolist(), strict=True)))
    shown = ", ".join(f"{position} as {fitted}" for position, fitted in pairs[:6])
    named = _named_positions(failure, best)
    yield Hypothesis(
        cause=named or "rotary at wrong positions",
        output=own.turn(failure.inputs[0], best),
        detail=f"positions: {shown}",
        freedom=0 if named else len(best),
        is_cause=named is not None,
        is_vague=not bool(best.any()),  # position 0 for every row is no rotation
    )


def _best_positions(failure: Failure, own: Rotation, highest: int) -> torch.Tensor:
    """[R] int64: the position whose rotation takes each row's input nearest to its output; it may be negative."""
    turned, positions = turned_by(failure, own), torch.arange(-highest, highest)
    phases = own.phases(positions)
    table = torch.polar(torch.ones_like(phases), phases)
    return positions[(turned @ table.conj().T).real.argmax(dim=1)]


def _named_positions(failure: Failure, best: torch.Tensor) -> str | None:
    """Say what the positions that were used have in common."""
    own, of = failure.positions, places(failure)
    offsets = (best - own).unique().tolist()
    if (behind := _behind_given_up(failure, best)) is not None:
        return behind
    if offsets in ([1], [-1]):
        return f"rotary at a position off by one ({offsets[0]:+d})"
    known = {
        "positions restart at 0 in every step: the chunk's offset is forgotten": of["chunk"],
        "positions restart at 1 in every step: the chunk's offset is forgotten": of["chunk"] + 1,
        "rotary at the position of the first row of its step": own - of["chunk"],
        "positions run on through the batch instead of restarting for each request": of["batch"],
        "positions restart at 0 after the prompt": own - of["prompt"],
        "rotary at position 0 for every row": torch.zeros_like(own),
        "the rows of other requests before it in the step are added to the position": own + of["others"],
    }
    for name, positions in known.items():
        if torch.equal(best, positions):
            return name
    if (bounded := _bounded(own, best)) is not None:
        return bounded
    if len(offsets) == 1:
        return f"rotary at a position off by {offsets[0]:+d}"
    return _offsets_by_request(failure, best - own)


def _behind_given_up(failure: Failure, best: torch.Tensor) -> str | None:
    """Say so if every row has the position that it would have if its request had never gone back."""
    ends, first = [], None
    for request, position, step in failure.rows.identities():
        drafts = [item for item in given_up(failure.recording, request) if item.step < step]
        first = first or next(iter(drafts), None)
        ends.append(len(computed_before(failure.recording, request, position, step)) - 1 if drafts else position)
    if first is None or not torch.equal(best, torch.tensor(ends)):
        return None
    name = name_of_row(failure.recording, int(first.rows.position[0]), int(first.rows.step[0]))
    return f"positions go on behind {name}: the request never went back"


def _bounded(own: torch.Tensor, best: torch.Tensor) -> str | None:
    """Say up to where the positions go, if they stay there or begin again; None if they go on.

    Every row after that place is wrong then, so the first wrong one is where it begins.
    """
    first, highest = int(own.min()), int(best.max())
    if first == highest + 1 > 1 and torch.equal(best, own.clamp(max=highest)):
        return f"positions stop at {highest}: rows after it are all rotated for it"
    if first > highest and torch.equal(best, own % first):
        return f"positions begin at 0 again after {first - 1}: they are taken modulo {first}"
    return None


def _offsets_by_request(failure: Failure, offsets: torch.Tensor) -> str | None:
    """Say by how much the positions of each request are off if that is the same in all rows of it."""
    found = {}
    for request in failure.rows.request.unique().tolist():
        own = offsets[failure.rows.request == request]
        if len(own) < _MIN_ROWS_OF_REQUEST or len(own.unique()) > 1:
            return None
        found[request] = int(own[0])
    shown = ", ".join(f"{offset:+d} in request {request}" for request, offset in list(found.items())[:4])
    return f"rotary at positions off by a number that each request has for itself: {shown}"


def places(failure: Failure) -> dict[str, torch.Tensor]:
    """Each row's index among its request's rows of the step, among all rows of it, and its prompt's length.

    Rows of drafts count as those of the request that they are of. A row that the request found in the cache has its own
    position for its index: which step computed it is not known here.
    """
    requests = failure.recording.manifest.requests
    lengths = {request.id: request.prompt_length for request in requests}
    drafts = {request.id: request.draft_of for request in requests if request.draft_of is not None}
    chunk, batch, prompt, others = [], [], [], []
    for request, position, step in failure.rows.identities():
        rows = failure.recording.steps[step]
        original = drafts.get(request, request)
        if bool(((rows.request == request) & (rows.position == position)).any()):
            at = last_index(rows, request, position)
            own = sum(drafts.get(item, item) == original for item in rows.request[:at].tolist())
        else:
            at = own = position
        chunk.append(own)
        batch.append(at)
        prompt.append(lengths[original])
        others.append(at - own)
    places = {"chunk": chunk, "batch": batch, "prompt": prompt, "others": others}
    return {name: torch.tensor(values) for name, values in places.items()}


def positions_of_batch_mate(failure: Failure) -> Causes:
    """Each row is rotated for the position of the row that stands elsewhere in its step."""
    positions = []
    for request, position, index in failure.rows.identities():
        step = failure.recording.steps[index]
        if is_readback(step):
            return
        positions.append(int(step.position[(last_index(step, request, position) - 1) % len(step.position)]))
    output = failure.replay(failure.inputs, torch.tensor(positions))
    if output is not None:
        yield Hypothesis(cause="rotary at the position of the row before it in the batch", output=output)


EXPLANATIONS = (other_positions, positions_of_batch_mate)
