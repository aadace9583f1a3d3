"""The interface of an engine that is timed, profiled or continues prompts: its steps, one at a time, and their events.

This is optional, beside `Engine`: an engine that has it gets a method `open_session`. One without can still continue
prompts all at once, with a method `generate`. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from harness.engines.adapter import Engine, PromptContinuer, engine_errors
from harness.errors import Code, HarnessError
from harness.results.profile import StepShape

if TYPE_CHECKING:
    import torch

_MOST_IDLE_STEPS = 1000
"""Steps in a row without a token, beyond one for each token of all prompts, before an engine is said to be stuck."""
_WATCHED = ("phases", "model", "watching", "weights", "cache_tensors")
"""Attributes that a session needs to be watched."""
PREPARE, SAMPLE, COMMIT = "engine.prepare", "engine.sample", "engine.commit"
"""Names of what an engine does on the host: before its model runs, to choose the tokens, and afterwards."""
ROTARY = "model.rotary_emb"
"""Name of the cosines and sines of the step, where an engine shows them by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsLoad:
    """The kind of a layer's MLP."""

    num_experts: int
    num_chosen: int
    """Experts of one token."""
    intermediate_size: int
    """Of each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that decide what a step costs."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    itemsize: int
    """Bytes of one element of activations; of weights, K and V too unless these say otherwise."""
    weight_itemsize: float | None = None
    """Bytes of one element of a matrix of weights, on average, where it is another."""
    kv_itemsize: float | None = None
    """Bytes of one element of K and V, on average, where it is another."""
    windows: tuple[int | None, ...]
    """Latest tokens that each layer sees; None: all of them."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_norms_behind: bool = False
    """Whether what attention and MLP make is normed before it is added."""
    experts: Mapping[int, ExpertsLoad] = field(default_factory=dict)
    """By layer if it has some."""

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        itemsize = self.kv_itemsize or self.itemsize
        return round(2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize)


class OperationWatcher(Protocol):
    """Is told where one operation of a step ends, which is where the next one begins."""

    def begin_step(self, shape: StepShape) -> None:
        """Say what the step computes; called once in each step, before its model runs."""

    def reached(self, name: str) -> None:
        """Say that everything since the previous call, or since the step's begin, was `name`.

        Names are those of the taps. Operations that an engine computes in one are reached under the first one's name.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One operator that an engine computes without torch."""

    name: str
    """`ggml::MUL_MAT`."""
    flops: int
    """Of matrix products and attention, a multiply-add counting as two."""
    elementwise_flops: int
    """One for each element that a pointwise operator makes."""
    bytes_moved: int
    kv_bytes: int
    """Of these, K and V that are stored."""


@runtime_checkable
class OperatorWatcher(OperationWatcher, Protocol):
    """Is also told the operators of an engine that torch's dispatcher does not see."""

    def computed(self, operator: OperatorCost) -> None:
        """Say that an operator is part of the operation that is reached next."""


class TokenSession(Protocol):
    """An engine that is driven step by step: what `harness bench engine` needs.

    A session may have a method `close`, which gives the engine's memory back.
    """

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Queue a request, to be continued greedily and past every end-of-sequence token; return its number."""

    def step(self) -> Mapping[int, int] | Sequence[int]:
        """Compute one step and return the new token of each request that has got one, by the request's number.

        A session that is only profiled may return the numbers alone; `open_session` shows no more of any.
        """

    def stop(self) -> None:
        """Drop all requests and what is kept for them."""


class Session(TokenSession, Protocol):
    """A session that can be watched: what `harness profile` and `harness gate` need.

    One that is given the same requests again computes the same steps. It may have `notes`, which readers of its profile
    should know, and say by `shows_memory = False` that its memory is none of torch's.
    """

    phases: tuple[str, ...]
    """Phases that its steps can have."""
    model: ModelShape

    def step(self) -> Sequence[int]:
        """Compute one step and return the numbers of the requests that have got a token by it."""

    def watching(self, watcher: OperationWatcher) -> AbstractContextManager[None]:
        """Show the steps of this block to `watcher`; afterwards nothing of it is left in the engine."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters by name."""

    def cache_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that K and V are kept in at this moment."""


@runtime_checkable
class Steppable(Protocol):
    """An engine whose steps can be driven."""

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> TokenSession:
        """Load the engine for steps of up to so many tokens and requests, as far as its own options allow."""


class ClosableTokenSession:
    """A session whose errors are the engine's: neither the profiler's nor the harness's (`open_token_session`)."""

    def __init__(self, engine: str, session: TokenSession) -> None:
        self._engine, self._session = engine, session

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """See `TokenSession.add`."""
        with engine_errors(self._engine):
            return self._session.add(prompt, max_new_tokens)

    def step(self) -> Mapping[int, int] | Sequence[int]:
        """See `TokenSession.step`."""
        with engine_errors(self._engine):
            return self._session.step()

    def stop(self) -> None:
        """See `TokenSession.stop`."""
        with engine_errors(self._engine):
            self._session.stop()

    def close(self) -> None:
        """Give the engine's memory back, where the session can; nothing else may be called afterwards."""
        with engine_errors(self._engine):
            getattr(self._session, "close", lambda: None)()


class ClosableSession(ClosableTokenSession):
    """A `ClosableTokenSession` of a session that can be observed (`open_session`)."""

    def __init__(self, engine: str, session: Session) -> None:
        super().__init__(engine, session)
        self._watched = session
        self.phases, self.model = session.phases, session.model
        self.shows_memory: bool = getattr(session, "shows_memory", True)
        """Whether torch allocates what it uses."""

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for the reader of its profile."""
        return getattr(self._watched, "notes", ())

    def step(self) -> Sequence[int]:
        """See `Session.step`."""
        return list(super().step())

    def watching(self, watcher: OperationWatcher) -> AbstractContextManager[None]:
        """See `Session.watching`."""
        return self._watched.watching(watcher)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Session.weights`."""
        return self._watched.weights()

    def cache_tensors(self) -> Sequence[torch.Tensor]:
        """See `Session.cache_tensors`."""
        return self._watched.cache_tensors()


def open_token_session(engine: Engine, *, max_num_tokens: int, max_num_seqs: int) -> ClosableTokenSession:
    """Open a session that need not be watched; an exception of the engine in it is an error that names the engine.

    Raises:
        HarnessError: ENGINE_HAS_NO_STEPS, or what the engine raises.
    """
    return ClosableTokenSession(engine.name, _opened(engine, max_num_tokens, max_num_seqs))


def open_session(engine: Engine, *, max_num_tokens: int, max_num_seqs: int) -> ClosableSession:
    """Open a session that can be watched; whatever the engine raises in it is an error that names the engine.

    Raises:
        HarnessError: ENGINE_HAS_NO_STEPS, ENGINE_LACKS_METHOD, or what the engine raises.
    """
    session: Any = _opened(engine, max_num_tokens, max_num_seqs)
    missing = [name for name in _WATCHED if not hasattr(session, name)]
    if missing:
        getattr(session, "close", lambda: None)()
        raise HarnessError(
            Code.ENGINE_LACKS_METHOD,
            f"the session of engine {engine.name!r} cannot be watched: it has no {' and no '.join(missing)}",
            where="open_session",
            expected=f"{', '.join(_WATCHED)}, as harness.engines.stepping.Session has them",
            actual=type(session).__name__,
            hint="harness bench engine does without",
        )
    return ClosableSession(engine.name, session)


def _opened(engine: Engine, max_num_tokens: int, max_num_seqs: int) -> TokenSession:
    if not isinstance(engine, Steppable):
        raise HarnessError(
            Code.ENGINE_HAS_NO_STEPS,
            f"engine {engine.name!r} offers no steps to separate prefill from decode by",
            where="--engine",
            expected="a method open_session, as harness.engines.stepping.Steppable has it",
            actual=type(engine).__name__,
            hint="harness profile --engine reference",
        )
    with engine_errors(engine.name):
        return engine.open_session(max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)


NewTokens = Sequence[tuple[int, int]]
"""Index of a prompt, and its next token: of one step, in which each prompt gets one at most, or of all."""


class Continuation:
    """A loaded engine that continues prompts greedily, past every end-of-sequence token."""

    shows_steps: bool
    """Whether `steps` yields once a step; otherwise it yields once."""

    def __init__(self, engine: Engine, *, max_num_tokens: int, max_num_seqs: int) -> None:
        """Load the engine for steps of up to so many tokens and requests, as far as its own options allow.

        Raises:
            HarnessError: ENGINE_LACKS_METHOD, or what the engine raises.
        """
        self._engine, self.shows_steps = engine, isinstance(engine, Steppable)
        if isinstance(engine, Steppable):
            self._session = open_token_session(engine, max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs)
        elif not isinstance(engine, PromptContinuer):
            raise _lacks(engine, "open_session or generate", "cannot continue a prompt")

    def steps(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Iterator[NewTokens]:
        """Yield the new tokens of each step that made some, until every prompt has all of its new tokens.

        Raises:
            HarnessError: ENGINE_LACKS_METHOD, ENGINE_FAILED, or what the engine raises.
        """
        if self.shows_steps:
            yield from self._stepped(prompts, max_new_tokens)
            return
        with engine_errors(self._engine.name):
            continued = self._engine.generate(prompts, max_new_tokens)  # type: ignore[attr-defined]
        yield [(prompt, int(token)) for prompt, tokens in enumerate(continued) for token in tokens]

    def close(self) -> None:
        """Give the engine's memory back, where it can."""
        if self.shows_steps:
            self._session.close()

    def _stepped(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Iterator[NewTokens]:
        lacking = Counter(dict(enumerate(max_new_tokens)))
        most_idle, num_idle = _MOST_IDLE_STEPS + sum(map(len, prompts)), 0
        try:
            numbers = {self._session.add(prompt, max_new_tokens[place]): place for place, prompt in enumerate(prompts)}
            while +lacking:
                tokens = self._step()
                new = [(numbers[request], token) for request, token in tokens.items() if lacking[numbers[request]] > 0]
                lacking.subtract(place for place, _ in new)
                num_idle = 0 if new else num_idle + 1
                if num_idle > most_idle:
                    raise _stuck(self._engine, num_idle, +lacking)
                if new:
                    yield new
        finally:
            self._session.stop()

    def _step(self) -> Mapping[int, int]:
        tokens = self._session.step()
        if not isinstance(tokens, Mapping):
            raise _lacks(self._engine, "a mapping, from each request to its new token", "does not say its tokens")
        return tokens


def _stuck(engine: Engine, num_steps: int, lacking: Counter[int]) -> HarnessError:
    return HarnessError(
        Code.ENGINE_FAILED,
        f"the engine ran {num_steps} steps without a new token",
        where=engine.name,
        expected=f"{lacking.total()} more tokens for {len(lacking)} prompts",
        actual="none",
    )


def _lacks(engine: Engine, expected: str, what: str) -> HarnessError:
    return HarnessError(
        Code.ENGINE_LACKS_METHOD,
        f"engine {engine.name!r} {what}",
        where="step of its session" if isinstance(engine, Steppable) else "--engine",
        expected=expected,
        actual=type(engine).__name__,
        hint="docs/write-an-adapter.md says which method serves which command",
    )
