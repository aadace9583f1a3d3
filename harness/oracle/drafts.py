"""Drafts: tokens that a request computes and then gives up, because it goes back or because they are rejected."""

from collections.abc import Iterator, Sequence
from random import Random

from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule

NUM_GIVEN_UP = 7
"""Most tokens that a request goes back: no divisor of any usual block size, so that it goes back into a block."""
_MOST_REJECTIONS = 4
"""Steps of one request that reject a draft: each is one more request for the oracle."""


def draft_requests(requests: Sequence[RequestInfo], schedule: Schedule) -> list[RequestInfo]:
    """Return the drafts of some requests under a schedule, by the steps that compute them.

    Each begins with its request's own tokens, up to the position `prompt_length`. There stands a wrong token. None is
    longer than its request, and what a request goes back over is shorter. The same requests have the same drafts.
    """
    # Drafts hold no token that stands for a part of an image.
    known = [item.token_ids[0 if item.inputs is None else item.prompt_length :] for item in requests]
    tokens = sorted({token for ids in known for token in ids})
    first, drafts = 1 + max(request.id for request in requests), list[RequestInfo]()
    for request in requests:
        random = Random(f"{request.id} {request.token_ids} {schedule}")
        length = min(request.prompt_length + NUM_GIVEN_UP, len(request.token_ids) - 1)
        back = [(request.prompt_length, length)] * (length > request.prompt_length)
        places = _rejections(request, schedule.num_drafts, random) if schedule.num_drafts else back
        for begin, end in places:
            drafted = _drafted(request, begin, end, tokens, random)
            drafts.append(
                RequestInfo(
                    id=first + len(drafts),
                    token_ids=[*request.token_ids[:begin], *drafted],
                    prompt_length=begin,
                    inputs=request.inputs,
                    draft_of=request.id,
                )
            )
    return drafts


def _rejections(request: RequestInfo, num_drafts: int, random: Random) -> Iterator[tuple[int, int]]:
    """Yield first position and end of what each step rejects: once after every number of accepted drafts, shuffled."""
    accepted = random.sample(range(num_drafts + 1), min(num_drafts + 1, _MOST_REJECTIONS))
    position, end = request.prompt_length, len(request.token_ids)
    for num_accepted in accepted:
        stop, begin = min(end, position + 1 + num_drafts), position + 1 + num_accepted
        if begin < stop:
            yield begin, stop
        position = min(begin, stop)


def _drafted(request: RequestInfo, begin: int, end: int, tokens: Sequence[int], random: Random) -> list[int]:
    """Return drafts of the positions from `begin` on: a wrong one, then right and wrong ones."""
    drafted = list[int]()
    for position in range(begin, end):
        right = request.token_ids[min(position, len(request.token_ids) - 1)]
        wrong = [token for token in tokens if token != right] or [right - 1 if right else 1]
        is_right = position > begin and random.random() < 0.5
        drafted.append(right if is_right else random.choice(wrong))
    return drafted
