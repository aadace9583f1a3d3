"""The state of one request on its way through the engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from reference_engine.prefix_cache import Prefix
from reference_engine.requests.outputs import FinishReason, RequestOutput, TokenLogprobs
from reference_engine.requests.sampling import SamplingParams

__all__ = ["ScheduledChunk", "Sequence"]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request: its tokens, how many of them are computed, and the blocks that hold their K and V.

    There are no phases: each step computes some of the `num_tokens - num_computed_tokens` remaining tokens, and when
    none remains the step has also sampled the next one.
    """

    request_id: int
    token_ids: list[int]
    """The prompt, then the continuation as it is fed."""
    num_prompt_tokens: int
    params: SamplingParams
    rope_len: int | None = None
    """The length that its rotary frequencies follow (`RopeConfig.rope_len`); None: they follow none."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the cache."""
    block_table: array[int] = field(default_factory=lambda: array("q"))
    """int64: it reads like a list, and its bytes are a row of the batch's block tables."""
    num_writable_tokens: int = 0
    """Tokens that `block_table` holds, or 0 when a fork may share its last block, which must not be written then."""
    num_drafts: int = 0
    """The last of `token_ids` that are guesses, which the next step verifies."""
    prefixes: list[Prefix] = field(default_factory=list)
    """Names of the full blocks' content, as far as they were needed; only with a prefix cache."""
    sampled_token_ids: list[int] = field(default_factory=list)
    """The engine's own choices, forced over or not."""
    finish_reason: FinishReason | None = None
    seed: int = 0
    """The seed of the request's draws; each also depends on how many tokens it has sampled."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each sampled token if they are asked for."""
    text: str | None = None
    """The continuation's text, where stop strings are looked for or the prompt was text."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens known and not yet computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def prefix_salt(self) -> str:
        """The part of a prefix's identity besides its tokens: the salt, the adapter, and what turned the keys."""
        return self.params.prefix_salt if self.rope_len is None else f"{self.params.prefix_salt}\0\0{self.rope_len}"

    @property
    def forced_token_id(self) -> int | None:
        """The token that continues the request in place of the next sampled one."""
        return self.forced(0)

    def forced(self, ahead: int) -> int | None:
        """Return the token that is fed in place of the sampled one after the next `ahead` ones."""
        forced = self.params.forced_token_ids
        index = len(self.sampled_token_ids) + ahead
        return forced[index] if forced is not None and index < len(forced) else None

    def fed(self, ahead: int, sampled_token_id: int) -> int:
        """Return what continues the request after the next `ahead` tokens if the engine chooses this one."""
        forced = self.forced(ahead)
        return sampled_token_id if forced is None else forced

    def append(self, sampled_token_id: int) -> int:
        """Record the engine's choice and return the token that continues the request, the forced one if there is."""
        token_id = self.fed(0, sampled_token_id)
        self.sampled_token_ids.append(sampled_token_id)
        self.token_ids.append(token_id)
        return token_id

    def fork(self, request_id: int, params: SamplingParams, seed: int) -> Sequence:
        """Return a request with the same past and nothing computed."""
        return Sequence(
            request_id=request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            params=params,
            rope_len=self.rope_len,
            prefixes=list(self.prefixes),
            sampled_token_ids=list(self.sampled_token_ids),
            seed=seed,
            logprobs=list(self.logprobs),
        )

    def reset(self) -> None:
        """Forget what was computed: the cache no longer holds it."""
        self.num_computed_tokens = self.num_writable_tokens = 0
        self.block_table = array("q")

    def output(self) -> RequestOutput:
        """Describe the request once it is finished."""
        assert self.finish_reason is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.token_ids[: self.num_prompt_tokens]),
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            sampled_token_ids=tuple(self.sampled_token_ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs),
            text=self.text,
        )


@dataclass(slots=True)
class ScheduledChunk:
    """The positions `start` to `stop - 1` of a sequence, computed in one step.

    Not frozen and not keyword-only, because hundreds are made in each step, and that would cost three times as much.
    """

    sequence: Sequence
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Rows of the step that are this chunk's."""
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether the chunk ends at the last known token, so that the next one is sampled."""
        return self.stop == self.sequence.num_tokens

    @property
    def num_sampled(self) -> int:
        """Rows that a token is chosen from: the last known token's, and those of its drafts."""
        return 1 + self.sequence.num_drafts if self.samples else 0

    @property
    def is_decode(self) -> bool:
        """Whether the chunk is one freshly generated token with its drafts, no piece of a prompt or recomputation."""
        is_one = self.num_tokens == 1 + self.sequence.num_drafts
        return is_one and self.samples and self.start >= self.sequence.num_prompt_tokens
