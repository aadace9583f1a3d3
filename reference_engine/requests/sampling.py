"""The sampling parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from reference_engine.errors import RequestError

__all__ = ["SamplingParams"]

_CHOSEN_ON_DEVICE = {
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "logit_bias", "seed", "stop_token_ids", "ignore_eos",
    "cache_salt", "adapter",
}  # fmt: skip
"""Parameters under which a token follows from logits and numbers that are known before the token in front of it is.
Those that end a request are among them: what was computed behind its end is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Choice, length, stopping and forcing of a continuation; greedy unless a temperature is given.

    The logits go through bias, penalties, temperature, top-k, top-p and min-p, in transformers' order.

    Raises:
        RequestError: a value is impossible, or more tokens are forced than generated.
    """

    max_new_tokens: int = 16
    """Tokens to sample. The last one is never fed back, so positions up to prompt + max_new_tokens - 2 are computed."""
    temperature: float = 0.0
    """The divisor of the logits before a token is drawn; 0: the likeliest token, nothing is drawn."""
    top_k: int = 0
    """Draw among this many likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens that have this probability together (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Draw among tokens that have at least this share of the likeliest one's probability (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of all tokens seen so far (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of all tokens of the continuation so far."""
    frequency_penalty: float = 0.0
    """The same, as often as the token came."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens, before the penalties."""
    seed: int | None = None
    """Equal seeds draw equally, whatever else is in the batch; None: a seed of the request's own."""
    num_logprobs: int | None = None
    """Report log probabilities, before any of the above, of each new token and of this many likeliest ones."""
    stop: str | Sequence[str] = ()
    """Strings that end the request when they appear in the text of the continuation."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the request, whatever `ignore_eos` says."""
    forced_token_ids: Sequence[int] | None = None
    """Tokens to feed in place of the engine's own choices, which are still reported as the sampled tokens."""
    ignore_eos: bool | None = None
    """Whether to go on after an end-of-sequence token. Unset, it is true exactly when tokens are forced."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""
    adapter: str | None = None
    """Name of the LoRA adapter that the request is computed with; None: the base model alone."""
    prefix_salt: str = field(init=False)
    """The part of a prefix's identity besides its tokens: the salt, and the adapter."""
    is_plain: bool = field(init=False)
    """Whether the likeliest token of the unchanged logits is all that is asked for."""
    stops_at_eos: bool = field(init=False)
    """Whether an end-of-sequence token ends the request."""
    needs_host: bool = field(init=False)
    """Whether the next token can depend on what the host has to do with the one before it."""

    def __post_init__(self) -> None:
        self._check_integer("max_new_tokens", minimum=1)
        self._check_integer("top_k", minimum=0)
        self._check_integer("seed", minimum=0, optional=True)
        self._check_integer("num_logprobs", minimum=0, optional=True)
        self._check_number("temperature", "a finite number of at least 0", lambda x: x >= 0)
        self._check_number("top_p", "a number above 0, at most 1", lambda x: 0 < x <= 1)
        self._check_number("min_p", "a number of at least 0, at most 1", lambda x: 0 <= x <= 1)
        self._check_number("repetition_penalty", "a finite number above 0", lambda x: x > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_number(name, "a finite number", lambda _: True)
        self._check_bias()
        self._check("cache_salt", isinstance(self.cache_salt, str), "a string")
        self._check("adapter", self.adapter is None or (isinstance(self.adapter, str) and self.adapter != ""), "a name")
        adapter = "" if self.adapter is None else f"\0{self.adapter}"
        object.__setattr__(self, "prefix_salt", self.cache_salt + adapter)
        self._check("ignore_eos", self.ignore_eos in (None, True, False), "True, False or None")
        self._freeze_stops()
        self._freeze_forced()
        is_penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        is_changed = self.temperature != 0 or is_penalised or len(self.logit_bias) > 0
        object.__setattr__(self, "is_plain", not is_changed and self.num_logprobs is None)
        stops_at_eos = self.forced_token_ids is None if self.ignore_eos is None else not self.ignore_eos
        object.__setattr__(self, "stops_at_eos", stops_at_eos)
        others = [item for item in fields(self) if item.init and item.name not in _CHOSEN_ON_DEVICE]
        object.__setattr__(self, "needs_host", any(getattr(self, item.name) != item.default for item in others))

    def _check_bias(self) -> None:
        bias = self.logit_bias
        is_possible = isinstance(bias, Mapping) and all(
            isinstance(token_id, int) and isinstance(value, int | float) and math.isfinite(value)
            for token_id, value in bias.items()
        )
        self._check("logit_bias", is_possible, "finite numbers by token id")

    def _freeze_stops(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        are_strings = isinstance(stop, Sequence) and all(isinstance(text, str) and text for text in stop)
        self._check("stop", are_strings, "a string or a list of strings, none of them empty")
        object.__setattr__(self, "stop", tuple(stop))
        self._check(
            "stop_token_ids", isinstance(self.stop_token_ids, Sequence | set | frozenset), "a list of token ids"
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def _freeze_forced(self) -> None:
        if self.forced_token_ids is not None:
            is_list = isinstance(self.forced_token_ids, Iterable) and not isinstance(self.forced_token_ids, str)
            self._check("forced_token_ids", is_list, "a list of token ids")
            object.__setattr__(self, "forced_token_ids", tuple(self.forced_token_ids))
        num_forced = len(self.forced_token_ids or ())
        if num_forced > self.max_new_tokens:
            raise RequestError(
                "more tokens are forced than generated",
                where="SamplingParams",
                expected=f"at most max_new_tokens = {self.max_new_tokens} forced_token_ids",
                actual=num_forced,
                hint="Raise max_new_tokens or shorten forced_token_ids.",
            )

    def _check_integer(self, name: str, minimum: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        self._check(name, is_integer and value >= minimum, f"an integer of at least {minimum}")

    def _check_number(self, name: str, expected: str, is_possible: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        self._check(name, is_number and is_possible(value), expected)

    def _check(self, name: str, is_possible: bool, expected: str) -> None:
        if not is_possible:
            raise RequestError(
                f"{name} is impossible", where="SamplingParams", expected=expected, actual=repr(getattr(self, name))
            )
