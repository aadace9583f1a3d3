"""What a sampler is asked: a few settings with many prompts each, and some requests again with the same seed."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.base.progress import Progress
from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.client import Client
from harness.extensions.server.completion import CHAT, COMPLETIONS, Completion, Dialect, read_answer
from harness.extensions.server.names import TokenNames
from harness.extensions.server.probe import ALL_TOKENS, Probed, probe
from harness.extensions.server.truth import eos_of, plain_ids
from harness.judge.jobs.opened import planned_model
from harness.oracle.model import HFModel
from harness.oracle.sampling import SamplingSettings
from harness.plan import Plan

TOKENS = 10
"""New tokens of a request: each is one draw, from a row of its own."""
_BIAS = 5.0
_PLAIN_TOKENS, _MOTIF_TOKENS, _REPEATS = (6, 14), (3, 6), 2
NOT_ASKED = (
    f"not asked: answers of more than {TOKENS} tokens, prompts of more than {_PLAIN_TOKENS[1]}, other values than "
    "those of the table, which different seeds draw alike, streams, chats, several answers, more than three biases"
)
"""A prompt is a few random tokens, so that what follows is uncertain; for penalties fewer of them, twice, so that
tokens that came are likely to come."""
_MOST_TRIES = 200
_NEUTRAL: dict[str, float] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Sent where the server follows the parameter, since it may have another default."""
_PENALTIES = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
_REPETITION = ("repetition_penalty", "repeat_penalty")
_STEPS = {
    "repetition_penalty": "repetition", "presence_penalty": "presence", "frequency_penalty": "presence",
}  # fmt: skip
"""Steps by their parameter, where the names differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSetting:
    """Parameters that many requests share."""

    name: str
    settings: SamplingSettings
    is_biased: bool = False
    """Whether each request raises two tokens of its prompt by `logit_bias`, and lowers another one."""
    is_bare: bool = False
    """Whether no other parameter than the temperature is sent, so that the server's own defaults show. A penalty of
    repetitions that the probe switches off stays off."""
    schema: Mapping[str, Any] | None = field(default=None, hash=False)
    """JSON schema that the answer must have. Such a setting is judged only where it is named: a server may ignore
    `response_format` in completions without having promised it."""
    is_chat: bool = False
    """Whether the text of a request's prompt is sent as the message of a user."""

    def lacking(self, order: Sequence[str]) -> list[str]:
        """Return the steps that this setting needs and an order does not have."""
        names = [*self.settings.changed, *(["logit_bias"] if self.is_biased else [])]
        names += [] if self.schema is None else ["grammar"]
        return sorted({_STEPS.get(name, name) for name in names} - set(order))


def _of(name: str, **settings: float) -> SamplerSetting:
    return SamplerSetting(name=name, settings=SamplingSettings(**settings))  # type: ignore[arg-type]


SETTINGS = (
    SamplerSetting(name="defaults", settings=SamplingSettings(), is_bare=True),
    _of("colder", temperature=0.3),
    _of("cold", temperature=0.6),
    _of("hot", temperature=1.5),
    _of("top_k", temperature=1.8, top_k=3),
    _of("top_p", temperature=1.6, top_p=0.7),
    _of("min_p", temperature=2.0, min_p=0.1),
    _of("typical_p", temperature=1.3, typical_p=0.6),
    _of("repetition_penalty", temperature=1.2, repetition_penalty=1.5),
    _of("presence_penalty", temperature=1.1, presence_penalty=2.0),
    _of("frequency_penalty", temperature=1.1, frequency_penalty=2.0),
    SamplerSetting(name="logit_bias", settings=SamplingSettings(temperature=1.3), is_biased=True),
    _of("together", temperature=1.4, top_k=12, top_p=0.8, min_p=0.03, repetition_penalty=1.2),
    SamplerSetting(
        name="json_schema",
        settings=SamplingSettings(temperature=1.5, top_k=20),
        schema={"type": "array", "items": {"enum": [*range(1, 100)]}, "minItems": TOKENS},
    ),
)


def chosen_settings(only: Sequence[str]) -> tuple[SamplerSetting, ...]:
    """Return the settings of some names, all if there are none; raises HarnessError (BAD_OPTION)."""
    names = [setting.name for setting in SETTINGS]
    unknown = [name for name in only if name not in names]
    if unknown:
        what, expected = "there is no such setting", ", ".join(names)
        raise HarnessError(Code.BAD_OPTION, what, where="--only", expected=expected, actual=unknown[0])
    default = [setting.name for setting in SETTINGS if setting.schema is None]
    return tuple(setting for setting in SETTINGS if setting.name in (only or default))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest:
    """One request to a sampler."""

    number: int
    setting: SamplerSetting
    settings: SamplingSettings
    """Those of the setting, with the bias on tokens of this prompt."""
    prompt: tuple[int, ...]
    seed: int | None
    """None: the server takes none."""

    @property
    def path(self) -> str:
        """Where the server takes it."""
        return CHAT if self.setting.is_chat else COMPLETIONS

    def messages(self, names: TokenNames) -> list[dict[str, str]]:
        """Return the messages of a chat."""
        return [{"role": "user", "content": names.decode(self.prompt)}]

    def body(self, probed: Probed, names: TokenNames) -> dict[str, Any]:
        """Return the body of the request; raises HarnessError as `Dialect.body`."""
        dialect = replace(probed.dialect, takes_token_ids=self.setting.is_chat or probed.dialect.takes_token_ids)
        body = dialect.body(self.prompt, TOKENS, names) | {"temperature": self.settings.temperature}
        if self.setting.is_chat:
            num_logprobs, _ = body.pop("logprobs", 0), body.pop("prompt")
            body |= {"messages": self.messages(names)}
            body |= {"logprobs": True, "top_logprobs": num_logprobs} if num_logprobs else {}
        if not self.setting.is_bare:
            body |= {name: value for name, value in _NEUTRAL.items() if probed.has(name)}
            body |= {"top_k": -1} if probed.has(ALL_TOKENS) else {}
        if self.setting.schema is not None:
            schema = {"name": self.setting.name, "schema": self.setting.schema}
            body |= {"response_format": {"type": "json_schema", "json_schema": schema}}
        return body | _fields(self.settings, probed.dialect) | ({} if self.seed is None else {"seed": self.seed})


def _fields(settings: SamplingSettings, dialect: Dialect) -> dict[str, Any]:
    fields: dict[str, Any] = dict(settings.changed)
    if settings.logit_bias:
        fields["logit_bias"] = {str(token_id): value for token_id, value in settings.logit_bias}
    if "repetition_penalty" in fields:
        value = fields.pop("repetition_penalty")
        known = [name for name in _REPETITION if name in dict(dialect.options)]
        fields |= dict.fromkeys(known or _REPETITION[:1], value)
    return fields


def draw_requests(
    settings: Sequence[SamplerSetting],
    num_draws: int,
    names: TokenNames,
    ids: Sequence[int],
    probed: Probed,
    *,
    seed: int,
) -> Iterator[DrawRequest]:
    """Yield the requests of all settings in turn, so that each batch mixes settings.

    Of each setting there are at least `num_draws`; prompts are made of `ids`.
    """
    number = 0
    for turn in range(-(-num_draws // TOKENS)):
        for setting in settings:
            draw = random.Random(f"{seed}/{turn}/{setting.name}")
            sampling = setting.settings
            repeats = _REPEATS if _PENALTIES & sampling.changed.keys() else 1
            prompt = _prompt(
                draw, names, ids, repeats, takes_text=not (setting.is_chat or probed.dialect.takes_token_ids)
            )
            if setting.is_biased:
                sampling = replace(sampling, logit_bias=((prompt[1], _BIAS), (prompt[2], _BIAS), (prompt[3], -_BIAS)))
            request_seed = draw.randrange(2**31 - 1) if probed.has("seed") else None
            yield DrawRequest(number=number, setting=setting, settings=sampling, prompt=prompt, seed=request_seed)
            number += 1


def _prompt(
    draw: random.Random, names: TokenNames, ids: Sequence[int], repeats: int, *, takes_text: bool
) -> tuple[int, ...]:
    for _ in range(_MOST_TRIES):
        motif = draw.sample(ids, draw.randint(*(_MOTIF_TOKENS if repeats > 1 else _PLAIN_TOKENS)))
        prompt = tuple(motif * repeats)
        if not takes_text:
            return prompt
        spelled = names.spelled(prompt)
        if spelled is not None:
            return spelled
    raise HarnessError(
        Code.ENDPOINT_CANNOT,
        "the server takes text alone, and random tokens never come back from their text",
        where="prompt",
        hint="serve the model where token ids are taken",
    )


Answers = dict[int, Completion | HarnessError]
"""By the number of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerAnswers:
    """The requests to a sampler, and its answers."""

    client: Client
    hf: HFModel
    probed: Probed
    names: TokenNames
    eos: tuple[int, ...]
    """Tokens that end a text."""
    requests: tuple[DrawRequest, ...]
    answers: Answers
    alone: Answers
    """Some of them again, one after the other; none if the server takes no seeds."""
    again: Answers
    """The same ones at once, in the opposite order."""
    seconds: float
    """Of the server."""


def ask_draws(
    plan: Plan,
    address: Address,
    settings: Sequence[SamplerSetting],
    num_draws: int,
    *,
    seed: int,
    num_again: int = 16,
    progress: Progress,
) -> SamplerAnswers:
    """Load a plan's model, and ask a server for draws of some settings, at least `num_draws` of each.

    Where the server takes seeds, `num_again` requests are sent again.

    Raises:
        HarnessError: as `planned_model`, `probe` and `draw_requests`.
    """
    progress("model", 0, 1)
    hf = planned_model(plan)
    names = TokenNames(plan.checkpoint, vocab_size=hf.vocab_size)
    eos = tuple(sorted(filter(names.has, eos_of(hf))))
    ids = plain_ids(hf, frozenset(eos))
    prompt = (names.spelled(ids[:8]) if names.is_there else None) or ids[:8]

    async def ask() -> SamplerAnswers:
        progress("probe", 0, 1)
        begin = time.perf_counter()
        async with Client(address) as client:
            probed = await probe(client, prompt, names, fallback_model=plan.case.model)
            requests = tuple(draw_requests(settings, num_draws, names, ids, probed, seed=seed))
            sender = _Sender(client, probed, names, lambda num_done: progress("server", num_done, len(requests)))
            answers = await sender.send(requests)
            chosen = [request for request in requests if isinstance(answers[request.number], Completion)]
            chosen = chosen[:num_again] if probed.has("seed") else []
            alone = {request.number: await sender.answer(request) for request in chosen}
            again = await sender.send(chosen[::-1])
        return SamplerAnswers(
            client=client,
            hf=hf,
            probed=probed,
            names=names,
            eos=eos,
            requests=requests,
            answers=answers,
            alone=alone,
            again=again,
            seconds=time.perf_counter() - begin,
        )

    return asyncio.run(ask())


@dataclass(slots=True)
class _Sender:
    """Sends draw requests to a server whose dialect is known."""

    client: Client
    probed: Probed
    names: TokenNames
    on_done: Callable[[int], None]
    """Is called with the number of requests that are done."""
    num_done: int = 0

    async def send(self, requests: Sequence[DrawRequest]) -> Answers:
        """Send requests all at once."""
        answers = await asyncio.gather(*map(self.answer, requests))
        return {request.number: answer for request, answer in zip(requests, answers, strict=True)}

    async def answer(self, request: DrawRequest) -> Completion | HarnessError:
        """Send one request; a failure is an answer, too."""
        try:
            body = await self.client.post(request.path, request.body(self.probed, self.names))
            return read_answer(body, request.prompt, self.names, where=request.path)
        except HarnessError as error:
            return error
        finally:
            self.num_done += 1
            self.on_done(self.num_done)
