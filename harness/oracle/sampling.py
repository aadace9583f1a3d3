"""The exact distribution of a token that is drawn: logits through penalties, bias, temperature and sets of tokens.

One definition serves a bare function (`harness.properties.ops`) and a server
(`harness.extensions.server.sampler`). The order
of the steps, and the tokens that penalties count, differ from engine to engine: both are data here.

Shapes: V vocab.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch

from harness.errors import Code, HarnessError

__all__ = ["ORDERS", "Chain", "Over", "Past", "SamplingSettings", "parse_order"]


class Over(StrEnum):
    """Tokens that a penalty counts."""

    BOTH = "prompt and answer"
    PROMPT = "the prompt"
    ANSWER = "the answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The parameters of a request; the defaults change nothing."""

    temperature: float = 1.0
    """The divisor of the logits; 0: the likeliest token."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each with what is added to its logit."""
    grammar: tuple[int, ...] = ()
    """The tokens that a grammar allows in this place; empty: all."""

    @property
    def changed(self) -> dict[str, Any]:
        """The parameters that are no defaults."""
        default = SamplingSettings()
        names = self.__dataclass_fields__
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The tokens before the one that is drawn."""

    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()

    def counts(self, over: Over) -> Counter[int]:
        """Return how often each token came."""
        parts = {Over.BOTH: (self.prompt, self.answer), Over.PROMPT: (self.prompt,), Over.ANSWER: (self.answer,)}
        return Counter(token_id for part in parts[over] for token_id in part)


_FIRST = ("grammar", "logit_bias", "repetition", "presence")
ORDERS = {
    "transformers": (*_FIRST, "temperature", "top_k", "top_p", "min_p", "typical_p"),
    "vllm": (*_FIRST, "temperature", "min_p", "top_k", "top_p"),
    "llamacpp": (*_FIRST, "top_k", "typical_p", "top_p", "min_p", "temperature"),
}
"""The steps of known engines by their documentation, the first step first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The way from logits to a distribution."""

    steps: tuple[str, ...] = ORDERS["transformers"]
    """Names of `STEPS`."""
    repetition_over: Over = Over.BOTH
    presence_over: Over = Over.ANSWER
    """Of the penalties of presence and frequency."""

    def probabilities(
        self, logits: torch.Tensor, settings: SamplingSettings, past: Past | None = None, *, slack: float = 0.0
    ) -> torch.Tensor:
        """Return [V] float64: what each token is drawn with.

        Args:
            logits: [V].
            settings: of the request.
            past: the tokens that penalties count.
            slack: what each logit may be off: a token at the edge of a set is then in it.
        """
        state = self._applied(self.steps, logits, settings, past, slack)
        if settings.temperature == 0:
            is_best = (state.scores >= state.scores.max() - 2 * state.slack).double()
            return is_best / is_best.sum()
        return state.scores.softmax(dim=-1)

    def scores(
        self, logits: torch.Tensor, settings: SamplingSettings, past: Past | None, *, until: str
    ) -> torch.Tensor:
        """Return [V] float64: the scores before one of the steps, of which none may have cut a token off."""
        return self._applied(self.steps[: self.steps.index(until)], logits, settings, past, 0.0).scores

    def _applied(
        self, steps: Sequence[str], logits: torch.Tensor, settings: SamplingSettings, past: Past | None, slack: float
    ) -> "_State":
        scores = logits.to(torch.float64)
        state = _State(chain=self, settings=settings, past=past or Past(), logits=scores, scores=scores, slack=slack)
        for step in steps:
            STEPS[step](state)
        return state


@dataclass(slots=True, kw_only=True)
class _State:
    """The scores of one row between two steps."""

    chain: Chain
    settings: SamplingSettings
    past: Past
    logits: torch.Tensor = field(repr=False)
    scores: torch.Tensor = field(repr=False)
    slack: float

    def seen(self, over: Over) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids that came before, and how often each did (float64)."""
        ids, counts = _counted(tuple(self.past.prompt), tuple(self.past.answer), over)
        return ids.to(self.scores.device), counts.to(self.scores.device)

    def keep(self, is_kept: torch.Tensor) -> None:
        """Cut off the other tokens."""
        self.scores = self.scores.masked_fill(~is_kept, -math.inf)


@lru_cache(maxsize=64)  # one row goes through many chains
def _counted(prompt: tuple[int, ...], answer: tuple[int, ...], over: Over) -> tuple[torch.Tensor, torch.Tensor]:
    counts = Past(prompt=prompt, answer=answer).counts(over)
    return torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values()), dtype=torch.float64)


def _grammar(state: _State) -> None:
    if state.settings.grammar:
        is_allowed = torch.zeros_like(state.scores, dtype=torch.bool)
        is_allowed[list(state.settings.grammar)] = True
        if not (state.scores[is_allowed] > -math.inf).any():  # an earlier step left none: as if it had not been
            state.scores = state.logits
        state.keep(is_allowed)


def _logit_bias(state: _State) -> None:
    if state.settings.logit_bias:
        ids, values = zip(*state.settings.logit_bias, strict=True)
        added = torch.tensor(values, dtype=torch.float64, device=state.scores.device)
        state.scores = state.scores.index_add(0, torch.tensor(ids, device=state.scores.device), added)


def _repetition(state: _State, *, divides_all: bool = False) -> None:
    penalty = state.settings.repetition_penalty
    if penalty == 1:
        return
    ids, _ = state.seen(state.chain.repetition_over)
    scores_of_ids = state.scores[ids]
    lowered = (
        scores_of_ids / penalty
        if divides_all
        else torch.where(scores_of_ids > 0, scores_of_ids / penalty, scores_of_ids * penalty)
    )
    state.scores = state.scores.index_copy(0, ids, lowered)
    state.slack *= max(penalty, 1 / penalty)


def _presence(state: _State) -> None:
    """Apply the penalties of presence and frequency (OpenAI's API reference)."""
    settings = state.settings
    if settings.presence_penalty or settings.frequency_penalty:
        ids, counts = state.seen(state.chain.presence_over)
        state.scores = state.scores.index_add(
            0, ids, -(settings.presence_penalty + settings.frequency_penalty * counts)
        )


def _temperature(state: _State) -> None:
    if state.settings.temperature:
        state.scores = state.scores / state.settings.temperature
        state.slack /= state.settings.temperature


def _top_k(state: _State) -> None:
    if state.settings.top_k:
        ordered = state.scores.sort(descending=True).values
        state.keep(_num_above(ordered, state.scores, 2 * state.slack) < state.settings.top_k)


def _top_p(state: _State, *, without_crossing: bool = False) -> None:
    """Keep the fewest likeliest tokens that have this probability together (Holtzman et al. 2020)."""
    if state.settings.top_p != 1:
        p = state.scores.softmax(dim=-1)
        before = _mass_above(state.scores, p, 2 * state.slack)
        is_kept = before + (p if without_crossing else 0) < state.settings.top_p
        state.keep(is_kept | (state.scores == state.scores.max()))


def _min_p(state: _State, *, is_absolute: bool = False) -> None:
    """Keep the tokens that have this share of the likeliest one's probability (Nguyen et al. 2024)."""
    if state.settings.min_p:
        best = state.scores.max()
        level = state.scores.logsumexp(dim=-1) if is_absolute else best
        is_kept = state.scores >= level + math.log(state.settings.min_p) - 2 * state.slack
        state.keep(is_kept | (state.scores == best))


def _typical_p(state: _State) -> None:
    """Keep the tokens whose information is nearest the entropy (Meister et al. 2023)."""
    if state.settings.typical_p != 1:
        logprobs = state.scores.log_softmax(dim=-1)
        p = logprobs.exp()
        entropy = -(p * logprobs.masked_fill(p == 0, 0.0)).sum()
        key = -(-logprobs - entropy).abs()
        state.keep(_mass_above(key, p, 4 * state.slack, tilt=2 * state.slack) < state.settings.typical_p)


def _num_above(ordered: torch.Tensor, key: torch.Tensor, margin: float) -> torch.Tensor:
    """Return [V] int64: how many tokens are above each by more than a margin; `ordered` has the largest key first."""
    return torch.searchsorted(-ordered, -(key + margin))


def _mass_above(key: torch.Tensor, p: torch.Tensor, margin: float, *, tilt: float | None = None) -> torch.Tensor:
    """Return [V] float64: the least probability of all tokens that are above each by more than a margin."""
    ordered, order = key.sort(descending=True)
    mass = torch.nn.functional.pad(p[order].cumsum(dim=-1), (1, 0))
    return mass[_num_above(ordered, key, margin)] * math.exp(-(margin if tilt is None else tilt))


STEPS: dict[str, Callable[[_State], None]] = {
    "grammar": _grammar,
    "logit_bias": _logit_bias,
    "repetition": _repetition,
    "presence": _presence,
    "temperature": _temperature,
    "top_k": _top_k,
    "top_p": _top_p,
    "min_p": _min_p,
    "typical_p": _typical_p,
    # What engines do by mistake.
    "repetition that divides negative logits": lambda state: _repetition(state, divides_all=True),
    "top_p without the token that crosses": lambda state: _top_p(state, without_crossing=True),
    "min_p of the whole": lambda state: _min_p(state, is_absolute=True),
}


def parse_order(text: str) -> tuple[str, ...]:
    """Return the steps that a text names: an engine of `ORDERS`, or steps with commas between them.

    Raises:
        HarnessError: BAD_OPTION.
    """
    steps = ORDERS.get(text) or tuple(word.strip() for word in text.split(","))
    known = ORDERS["transformers"]
    if set(steps) - set(known) or len(set(steps)) < len(steps) or "temperature" not in steps:
        raise HarnessError(
            Code.BAD_OPTION, "this is no order of the steps of a sampler", where="--order",
            expected=f"{', '.join(ORDERS)}, or steps with commas, temperature among them: {','.join(known)}",
            actual=text,
        )  # fmt: skip
    return steps
