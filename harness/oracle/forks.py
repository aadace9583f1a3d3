"""Forks: requests that go on from another one and continue otherwise."""

from harness.formats.recording import RequestInfo
from harness.oracle.golden import Golden
from harness.oracle.requests import Prompt


def forked_prompts(golden: Golden) -> list[Prompt]:
    """Return one prompt for each request of a golden: its first new token, then the runner-up in place of the second.

    The first new token's row is computed by the request and by its fork; then the two differ. A request that makes only
    one token is repeated as it is.
    """
    return [_fork(request, golden) for request in golden.requests]


def _fork(request: RequestInfo, golden: Golden) -> Prompt:
    num_fed = request.prompt_length + 1
    num_new = len(request.token_ids) - request.prompt_length + 1
    if num_new == 1:
        return Prompt(token_ids=tuple(request.token_ids), max_new_tokens=1, inputs=request.inputs)
    tokens = (*request.token_ids[:num_fed], _runner_up(request, num_fed - 1, golden))
    return Prompt(token_ids=tokens, max_new_tokens=max(1, num_new - 2), inputs=request.inputs)


def _runner_up(request: RequestInfo, position: int, golden: Golden) -> int:
    """Return the second best token after a position."""
    tap = golden.graph.logits
    for step in golden.recording.steps:
        if not step.has(tap):
            continue
        rows = step.rows_of(tap)
        are_wanted = (step.request == request.id) & (step.position == position)
        found = (are_wanted if rows is None else are_wanted[rows]).nonzero()[:, 0]
        if len(found):
            return int(step.tap(tap)[found[0]].topk(2).indices[1])
    raise AssertionError("a golden has the logits of every token it continues")
