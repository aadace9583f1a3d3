"""What one draw says: its place in the exact distribution of its row, and how likely other chains make it.

A draw x of a row with the distribution p becomes a number between 0 and 1: the probability of all tokens before x, in
an order that does not depend on the draw, plus a random share of p(x). These numbers are independent and uniform for a
sound sampler, whatever the rows are (Rosenblatt 1952; randomised for discrete variables by Smith 1985). For every other
chain the ratio of likelihoods is kept, whose mean is 1 under a sound sampler: it is above 1/a with a probability of a
at most (Ville 1939).

Shapes: V vocab, A chains: the one that is claimed, then the alternatives.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch

from harness.oracle.sampling import Chain, Over, Past, SamplingSettings

SHARE = 1e-3
"""Of an alternative's probability that is spread over all tokens: one draw that it cannot give does not end it."""
LEAST = 1e-9
"""Probability that stands for an impossible draw where chains are compared."""
NOISE_MARGIN = 2.0
"""A server's logits may be off by this many times what HF's own are off in the server's dtype."""
RESOLUTION = 5e-6
"""In nats: the room for sums of probabilities in float32 at the edge of a set."""
_SETS = ("top_k", "top_p", "min_p", "typical_p")
_NOT_ASKED: dict[str, tuple[float, ...]] = {
    "temperature": (0.7,), "top_k": (20, 40, 50), "top_p": (0.9, 0.95), "min_p": (0.05,), "repetition_penalty": (1.1,),
}  # fmt: skip
"""Defaults that engines and generation configs are known to have."""
_COUNTED = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Parameters that do nothing here where they count tokens that hardly come here."""
_NEVER = -1e9
_MISTAKEN_STEPS = {
    ("repetition", "repetition_penalty"): (
        "repetition that divides negative logits",
        "repetition_penalty divides negative logits too",
    ),
    ("top_p", "top_p"): ("top_p without the token that crosses", "top_p without the token that crosses"),
    ("min_p", "min_p"): ("min_p of the whole", "min_p as a share of the whole, not of the likeliest token"),
}
"""By step and parameter: the step in its place, and how that is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token that was drawn."""

    request: int
    step: int
    """Number of the new token."""
    settings: SamplingSettings
    past: Past
    token_ids: tuple[int, ...]
    """The token; several where an end of text was drawn that the server does not name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedDraw:
    """What is kept of a draw."""

    request: int
    step: int
    token_id: int
    is_outside: bool
    """Whether no rounding of the logits puts the token into the set that may be drawn."""
    by_rank: tuple[float, ...]
    """[A] Uniform numbers, tokens ordered by their logits."""
    by_past: tuple[float, ...]
    """[A] The same, tokens that came before ordered first: penalties show there."""
    by_id: float
    """The same under the claimed chain, tokens ordered by their ids: samplers that add up probabilities do so."""
    spans: tuple[tuple[float, float], ...]
    """Where the random numbers lie that give this token under the claimed chain, if sums of probabilities are inverted:
    tokens ordered by their logits, and by their ids."""
    ratios: tuple[float, ...]
    """[A] Logarithms of likelihood ratios to the claimed chain."""
    noise: float
    """Total variation between the distributions of the truth and of HF in the server's dtype."""
    flips: float
    """Probability that both draw different tokens with one random number, where sums of probabilities are inverted in
    the order of the ids: at least the total variation, and more where many tokens are likely."""


@dataclass(slots=True)
class Power:
    """What some rows could say of one alternative: moments of the log ratio if it were true."""

    mean: float = 0.0
    variance: float = 0.0
    log_unseen: float = 0.0
    """Logarithm of the probability that it draws no token that the claimed chain cannot draw."""

    @property
    def has_effect(self) -> bool:
        """Whether the alternative changes the distribution at all."""
        return self.mean > 1e-3 or self.log_unseen < -1e-3

    def plus(self, more: "Power") -> "Power":
        """Return the power of both sets of rows."""
        return Power(self.mean + more.mean, self.variance + more.variance, self.log_unseen + more.log_unseen)

    def chance(self, threshold: float) -> float:
        """Return the probability that the draws find it."""
        deviation = math.sqrt(self.variance) or 1e-12
        by_ratio = 0.5 * math.erfc((threshold - self.mean) / (deviation * math.sqrt(2)))
        return max(by_ratio, 1 - math.exp(self.log_unseen))


@dataclass(slots=True, kw_only=True)
class SamplerEvidence:
    """All draws of one setting."""

    chain: Chain
    eos: Sequence[int]
    seed: int
    """Of the random shares."""
    draws: list[JudgedDraw] = field(default_factory=list)
    names: tuple[str, ...] = ()
    """Of the alternatives; known after the first draw."""
    of_values: frozenset[str] = frozenset()
    """Those that read a parameter of the setting otherwise: a server may do so for some of its values alone."""
    _moments: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    """[3, A - 1] float64: the fields of each alternative's `Power`."""

    @property
    def powers(self) -> dict[str, Power]:
        """What the rows could say of each alternative."""
        return {name: Power(*moments) for name, moments in zip(self.names, self._moments.T.tolist(), strict=True)}

    def add(self, draw: Draw, logits: torch.Tensor, control: torch.Tensor) -> None:
        """Add one draw.

        `logits` are the truth's and `control` those of HF in the server's dtype, both [V] float64.
        """
        slack = max(NOISE_MARGIN * float((logits - control).abs().max()), RESOLUTION)
        p = self.chain.probabilities(logits, draw.settings, draw.past)
        p_rounded = self.chain.probabilities(control, draw.settings, draw.past)
        possible = self.chain.probabilities(logits, draw.settings, draw.past, slack=slack)
        shares = random.Random(f"{self.seed}/{draw.request}/{draw.step}")
        token_id = self._token(draw, p, shares)
        rivals = alternatives(self.chain, draw.settings, tuple(self.eos))
        self.names = tuple(alternative.name for alternative in rivals)
        self.of_values = frozenset(alternative.name for alternative in rivals if alternative.is_of_value)
        q_AV = torch.stack(
            [alternative.chain.probabilities(logits, alternative.settings, draw.past) for alternative in rivals]
        )
        q_AV = (1 - SHARE) * q_AV + SHARE * logits.softmax(dim=-1)
        ratios_AV = (q_AV / torch.maximum(p, possible).clamp(min=LEAST)).log()
        self._moments = self._moments + _moments(q_AV, ratios_AV, possible > 0)
        share, all_AV = shares.random(), torch.cat([p[None], q_AV])
        is_larger, is_more_frequent = _tokens_before(logits, draw.past, token_id)
        by_rank, by_past = (
            (all_AV[:, before].sum(dim=-1) + share * all_AV[:, token_id]).tolist()
            for before in (is_larger, is_more_frequent)
        )
        own_p, starts = float(p[token_id]), (float(p[is_larger].sum()), float(p[:token_id].sum()))
        self.draws.append(
            JudgedDraw(
                request=draw.request,
                step=draw.step,
                token_id=token_id,
                is_outside=not bool(possible[token_id] > 0),
                by_rank=tuple(by_rank),
                by_past=tuple(by_past),
                by_id=starts[1] + share * own_p,
                spans=tuple((start, start + own_p) for start in starts),
                ratios=(0.0, *ratios_AV[:, token_id].tolist()),
                noise=0.5 * float((p - p_rounded).abs().sum()),
                flips=_flips(p, p_rounded),
            )
        )

    def _token(self, draw: Draw, p: torch.Tensor, shares: random.Random) -> int:
        """Return the token; of several that it may be, one by their probability."""
        if len(draw.token_ids) == 1:
            return draw.token_ids[0]
        weights = [float(p[token_id]) + LEAST for token_id in draw.token_ids]
        return shares.choices(draw.token_ids, weights)[0]


def _flips(p: torch.Tensor, p_rounded: torch.Tensor) -> float:
    """Return for which share of all random numbers the inverted sums of two distributions [V] differ."""
    ends, rounded_ends = p.cumsum(dim=-1), p_rounded.cumsum(dim=-1)
    same = torch.minimum(ends, rounded_ends) - torch.maximum(ends - p, rounded_ends - p_rounded)
    return max(0.0, 1 - float(same.clamp(min=0).sum()))


def _moments(q_AV: torch.Tensor, ratios_AV: torch.Tensor, possible: torch.Tensor) -> torch.Tensor:
    """Return [3, A - 1]: the fields of `Power` for one row, the first two over tokens that both chains can draw."""
    inside_AV = q_AV * possible
    mean = (inside_AV * ratios_AV).sum(dim=-1)
    variance = ((inside_AV * ratios_AV**2).sum(dim=-1) - mean**2).clamp(min=0)
    unseen = (1 - inside_AV.sum(dim=-1) - SHARE).clamp(0, 1 - 1e-12)
    return torch.stack([mean, variance, (-unseen).log1p()])


def _tokens_before(logits: torch.Tensor, past: Past, token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [V] bool twice: the tokens before one, by their logits; and with tokens that came most often first."""
    ids = torch.arange(len(logits), device=logits.device)
    is_larger = (logits > logits[token_id]) | ((logits == logits[token_id]) & (ids < token_id))
    counts: Mapping[int, int] = past.counts(Over.BOTH)
    number = torch.zeros_like(ids)
    number[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.int64, device=logits.device)
    is_more_frequent = number > number[token_id]
    return is_larger, is_more_frequent | ((number == number[token_id]) & is_larger)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to draw, with a name that says what is different."""

    name: str
    chain: Chain
    settings: SamplingSettings
    is_of_value: bool = True
    """Whether it reads a parameter that was asked for otherwise."""


@lru_cache(maxsize=1024)
def alternatives(chain: Chain, settings: SamplingSettings, eos: tuple[int, ...]) -> list[Alternative]:
    """Return what the server may do in the place of a chain: one difference each."""
    masked = (*settings.logit_bias, *((token_id, _NEVER) for token_id in eos))
    return [
        *_ignored(chain, settings),
        *_misread(chain, settings),
        *_moved(chain, settings),
        *_counting_over(chain, settings),
        *_not_asked(chain, settings),
        replace(_with("end tokens are never drawn", chain, settings, logit_bias=masked), is_of_value=False),
    ]


def _with(name: str, chain: Chain, settings: SamplingSettings, **changes: Any) -> Alternative:
    return Alternative(name=name, chain=chain, settings=replace(settings, **changes))


def _ignored(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    default = SamplingSettings()
    for name in settings.changed:
        words = f"{name} ignored, or over another request's tokens" if name in _COUNTED else f"{name} ignored"
        yield _with(words, chain, settings, **{name: getattr(default, name)})


def _misread(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    """Yield one parameter with another meaning."""
    yield _with("the likeliest token, nothing is drawn", chain, settings, temperature=0.0)
    temperature, top_k = settings.temperature, settings.top_k
    if temperature != 1:
        yield _with("temperature applied twice", chain, settings, temperature=temperature**2)
        yield _with("logits multiplied by the temperature", chain, settings, temperature=1 / temperature)
    if top_k:
        yield _with("top_k one too small", chain, settings, top_k=top_k - 1)
        yield _with("top_k one too large", chain, settings, top_k=top_k + 1)
    presence, frequency = settings.presence_penalty, settings.frequency_penalty
    if presence:
        yield _with(
            "presence_penalty applied each time", chain, settings, presence_penalty=0, frequency_penalty=presence
        )
        yield _with("presence_penalty with the opposite sign", chain, settings, presence_penalty=-presence)
    if frequency:
        yield _with("frequency_penalty applied once", chain, settings, presence_penalty=frequency, frequency_penalty=0)
        yield _with("frequency_penalty with the opposite sign", chain, settings, frequency_penalty=-frequency)
    if settings.logit_bias:
        opposite = tuple((token_id, -value) for token_id, value in settings.logit_bias)
        yield _with("logit_bias with the opposite sign", chain, settings, logit_bias=opposite)
    if settings.repetition_penalty != 1:
        inverse = 1 / settings.repetition_penalty
        yield _with("repetition_penalty the wrong way round", chain, settings, repetition_penalty=inverse)
    for (step, parameter), (mistaken, name) in _MISTAKEN_STEPS.items():
        if parameter in settings.changed and step in chain.steps:
            steps = tuple(mistaken if claimed == step else claimed for claimed in chain.steps)
            yield Alternative(name=name, chain=replace(chain, steps=steps), settings=settings)


def _moved(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    """Yield two steps in the other order, where both do something and their order matters."""
    changed = settings.changed
    steps = [step for step in chain.steps if step == "temperature" or step in changed]
    if {"presence_penalty", "frequency_penalty"} & changed.keys():
        steps = [step for step in chain.steps if step in (*steps, "presence")]
    if settings.repetition_penalty != 1:
        steps = [step for step in chain.steps if step in (*steps, "repetition")]
    for first, second in combinations(steps, 2):
        pair = {first, second}
        if "temperature" in pair and (settings.temperature == 1 or pair & {"grammar", "top_k", "repetition"}):
            continue  # a step that takes no notice of a factor
        if not pair & {*_SETS, "temperature"}:
            continue  # two penalties: their order hardly shows
        rest = [step for step in chain.steps if step != second]
        at = rest.index(first)
        moved = replace(chain, steps=(*rest[:at], second, *rest[at:]))
        yield Alternative(name=f"{second} before {first}", chain=moved, settings=settings)


def _counting_over(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    """Yield penalties that count other tokens."""
    for over in Over:
        if settings.repetition_penalty != 1 and over is not chain.repetition_over:
            counting = replace(chain, repetition_over=over)
            yield Alternative(name=f"repetition_penalty over {over}", chain=counting, settings=settings)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(settings, name) and over is not chain.presence_over:
                counting = replace(chain, presence_over=over)
                yield Alternative(name=f"{name} over {over}", chain=counting, settings=settings)


def _not_asked(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    default = SamplingSettings()
    for name, values in _NOT_ASKED.items():
        for value in values if getattr(settings, name) == getattr(default, name) else ():
            added = _with(f"{name} {value:g}, which was not asked for", chain, settings, **{name: value})
            yield replace(added, is_of_value=False)
