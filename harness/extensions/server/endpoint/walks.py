"""Along which tokens the truth is forced, and what is asked of it there: the first answer's, for all answers."""

from collections.abc import Sequence, Set

from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.schedules import Sent
from harness.extensions.server.endpoint.truth import Walk
from harness.oracle.requests import Prompt


def walk_of(prompt: Prompt, all_sent: Sequence[Sent], *, eos: Set[int], num_top: int) -> Walk | None:
    """Return the walk of one prompt.

    The first of `all_sent` is of the first run, whose answer the truth goes along; the server gives `num_top` likeliest
    tokens.

    Returns:
        None if the first request failed: there is nothing to go along.
    """
    first = all_sent[0].result
    if not isinstance(first, Completion):
        return None
    ids = (*prompt.token_ids, *first.token_ids)
    wanted: dict[int, set[int]] = {}
    answers = [(sent.prompt, sent.result) for sent in all_sent if isinstance(sent.result, Completion)]
    for sent_prompt, answer in answers:
        _want(wanted, ids, sent_prompt, answer)
    if first.finish_reason == "stop":
        wanted.setdefault(len(ids) - 1, set()).update(eos)
    return Walk(
        token_ids=ids,
        wanted={at: frozenset(own) for at, own in sorted(wanted.items())},
        num_top=1 + num_top,
    )


def _want(wanted: dict[int, set[int]], walk: Sequence[int], prompt: Sequence[int], answer: Completion) -> None:
    """Add the tokens whose probability is asked for, as far as an answer goes along the walk."""
    for at, token_id in enumerate(answer.token_ids):
        position = len(prompt) + at
        own = wanted.setdefault(position - 1, set())
        own.add(token_id)
        if answer.logprobs is not None and at < len(answer.logprobs):
            own.update(answer.logprobs[at])
        if position >= len(walk) or walk[position] != token_id:
            break
    for position, given in enumerate(answer.prompt_logprobs or ()):
        if position:
            wanted.setdefault(position - 1, set()).update(given, [walk[position]])
