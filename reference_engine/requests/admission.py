"""Requests that are refused on arrival: those that are malformed, and those that can never fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from operator import index
from typing import Any

from reference_engine.checkpoint.rope_config import RopeConfig
from reference_engine.errors import CapacityError, RequestError
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence
from reference_engine.requests.tokenizer import Tokenizer

__all__ = ["Admission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The limits that every request must keep."""

    vocab_size: int
    max_model_len: int
    """Tokens of prompt and continuation together."""
    num_usable_blocks: int
    block_size: int
    rope: RopeConfig | None = None
    """Decides whether rotary frequencies follow a request's length; None: they do not."""
    adapters: Collection[str] = ()
    """Names of the LoRA adapters."""
    open_tokenizer: Callable[[], Tokenizer] | None = None
    """Reads the checkpoint's tokenizer; None: prompts are token ids alone."""

    def check(self, prompt: str | Iterable[int], params: SamplingParams) -> list[int]:
        """Return the prompt as a list of plain integers.

        Raises:
            RequestError: the prompt is empty, holds what is no token id, or is too long for the model; or there is no
                such adapter.
            CapacityError: the request is larger than the whole pool of blocks.
            ConfigError: the prompt is text or there are stop strings, and the checkpoint has no tokenizer.
        """
        self._check_stops(params)
        if params.adapter is not None and params.adapter not in self.adapters:
            raise RequestError(
                "no such adapter", where="SamplingParams.adapter", expected=f"one of {sorted(self.adapters)}",
                actual=params.adapter,
            )  # fmt: skip
        if isinstance(prompt, str) and self.open_tokenizer is not None:
            prompt = self.open_tokenizer().encode(prompt)
        prompt = self._check_token_ids(prompt, "prompt_token_ids")
        self._check_params(params)
        if not prompt:
            raise RequestError("the prompt is empty", where="prompt_token_ids", expected="at least 1 token", actual=0)
        self._check_length(len(prompt), params.max_new_tokens)
        self._check_blocks(len(prompt), params.max_new_tokens)
        return prompt

    def check_fork(self, parent: Sequence, params: SamplingParams) -> None:
        """Check that a copy of `parent` may go on under `params`.

        Raises:
            RequestError: no token is left to sample, the salt changes, or the request gets too long for the model.
            CapacityError: the request gets larger than the whole pool of blocks.
            ConfigError: there are stop strings, and the checkpoint has no tokenizer.
        """
        self._check_params(params)
        self._check_stops(params)
        num_sampled = len(parent.sampled_token_ids)
        if params.max_new_tokens <= num_sampled:
            raise RequestError(
                "the fork has nothing to sample", where="SamplingParams",
                expected=f"max_new_tokens above the {num_sampled} tokens sampled so far", actual=params.max_new_tokens,
            )  # fmt: skip
        if params.prefix_salt != parent.params.prefix_salt:
            raise RequestError(
                "a fork keeps its past and so its salt and adapter", where="SamplingParams",
                expected=repr(parent.params.prefix_salt), actual=repr(params.prefix_salt),
            )  # fmt: skip
        self._check_length(parent.num_prompt_tokens, params.max_new_tokens)
        self._check_blocks(parent.num_prompt_tokens, params.max_new_tokens)

    def rope_len(self, num_prompt_tokens: int, params: SamplingParams) -> int | None:
        """Return the length that a request's rotary frequencies follow: the last sampled token is never computed."""
        return None if self.rope is None else self.rope.rope_len(num_prompt_tokens + params.max_new_tokens - 1)

    def _check_stops(self, params: SamplingParams) -> None:
        """Refuse stop strings without a tokenizer at once, not when the first token is looked at."""
        if params.stop and self.open_tokenizer is not None:
            self.open_tokenizer()

    def _check_params(self, params: SamplingParams) -> None:
        self._check_token_ids(params.forced_token_ids or (), "forced_token_ids")
        self._check_token_ids(params.stop_token_ids, "stop_token_ids")
        self._check_token_ids(params.logit_bias, "logit_bias")
        if (params.num_logprobs or 0) > self.vocab_size:
            raise RequestError(
                "more log probabilities than tokens", where="SamplingParams.num_logprobs",
                expected=f"at most the vocabulary of {self.vocab_size}", actual=params.num_logprobs,
            )  # fmt: skip

    def _check_token_ids(self, token_ids: Iterable[Any], name: str) -> list[int]:
        try:
            checked = [index(token_id) for token_id in token_ids]
        except TypeError as error:
            raise RequestError(f"a token id is not an integer: {error}", where=name, expected="integers") from error
        for position, token_id in enumerate(checked):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    "a token id is outside the vocabulary",
                    where=f"{name}[{position}]",
                    expected=f"0 <= id < {self.vocab_size}",
                    actual=token_id,
                    hint="Check that the tokenizer belongs to this model.",
                )
        return checked

    def _check_length(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        if num_prompt_tokens + max_new_tokens > self.max_model_len:
            raise RequestError(
                "the request is longer than the model allows",
                where="prompt_token_ids + max_new_tokens",
                expected=f"at most {self.max_model_len} tokens",
                actual=f"{num_prompt_tokens} + {max_new_tokens} = {num_prompt_tokens + max_new_tokens}",
                hint="Shorten the prompt or lower max_new_tokens.",
            )

    def _check_blocks(self, num_prompt_tokens: int, max_new_tokens: int) -> None:
        # The last sampled token is never fed, so it needs no slot.
        num_slots = num_prompt_tokens + max_new_tokens - 1
        num_needed = -(-num_slots // self.block_size)
        if num_needed > self.num_usable_blocks:
            raise CapacityError(
                "the request is larger than the whole KV pool",
                where="prompt_token_ids + max_new_tokens - 1",
                expected=f"at most {self.num_usable_blocks} blocks of {self.block_size} tokens",
                actual=f"{num_slots} tokens = {num_needed} blocks",
                hint="Raise num_blocks, shorten the prompt or lower max_new_tokens.",
            )
