"""Bodies of requests. A field that would change the answer and is not served is refused, never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from reference_engine.errors import RequestError
from reference_engine.requests.sampling import SamplingParams

__all__ = ["ChatRequest", "CompletionRequest", "DetokenizeRequest", "StreamOptions", "TokenizeRequest"]

MAX_LOGPROBS = 100
"""Most likeliest tokens that a request may ask for, of each new token."""

MAX_CHOICES = 256
"""Most choices of one answer: prompts, times `n`."""
_MAX_COUNT = 2**31 - 1
"""Largest count and token id: int32."""


def _check_text(value: Any) -> Any:
    """Refuse half of a surrogate pair: JSON can say it, no text has it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise ValueError("it has half of a surrogate pair, or is nested too deeply") from error
    return value


Utf8 = Annotated[str, AfterValidator(_check_text)]
TokenIds = list[Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)]]
TokenId = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
"""As a key of JSON, which is text."""
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[Utf8, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """Whether a last event has the counts of tokens."""


class _Request(BaseModel):
    """Fields that completions and chats share: OpenAI's, and below the line those that vLLM added."""

    model_config = ConfigDict(extra="forbid")

    model: Utf8 | None = None
    n: int = Field(default=1, ge=1, le=16)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(default=1.0, le=1e6)
    top_p: float = 1.0
    user: Utf8 | None = None
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] | None = Field(default=None, max_length=300)

    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = Field(default=1.0, le=1e6)
    return_token_ids: bool = False
    """Whether answers have `prompt_token_ids` and `token_ids`."""
    return_tokens_as_token_ids: bool = False
    """Whether log probabilities name tokens `token_id:123`: two tokens may have the same text."""
    stop_token_ids: TokenIds = Field(default_factory=list, max_length=1000)
    top_k: int = Field(default=0, ge=-1, le=_MAX_COUNT)

    _adapter: str | None = PrivateAttr(default=None)

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter that `model` names; the server says which are there."""
        return self._adapter

    def use_adapter(self, name: str | None) -> None:
        """Compute the answer with an adapter."""
        self._adapter = name

    def sampling_params(self, *, max_new_tokens: int, num_logprobs: int | None, choice: int) -> SamplingParams:
        """Return the engine's parameters for the choice of a number; raises RequestError."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),  # vLLM's -1 stands for all
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=None if self.seed is None else self.seed + choice,
            num_logprobs=num_logprobs,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            adapter=self.adapter,
        )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`."""

    prompt: Utf8 | TokenIds | list[Utf8] | list[TokenIds]
    max_tokens: int = Field(default=16, ge=0, le=_MAX_COUNT)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0: nothing would be computed without echo")
        if self.stream and self.echo:
            raise ValueError("echo is not streamed")
        if isinstance(self.prompt, list) and not all(isinstance(item, int) for item in self.prompt):
            num_choices = self.n * len(self.prompt)
            if num_choices > MAX_CHOICES:
                raise ValueError(f"an answer has at most {MAX_CHOICES} choices, these would be {num_choices}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several.

        Raises:
            RequestError: there is none.
        """
        prompt: Any = self.prompt
        if not prompt:
            raise RequestError("the prompt is empty", where="prompt", expected="text or token ids")
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt


class ChatRequest(_Request):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], AfterValidator(_check_text)] = Field(min_length=1, max_length=10_000)
    tools: Annotated[list[dict[str, Any]], AfterValidator(_check_text)] | None = Field(default=None, max_length=1000)
    """Rendered by the template; calls in an answer are not parsed."""
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_COUNT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_COUNT)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report of each new token; None: no log probabilities."""
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(BaseModel):
    """The body of `POST /tokenize`."""

    model: Utf8 | None = None
    prompt: Utf8


class DetokenizeRequest(BaseModel):
    """The body of `POST /detokenize`."""

    model: Utf8 | None = None
    tokens: TokenIds
