"""Requests: what a golden is made for, and copies of them that come a second time."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.oracle.images import check_inputs
from harness.oracle.model import HFModel


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
