"""What servers do instead of what was asked: chains with one step ignored, moved, or done otherwise."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

from harness.oracle.sampling import Chain, Over, SamplingSettings

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
class Alternative:
    """Another way to draw, with a name that says what is different."""

    name: str
    chain: Chain
    settings: SamplingSettings


@lru_cache(maxsize=1024)
def alternatives(chain: Chain, settings: SamplingSettings, eos: tuple[int, ...]) -> list[Alternative]:
    """Return what the server may do in the place of a chain: one difference each."""
    found = [
        *_ignored(chain, settings),
        *_otherwise(chain, settings),
        *_moved(chain, settings),
        *_over_others(chain, settings),
        *_not_asked(chain, settings),
    ]
    masked = (*settings.logit_bias, *((token_id, _NEVER) for token_id in eos))
    found.append(_with("end tokens are never drawn", chain, settings, logit_bias=masked))
    return found


def _with(name: str, chain: Chain, settings: SamplingSettings, **changes: Any) -> Alternative:
    return Alternative(name=name, chain=chain, settings=replace(settings, **changes))


def _ignored(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    default = SamplingSettings()
    for name in settings.changed:
        words = f"{name} ignored, or over another request's tokens" if name in _COUNTED else f"{name} ignored"
        yield _with(words, chain, settings, **{name: getattr(default, name)})


def _otherwise(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    """Yield one parameter taken in another sense."""
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
    for (step, parameter), (other, name) in _MISTAKEN_STEPS.items():
        if parameter in settings.changed and step in chain.steps:
            steps = tuple(other if own == step else own for own in chain.steps)
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


def _over_others(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    """Yield penalties that count other tokens."""
    for over in Over:
        if settings.repetition_penalty != 1 and over is not chain.repetition_over:
            own = replace(chain, repetition_over=over)
            yield Alternative(name=f"repetition_penalty over {over}", chain=own, settings=settings)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(settings, name) and over is not chain.presence_over:
                own = replace(chain, presence_over=over)
                yield Alternative(name=f"{name} over {over}", chain=own, settings=settings)


def _not_asked(chain: Chain, settings: SamplingSettings) -> Iterator[Alternative]:
    default = SamplingSettings()
    for name, values in _NOT_ASKED.items():
        for value in values if getattr(settings, name) == getattr(default, name) else ():
            yield _with(f"{name} {value:g}, which was not asked for", chain, settings, **{name: value})
