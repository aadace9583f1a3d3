"""Ways to get the embedding wrong: the row of another token, or a scaled one."""

from collections.abc import Iterator

import torch

from harness.judge.compare.align import last_index
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_BLOCK_ROWS = 1 << 14
_WAY_OF_UNSCALED = (
    "an engine may scale it after this module: leave the module out of names=; the input of the first layer is then "
    "the embedding"
)


def another_token(failure: Failure) -> Iterator[Hypothesis]:
    """Each row is matched with all rows of the table; what the tokens found have in common is the cause."""
    table = _table(failure)
    if table is None or not bool(failure.actual.isfinite().all()):
        return
    nearest, meant = _nearest(failure.actual, table), _nearest(failure.expected, table)
    own = failure.token_ids
    is_of_positions = _is_of_positions(failure, own, meant) and torch.allclose(table[meant], failure.expected)
    if is_of_positions:
        own = meant
    if torch.equal(nearest, own):  # the right rows, and otherwise wrong
        return
    pairs = ", ".join(f"{at} for {token}" for token, at in list(zip(own.tolist(), nearest.tolist(), strict=True))[:6])
    cause = _of_positions(own, nearest) if is_of_positions else _named(failure, own, nearest)
    yield Hypothesis(cause=cause, output=table[nearest], detail=f"rows of the table: {pairs}")


def _table(failure: Failure) -> torch.Tensor | None:
    """Return the table of an operation that reads tokens, scaled by its module or not; None of any other operation."""
    return None if failure.operation.inputs else failure.weight(failure.operation.tap)


def _nearest(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[R] int64: the row of the table [V, W] that each row [R, W] is nearest to."""
    return torch.cat([torch.cdist(x, part) for part in table.split(_BLOCK_ROWS)], dim=1).argmin(dim=1)


def _is_of_positions(failure: Failure, tokens: torch.Tensor, meant: torch.Tensor) -> bool:
    """Whether the rows that are meant follow the positions, and not the tokens: a table of learned positions."""
    return len((meant - failure.rows.position).unique()) == 1 and not torch.equal(meant, tokens)


def _of_positions(own: torch.Tensor, found: torch.Tensor) -> str:
    difference = (found - own).unique()
    shift = f" ({int(difference):+d})" if len(difference) == 1 else ""
    return f"the embedding is that of another position{shift}"


def _named(failure: Failure, own: torch.Tensor, found: torch.Tensor) -> str:
    tokens = {request.id: request.token_ids for request in failure.recording.manifest.requests}
    places = [(r, p + failure.operation.tokens_ahead) for r, p in failure.rows.places()]
    for shift, name in ((-1, "before"), (1, "after")):
        there = [tokens[r][p + shift] if 0 <= p + shift < len(tokens[r]) else -1 for r, p in places]
        if there == found.tolist():
            return f"the embedding is that of the token {name} it"
    if _rows_before(failure) == found.tolist():
        return "the embedding is that of the token before it in the step"
    difference = (found - own).unique()
    if len(difference) == 1:
        return f"the embedding is that of token id {int(difference):+d}"
    return "the embedding is that of another token"


def _rows_before(failure: Failure) -> list[int]:
    """Return the token of the row before each row in its step; -1 where there is none."""
    tokens = {request.id: request.token_ids for request in failure.recording.manifest.requests}
    before = []
    for request, position, index in failure.rows.identities():
        step = failure.recording.steps[index]
        at = last_index(step, request, position) - 1
        before.append(tokens[int(step.request[at])][int(step.position[at])] if at >= 0 else -1)
    return before


def scaled(failure: Failure) -> Iterator[Hypothesis]:
    """The embedding is scaled by the root of the hidden size, as Gemma does."""
    if _table(failure) is None:
        return
    factor = failure.expected.shape[1] ** 0.5
    for item in (factor, float(torch.tensor(factor, dtype=failure.dtype))):  # as it is, or in the engine's dtype
        yield Hypothesis(cause="the embedding is scaled by the root of the hidden size", output=failure.expected * item)


def not_scaled(failure: Failure) -> Iterator[Hypothesis]:
    """The rows are those of the table, which the model multiplies with a number."""
    table = _table(failure)
    if table is None:
        return
    rows = table[failure.token_ids]
    if rows.shape == failure.expected.shape and not torch.equal(rows, failure.expected):
        yield Hypothesis(cause="the embedding is not scaled", output=rows, detail=_WAY_OF_UNSCALED)


EXPLANATIONS = (not_scaled, scaled, another_token)
