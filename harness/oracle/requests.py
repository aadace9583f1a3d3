"""The requests that a golden is made for: their limits, how many run at once, and requests that are made from others.

A schedule may need a copy of a request, a fork that continues otherwise, or drafts: tokens that a request computes and
then gives up, because it goes back or because they are rejected.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule
from harness.oracle.golden import Golden
from harness.oracle.images import check_inputs
from harness.oracle.model import HFModel
from harness.oracle.untraced import frequencies_follow_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to make a golden for."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    prompt_length: int | None = None
    """Tokens after the first so many are forced, and each chooses a token too; None: all are the prompt's."""
    inputs: str | None = None
    """See `RequestInfo.inputs`."""


def check_prompt(hf: HFModel, prompt: Prompt, index: int) -> None:
    """Refuse a prompt that the model cannot serve."""
    where = f"request {index}"
    if not prompt.token_ids:
        raise HarnessError(Code.EMPTY_PROMPT, "the prompt has no token", where=where, hint="give at least one token")
    if prompt.max_new_tokens < 1:
        raise HarnessError(
            Code.BAD_OPTION, "max_new_tokens must be at least 1", where=where, actual=prompt.max_new_tokens
        )
    outside = [token for token in prompt.token_ids if not 0 <= token < hf.vocab_size]
    if outside:
        raise HarnessError(
            Code.TOKEN_OUTSIDE_VOCABULARY,
            f"token id {outside[0]} is outside the vocabulary",
            where=f"{where}, position {prompt.token_ids.index(outside[0])}",
            expected=f"0 to {hf.vocab_size - 1}",
            actual=outside[0],
        )
    info = RequestInfo(
        id=index, token_ids=list(prompt.token_ids), prompt_length=len(prompt.token_ids), inputs=prompt.inputs
    )
    check_inputs(hf, info)
    length = len(prompt.token_ids) + prompt.max_new_tokens
    if hf.max_positions is not None and length > hf.max_positions:
        raise HarnessError(
            Code.PROMPT_TOO_LONG,
            "prompt and continuation are longer than the model allows",
            where=where,
            expected=f"at most {hf.max_positions} positions",
            actual=f"{len(prompt.token_ids)} prompt tokens + {prompt.max_new_tokens} new = {length}",
            hint="shorten the prompt or lower --max-new-tokens",
        )


def sampled_positions(request: RequestInfo) -> range:
    """Return the positions whose logits choose a token: the last of the prompt, and every one after it."""
    return range(request.prompt_length - 1, len(request.token_ids))


def duplicate_requests(requests: Sequence[RequestInfo]) -> list[RequestInfo]:
    """Return the same requests under ids of their own."""
    first = 1 + max(request.id for request in requests)
    return [request.model_copy(update={"id": first + index}) for index, request in enumerate(requests)]


_ACTIVATION_BYTES = 256 << 20
"""Memory for the widest activations of a batch, in float64."""
_LIVE_VALUES = 8
"""Values of that width that are held at a time."""
_LEAST_TOKENS = 512


def batch_requests(hf: HFModel, requests: Sequence[RequestInfo]) -> list[list[RequestInfo]]:
    """Group requests, in their order, so that the activations of a group fit into memory beside one layer.

    A request with images is alone.
    """
    groups: list[list[RequestInfo]] = []
    longest = 0
    for request in requests:
        longest = max(longest, len(request.token_ids))
        is_alone = bool(groups) and (request.inputs or groups[-1][-1].inputs)
        if groups and not is_alone and longest * (len(groups[-1]) + 1) <= batch_tokens(hf):
            groups[-1].append(request)
        else:
            groups.append([request])
            longest = len(request.token_ids)
    return groups


def batch_tokens(hf: HFModel) -> int:
    """Return how many tokens are run at once: as many as memory is meant for, and 512 at least.

    One, so that every request is run alone, where HF chooses rotary frequencies by the longest request beside it.
    """
    if frequencies_follow_length(hf.config):
        return 1
    widest = max((parameter.shape[0] for parameter in hf.model.parameters() if parameter.dim() == 2), default=1)
    sizes = (getattr(hf.config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner", "hidden_size"))
    width = min(widest, max((size for size in sizes if isinstance(size, int)), default=widest))
    return max(_LEAST_TOKENS, _ACTIVATION_BYTES // (_LIVE_VALUES * 8 * max(1, width)))


def padded(requests: Sequence[RequestInfo]) -> torch.Tensor:
    """Return the tokens of some requests, [requests, tokens], the shorter ones padded after their end."""
    longest = max(len(request.token_ids) for request in requests)
    return torch.tensor([[*request.token_ids, *[0] * (longest - len(request.token_ids))] for request in requests])


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
        matches = (are_wanted if rows is None else are_wanted[rows]).nonzero()[:, 0]
        if len(matches):
            return int(step.tap(tap)[matches[0]].topk(2).indices[1])
    raise AssertionError("a golden has the logits of every token it continues")
