"""The requests of an engine: added, forked, rewound, suspended and resumed, aborted by their callers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import count

from reference_engine.config import EngineConfig
from reference_engine.errors import RequestError
from reference_engine.in_flight import StepInFlight
from reference_engine.observer import Observer
from reference_engine.requests.admission import Admission
from reference_engine.requests.outputs import FinishReason
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence
from reference_engine.scheduler import Scheduler

__all__ = ["Prompt", "RequestControl", "rewind_tokens"]

Prompt = str | Iterable[int]
"""Text, which the checkpoint's tokenizer reads, or token ids."""


class RequestControl:
    """The unfinished requests of an engine, by id. Methods that take an id raise RequestError for an unknown one."""

    config: EngineConfig
    scheduler: Scheduler
    observer: Observer | None
    _admission: Admission

    def __init__(self, *, block_size: int, keeps_states: bool) -> None:
        self._block_size, self._keeps_states = block_size, keeps_states
        self._sequences: dict[int, Sequence] = {}
        self._request_ids = count()
        self._is_closed = False
        self._in_flight: StepInFlight | None = None
        """The step after the last one that was read; it may be dropped at any time."""

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request, text or token ids, and return its id.

        Raises:
            RequestError: the prompt is empty, holds an id outside the vocabulary, or is too long for the model; or the
                engine is closed.
            CapacityError: the request is larger than the whole pool of blocks.
            ConfigError: it is text or has stop strings, and the checkpoint has no tokenizer to read them with.
        """
        params = params or SamplingParams()
        return self._add(self._check(prompt, params), params)

    def fork(self, request_id: int, params: SamplingParams | None = None) -> int:
        """Continue a request a second time from where it is, and return the new request's id.

        The two share the K and V of their past, unless `params` allow a length with other rotary frequencies. Without
        `params` the fork keeps those of the original; where these have no seed, the two draw differently.

        Raises:
            RequestError: the request is unknown or finished; or `params` allow no further token, or change the salt.
            CapacityError: `params` allow more tokens than the whole pool of blocks holds.
            ConfigError: as `add_request`.
        """
        parent = self._find(request_id, "LLMEngine.fork")
        params = params or parent.params
        self._admission.check_fork(parent, params)
        child_id = next(self._request_ids)
        child = parent.fork(child_id, params, self._seed(params, child_id))
        self._follow_length(child)
        if child.rope_len == parent.rope_len:
            self.scheduler.fork(parent, child)
        else:
            self.scheduler.add(child)
        self._sequences[child_id] = child
        return child_id

    def rewind(self, request_id: int, num_tokens: int, params: SamplingParams | None = None) -> None:
        """Forget all but the first `num_tokens` tokens of a request, so that it continues from there.

        The last of these is computed again, so that another token can be chosen after it; with recurrent layers, all
        tokens in its block are. Blocks behind it are freed.

        Raises:
            RequestError: the request is unknown or finished, or has not so many tokens after its prompt; or `params`
                allow no further token, or change the salt.
            CapacityError: `params` allow more tokens than the whole pool of blocks holds.
            ConfigError: as `add_request`.
        """
        where, sequence = "LLMEngine.rewind", self._find(request_id, "LLMEngine.rewind")
        self._in_flight = None
        first, last = sequence.num_prompt_tokens, sequence.num_tokens
        if not first <= num_tokens <= last:
            raise RequestError(
                "a request cannot go back there", where=where, expected=f"{first} to {last} tokens", actual=num_tokens
            )
        if params is not None:
            rewound = sequence.fork(request_id, params, sequence.seed)
            rewind_tokens(rewound, num_tokens, self._block_size, self._keeps_states)
            self._admission.check_fork(rewound, params)
            sequence.params = params
            self._follow_length(sequence)
        rewind_tokens(sequence, num_tokens, self._block_size, self._keeps_states)
        self.scheduler.take_back(sequence)

    def suspend(self, request_id: int) -> None:
        """Take a request out of the schedule and free its blocks; it keeps its tokens, and waits for `resume`."""
        self.scheduler.abort(self._find(request_id, "LLMEngine.suspend"))
        self._in_flight = None

    def resume(self, request_id: int) -> None:
        """Queue a suspended request again: its tokens are computed anew, and it continues where it was."""
        self.scheduler.add(self._find(request_id, "LLMEngine.resume"))

    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks."""
        sequence = self._find(request_id, "LLMEngine.abort")
        del self._sequences[request_id]
        sequence.finish_reason = FinishReason.ABORTED
        self.scheduler.abort(sequence)

    def num_new_tokens(self, request_id: int) -> int:
        """Return how many tokens a request has sampled."""
        return len(self._find(request_id, "LLMEngine.num_new_tokens").sampled_token_ids)

    def _find(self, request_id: int, where: str) -> Sequence:
        if request_id not in self._sequences:
            raise RequestError(
                "no such unfinished request", where=where, expected=f"one of {sorted(self._sequences)}",
                actual=request_id,
            )  # fmt: skip
        return self._sequences[request_id]

    def _check_all(
        self, prompts: list[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[list[int], SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                "prompts and params do not pair", where="LLMEngine.generate", expected=f"{len(prompts)} params",
                actual=len(params),
            )  # fmt: skip
        return [(self._check(*request), request[1]) for request in zip(prompts, params, strict=True)]

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        if self._is_closed:
            raise RequestError("the engine is closed", where="LLMEngine", hint="Open another one.")
        return self._admission.check(prompt, params)

    def _add(self, prompt: list[int], params: SamplingParams) -> int:
        request_id = next(self._request_ids)
        sequence = self._sequences[request_id] = Sequence(
            request_id=request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=params,
            rope_len=self._admission.rope_len(len(prompt), params),
            seed=self._seed(params, request_id),
        )
        self.scheduler.add(sequence)
        return request_id

    def _drop_all(self) -> None:
        """Abort all requests without telling the observer: it may be the one that failed."""
        observer, self.observer, self._in_flight = self.observer, None, None
        for request_id in list(self._sequences):
            self.abort(request_id)
        self.observer = observer

    def _finish(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens)
        self.scheduler.finish(sequence)

    def _seed(self, params: SamplingParams, request_id: int) -> int:
        return (self.config.seed << 32) + request_id if params.seed is None else params.seed

    def _follow_length(self, sequence: Sequence) -> None:
        """Let new parameters decide the rotary frequencies: if these change, all tokens are computed again."""
        rope_len = self._admission.rope_len(sequence.num_prompt_tokens, sequence.params)
        if rope_len != sequence.rope_len:
            sequence.rope_len, sequence.num_computed_tokens, sequence.prefixes = rope_len, 0, []


def rewind_tokens(sequence: Sequence, num_tokens: int, block_size: int, keeps_states: bool = False) -> None:
    """Forget all after the first `num_tokens` tokens; the last of these is computed again.

    With recurrent states, which are kept for the ends of blocks, all tokens in its block are.
    """
    num_sampled = num_tokens - sequence.num_prompt_tokens
    del sequence.token_ids[num_tokens:], sequence.sampled_token_ids[num_sampled:], sequence.logprobs[num_sampled:]
    if num_tokens <= sequence.num_computed_tokens:
        sequence.num_computed_tokens = num_tokens - 1
        if keeps_states:
            sequence.num_computed_tokens -= sequence.num_computed_tokens % block_size
    del sequence.prefixes[sequence.num_computed_tokens // block_size :]
