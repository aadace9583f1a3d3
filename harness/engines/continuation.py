"""Prompts continued by any engine that can: step by step where it shows its steps, else all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.engines.adapter import Engine, PromptContinuer, engine_errors
from harness.engines.stepping import Steppable, open_token_session
from harness.errors import Code, HarnessError

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
        """Yield the new tokens of each step that made some, until every prompt has as many as it is to have.

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


_MOST_IDLE_STEPS = 1000
"""Steps in a row without a token, beyond one for each token of all prompts, before an engine is said to be stuck."""


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
