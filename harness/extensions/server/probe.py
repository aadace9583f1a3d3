"""What a server can do: small requests, one for each feature. A feature counts only if the answer shows it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.client import Client, has_status
from harness.extensions.server.completion import (
    COMPLETIONS,
    Completion,
    Dialect,
    choices_of,
    only_choice,
    read_answer,
    unreadable,
    usage_count,
)
from harness.extensions.server.names import TokenNames
from harness.extensions.server.result import Capability
from harness.plan import Plan
from harness.results.check import Finding

_PROMPT_TOKENS = 16
"""Tokens of a prompt that the probe sends, at most."""
_TOKENS = 2
"""New tokens that the probe of a feature asks for."""
_OPTIONS: dict[str, Any] = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "ignore_eos": True,
    "repetition_penalty": 1.0,  # servers have defaults of their own, or take those of generation_config.json
    "repeat_penalty": 1.0,  # llama.cpp's name for it; llama-cpp-python's server penalises unless told not to
}
_PROMPT_LOGPROBS: tuple[tuple[tuple[str, Any], ...], ...] = ((("prompt_logprobs", 1),), (("echo", True),))
_LOGPROBS: tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = (
    (5, ()), (1, ()), (5, (("logprobs", True), ("top_logprobs", 5))),
)  # fmt: skip
"""Likeliest tokens to ask for, and fields that ask for them as chats do (mlx-lm's server has no other form)."""
_CLOSED = (401, 403, 408, 429, 502, 503, 504)
"""Statuses that say nothing of one field: every request is refused, or the server is not ready. mlx-lm's server refuses
token ids alone, with 404."""
NUM_SEVERAL = 2
SEVERAL = f"n of {NUM_SEVERAL}"
"""Several answers to one prompt."""

_PARAMETER_TOKENS = 8
"""New tokens that the probe of a parameter asks for."""
_HOT = (100.0, 2.0)
"""Temperatures at which other tokens than the likeliest are drawn. OpenAI's servers and vLLM's take none above 2."""
_GREEDY = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
"""Each leaves the likeliest token alone, whatever the temperature."""
ALL_TOKENS = "top_k of -1"
"""Whether -1 stands for all tokens; where it is refused, 0 does (mlx-lm)."""
UNSEEDED = "draws without a seed"
_PENALTIES = ("repetition_penalty", "repeat_penalty")
_PENALTY = 100.0
_STOP_LENGTH = 4
"""Characters of a stop string."""

FATAL = (Code.ENDPOINT_UNREACHABLE, Code.ENDPOINT_TIMED_OUT, Code.ENDPOINT_HUNG_UP)
"""Errors that end the probe: the next request would end in the same error."""

Content = tuple[Any, Any]
"""Text and token ids of an answer."""


@dataclass(slots=True)
class Probed:
    """The result of the probe."""

    dialect: Dialect
    server: str = ""
    capabilities: list[Capability] = field(default_factory=list)
    other_models: tuple[str, ...] = ()
    """Names that the server lists and that are not asked for."""

    def has(self, name: str) -> bool:
        """Whether the server has a capability."""
        return any(capability.name == name and capability.is_there for capability in self.capabilities)

    def note(self, name: str, is_there: bool, detail: str = "") -> bool:
        """Record whether the server has a capability, and return it."""
        self.capabilities.append(Capability(name=name, is_there=is_there, detail=detail))
        return is_there

    def ignores(self, name: str, detail: str) -> None:
        """Record that the server takes a field and does not follow it."""
        self.capabilities.append(Capability(name=name, is_there=False, is_ignored=True, detail=detail))

    def about(self, address: Address, plan: Plan) -> dict[str, Any]:
        """Return the fields of `ServerResult`."""
        return {
            "url": address.url,
            "server": self.server,
            "served_model": self.dialect.model,
            "model": plan.case.model,
            "dtype": plan.case.dtype,
        }


def error_text(error: HarnessError) -> str:
    """Return what a server says in place of an answer."""
    return error.what if error.actual is None else f"{error.what}: {error.actual}"


def refusal(error: HarnessError) -> str:
    """Return what a server says in place of an answer; raise the error again if it is one of `FATAL`."""
    if error.code in FATAL:
        raise error
    return error_text(error)


def failure(number: int, error: HarnessError) -> Finding:
    """Return the finding for a request without an answer."""
    return Finding(code=error.code, message=error_text(error), request=number)


async def probe(client: Client, prompt: Sequence[int], names: TokenNames, *, fallback_model: str) -> Probed:
    """Find out what a server can do, with the first tokens of a prompt.

    `fallback_model` is the name to ask for, where the user names none and the server lists none.

    Raises:
        HarnessError: as `Client.post`, where not even a plain completion is answered; ENDPOINT_CANNOT: the answer to
            it cannot be judged.
    """
    probed = await probe_server(client, fallback_model)
    prober = _Prober(client, probed, prompt[:_PROMPT_TOKENS], names)
    await prober.prompts()
    await prober.logprobs()
    for name, value in _OPTIONS.items():
        await prober.option(name, value)
    await prober.prompt_logprobs()
    await prober.streaming()
    await prober.several()
    await prober.tokenizer()
    await parameters(client, probed, prober.prompt, names)
    return probed


async def probe_server(client: Client, fallback_model: str) -> Probed:
    """Ask for the health page and for the models; raises HarnessError as `probe`."""
    served_model = client.address.served_model
    probed = Probed(Dialect(model=served_model or fallback_model))
    for path in ("/health", "/v1/models"):
        try:
            page = await client.get(path)
        except HarnessError as error:
            detail = refusal(error)
            is_there = error.code is Code.ENDPOINT_UNREADABLE and path == "/health"  # vLLM's is an empty page
            probed.note(path, is_there, "" if is_there else detail)
            continue
        if path == "/health":
            probed.note(path, True)
            continue
        data = page.get("data") if isinstance(page, dict) else None
        cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
        if probed.note(path, bool(cards), ", ".join(str(card.get("id")) for card in cards[:3])):
            card = next((card for card in cards if card.get("id") == served_model), cards[0])
            probed.server = str(card.get("owned_by") or "")
            probed.dialect = replace(probed.dialect, model=served_model or str(card.get("id")))
            probed.other_models = tuple(str(item.get("id")) for item in cards if item is not card)
    return probed


@dataclass(frozen=True, slots=True)
class _Prober:
    """Asks one server for one feature after another. Each method records what it finds in `probed`."""

    client: Client
    probed: Probed
    prompt: Sequence[int]
    names: TokenNames

    async def _choice(self, dialect: Dialect) -> tuple[dict[str, Any] | None, str]:
        """Return the choice of a completion; None and the server's words if it refuses the dialect."""
        try:
            body = await self.client.post(COMPLETIONS, dialect.body(self.prompt, _TOKENS, self.names))
            return only_choice(body, where=COMPLETIONS), ""
        except HarnessError as error:
            return None, refusal(error)

    async def prompts(self) -> None:
        """Try token ids; if the server refuses them, or counts other tokens, try text."""
        name, num_sent = "token id prompts", len(self.prompt)
        try:
            count = await self._num_prompt_tokens()
        except HarnessError as error:
            if has_status(error, _CLOSED):
                raise
            self.probed.note(name, False, refusal(error))
        else:
            is_counted = count in (None, num_sent)
            if self.probed.note(name, is_counted, "" if is_counted else f"{count} tokens"):
                return
        self.probed.dialect = replace(self.probed.dialect, takes_token_ids=False)
        count = await self._num_prompt_tokens()
        if count not in (None, num_sent):
            raise HarnessError(
                Code.ENDPOINT_CANNOT,
                "the server makes other tokens of the prompt's text than the model's tokenizer",
                where=COMPLETIONS,
                expected=f"{num_sent} tokens",
                actual=f"{count} tokens",
                hint="give --model the checkpoint that is served",
            )
        self.probed.note("text prompts", True)

    async def _num_prompt_tokens(self) -> int | None:
        """Return the server's count of the prompt's tokens; None if it counts none."""
        body = await self.client.post(COMPLETIONS, self.probed.dialect.body(self.prompt, _TOKENS, self.names))
        only_choice(body, where=COMPLETIONS)
        count = usage_count(body, "prompt_tokens")
        return count if count is not None and count > 0 else None

    async def logprobs(self) -> None:
        """Find the form in which the server gives log probabilities, and how many likeliest tokens it names."""
        detail = ""
        for number, fields in _LOGPROBS:
            dialect = replace(self.probed.dialect, num_logprobs=number, options=fields)
            choice, refused = await self._choice(dialect)
            detail = refused or detail
            if choice is not None and choice.get("logprobs"):
                tops = _tops(choice["logprobs"])
                most = max((len(top) for top in tops if isinstance(top, dict | list)), default=0)
                self.probed.note("logprobs", True, f"of the chosen token and of {most} likeliest ones")
                if most < number:
                    self.probed.ignores("logprobs count", f"{number} asked for, {most} given")
                self.probed.dialect = replace(dialect, num_top=min(most, number))
                return
        self.probed.note("logprobs", False, detail or "not in the answer")

    async def option(self, name: str, value: Any) -> None:
        """Send a field outside of OpenAI's interface, and keep the field if the answer shows its effect."""
        dialect = replace(self.probed.dialect, options=(*self.probed.dialect.options, (name, value)))
        choice, refused = await self._choice(dialect)
        if choice is None:
            self.probed.note(name, False, refused)
            return
        is_shown = True  # of an option of the sampler: the probe of parameters shows whether it is followed
        if name == "return_token_ids":
            is_shown = isinstance(choice.get("token_ids"), list)
        elif name == "return_tokens_as_token_ids":
            is_shown = _names_ids(choice.get("logprobs"))
        if not is_shown:
            self.probed.ignores(name, "the answer is as without it")
            return
        self.probed.dialect = dialect
        if name.startswith("return_"):
            self.probed.note(name, True)

    async def prompt_logprobs(self) -> None:
        """Find the field that asks for log probabilities of the prompt."""
        detail = "there are no log probabilities at all"
        for fields in _PROMPT_LOGPROBS if self.probed.dialect.num_logprobs else ():
            dialect = replace(self.probed.dialect, prompt_logprobs=fields)
            try:
                body = await self.client.post(COMPLETIONS, dialect.body(self.prompt, 1, self.names, with_prompt=True))
                is_echoed = "echo" in dict(fields)
                answer = read_answer(body, self.prompt, self.names, where=COMPLETIONS, is_echoed=is_echoed)
                is_there, detail = any(answer.prompt_logprobs or ()), "not in the answer"
            except HarnessError as error:
                detail = refusal(error)
                is_there = error.code is Code.ENDPOINT_TOKENS  # of another prompt: each request will say so
            if is_there:
                self.probed.note("prompt logprobs", True, f"by {fields[0][0]}")
                self.probed.dialect = dialect
                return
        self.probed.note("prompt logprobs", False, detail)

    async def streaming(self) -> None:
        """Find out whether the server streams to the end."""
        try:
            body = self.probed.dialect.body(self.prompt, _TOKENS, self.names)
            events = await self.client.stream(COMPLETIONS, body)
        except HarnessError as error:
            is_unfinished = error.code is Code.ENDPOINT_HUNG_UP  # transformers serve ends without [DONE]
            self.probed.note("streaming", False, error_text(error) if is_unfinished else refusal(error))
        else:
            self.probed.note("streaming", True, f"{len(events)} events for {_TOKENS} tokens")

    async def several(self) -> None:
        """Find out whether the server gives several answers to one prompt."""
        try:
            body = self.probed.dialect.body(self.prompt, _TOKENS, self.names) | {"n": NUM_SEVERAL}
            choices_of(await self.client.post(COMPLETIONS, body), NUM_SEVERAL)
            self.probed.note(SEVERAL, True)
        except HarnessError as error:
            if error.code is Code.ENDPOINT_TOKENS:
                self.probed.ignores(SEVERAL, error.what)
            else:
                self.probed.note(SEVERAL, False, refusal(error))

    async def tokenizer(self) -> None:
        """Compare the server's tokenizer with the checkpoint's, where the server shows it."""
        text = self.names.text_of(self.prompt) if self.names.is_there else None
        if text is None:
            return
        try:
            tokens = await tokenize(self.client, text)
        except HarnessError as error:
            self.probed.note("/tokenize", False, refusal(error))
            return
        is_same = tokens in (list(self.prompt), list(self.prompt)[1:])  # with or without the begin-of-text token
        self.probed.note("/tokenize", True, "" if is_same else f"other tokens than the checkpoint's: {tokens[:8]}")


async def tokenize(client: Client, text: str) -> list[Any]:
    """Return what the server's tokenizer makes of a text; raises HarnessError as `Client.post`."""
    page = await client.post("/tokenize", {"prompt": text, "content": text})
    tokens = page.get("tokens") if isinstance(page, dict) else None
    if not isinstance(tokens, list):
        raise unreadable("the answer has no tokens", where="/tokenize", actual=page)
    return tokens


def _tops(logprobs: Any) -> list[Any]:
    """Return the likeliest tokens that the server names, for each new token."""
    if isinstance(logprobs, dict) and isinstance(logprobs.get("content"), list):
        return [entry.get("top_logprobs") for entry in logprobs["content"] if isinstance(entry, dict)]
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    return tops if isinstance(tops, list) else []


def _names_ids(logprobs: Any) -> bool:
    if not isinstance(logprobs, dict) or not isinstance(logprobs.get("tokens"), list):
        return False
    return all(isinstance(name, str) and name.startswith("token") for name in logprobs["tokens"])


async def parameters(client: Client, probed: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    """Find out which parameters of sampling and stopping the server follows, by values that change the answer.

    Raises:
        HarnessError: as `Client.post`, where a greedy completion is not answered; ENDPOINT_CANNOT: the answer to it
            cannot be judged.
    """
    asker = _Asker(client, probed, probed.dialect.body(prompt, _PARAMETER_TOKENS, names))
    body = await client.post(COMPLETIONS, asker.body)
    answer = read_answer(body, prompt, names, where=COMPLETIONS)  # or nothing of it can be judged
    plain = _content(body)
    await _stop(asker, plain)
    repeats = len(set(answer.token_ids)) < len(answer.token_ids)
    for name in [name for name in _PENALTIES if name in dict(probed.dialect.options)]:
        await _penalty(asker, name, plain, repeats=repeats)
    await _sampling(asker, plain)


def note_ignore_eos(probed: Probed, answers: Iterable[Completion], eos: frozenset[int]) -> None:
    """Record what the answers show of `ignore_eos`; all requests have it if the server takes it."""
    if "ignore_eos" not in dict(probed.dialect.options):
        return
    answers = list(answers)
    if any(answer.finish_reason == "stop" for answer in answers):
        probed.ignores("ignore_eos", "an answer ends at an end of text")
    elif any(eos.intersection(answer.token_ids[:-1]) for answer in answers):
        probed.note("ignore_eos", True)
    else:
        probed.note("ignore_eos", False, "taken; no answer came to an end of text")


@dataclass(frozen=True, slots=True)
class _Asker:
    """Sends one body again with changed fields."""

    client: Client
    probed: Probed
    body: Mapping[str, Any]

    async def ask(self, name: str, fields: Mapping[str, Any]) -> Content | None:
        """Return the answer's content; record a parameter that the server refuses, and return None."""
        try:
            return _content(await self.client.post(COMPLETIONS, {**self.body, **fields}))
        except HarnessError as error:
            self.probed.note(name, False, refusal(error))
            return None

    def note(self, name: str, is_followed: bool, seen: str) -> None:
        """Record whether the server follows a parameter; `seen` says what shows that it does not."""
        if is_followed:
            self.probed.note(name, True)
        else:
            self.probed.ignores(name, seen)


def _content(body: Any) -> Content:
    choice = only_choice(body, where=COMPLETIONS)
    return choice.get("text"), choice.get("token_ids")


async def _stop(asker: _Asker, plain: Content) -> None:
    text = plain[0]
    if not isinstance(text, str) or len(text) < 2 * _STOP_LENGTH:
        return  # a checkpoint without a tokenizer has no text to stop at
    stop = text[len(text) // 2 :][:_STOP_LENGTH]
    answer = await asker.ask("stop", {"stop": [stop]})
    if answer is not None:
        asker.note("stop", answer != plain, f"the answer goes on after {stop!r}")


async def _penalty(asker: _Asker, name: str, plain: Content, *, repeats: bool) -> None:
    """Probe a penalty. llama-cpp-python counts no token of the prompt: only repeats in the answer show its penalty."""
    answer = await asker.ask(name, {name: _PENALTY})
    if answer is not None and answer == plain and not repeats:
        asker.probed.note(name, False, "taken; the answer repeats no token, so nothing shows it")
    elif answer is not None:
        asker.note(name, answer != plain, f"{_PENALTY:g} changes nothing")


async def _sampling(asker: _Asker, plain: Content) -> None:
    for hot in _HOT:
        drawn = await asker.ask(f"temperature of {hot:g}", {"temperature": hot})
        if drawn is not None:
            break
    else:
        return
    asker.note("temperature", drawn != plain, f"{hot:g} changes nothing")
    if drawn == plain:
        return  # nothing is drawn: no other parameter would show
    for name, value in _GREEDY.items():
        answer = await asker.ask(name, {"temperature": hot, name: value})
        if answer is not None:
            asker.note(name, answer == plain, f"with {value:g} at temperature {hot:g} the answer is not the likeliest")
    if asker.probed.has("top_k") and await asker.ask(ALL_TOKENS, {"temperature": hot, "top_k": -1}) is not None:
        asker.probed.note(ALL_TOKENS, True)
    unseeded = [await asker.ask(UNSEEDED, {"temperature": hot}) for _ in range(2)]
    if None not in unseeded:
        asker.note(UNSEEDED, unseeded[0] != unseeded[1], f"at temperature {hot:g} two requests draw the same")
    await _seed(asker, hot)


async def _seed(asker: _Asker, hot: float) -> None:
    draws = []
    for seed in (1, 1, 2):
        draw = await asker.ask("seed", {"temperature": hot, "seed": seed})
        if draw is None:
            return
        draws.append(draw)
    first, again, with_another_seed = draws
    seen = "other seeds draw the same" if first == again else "one seed draws twice differently"
    asker.note("seed", first == again != with_another_seed, seen)
