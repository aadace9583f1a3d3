"""What the probe of a server found."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.check.result import Capability
from harness.extensions.server.client import Client
from harness.extensions.server.completion import COMPLETIONS, Completion, Dialect, only_choice, read_answer, unreadable
from harness.extensions.server.names import TokenNames
from harness.results.check import Finding

FATAL = (Code.ENDPOINT_UNREACHABLE, Code.ENDPOINT_TIMED_OUT, Code.ENDPOINT_HUNG_UP)
"""Errors that end the probe: another request would end in them, too."""


@dataclass(slots=True)
class Probed:
    """The result of the probe."""

    dialect: Dialect
    server: str = ""
    capabilities: list[Capability] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Whether a capability was found."""
        return any(found.name == name and found.is_there for found in self.capabilities)

    def note(self, name: str, is_there: bool, detail: str = "") -> bool:
        """Keep what was found of one feature, and return whether it is there."""
        self.capabilities.append(Capability(name=name, is_there=is_there, detail=detail))
        return is_there

    def ignores(self, name: str, detail: str) -> None:
        """Keep that the server takes a field and does not follow it."""
        self.capabilities.append(Capability(name=name, is_there=False, is_ignored=True, detail=detail))


def words(error: HarnessError) -> str:
    """Return what a server says in the place of an answer."""
    return error.what if error.actual is None else f"{error.what}: {error.actual}"


def failure(number: int, error: HarnessError) -> Finding:
    """Return the finding of a request that was not answered."""
    return Finding(code=error.code, message=words(error), request=number)


_PROMPT_TOKENS = 16
"""Tokens of a prompt that a probe sends, at most."""
_TOKENS = 2
"""New tokens that a probe asks for."""
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


async def probe(client: Client, prompt: Sequence[int], names: TokenNames, *, fallback_model: str) -> Probed:
    """Find out what a server can do.

    The first tokens of the prompt are sent. `fallback_model` is the name to ask for, where the server lists none and
    none is given.

    Raises:
        HarnessError: as `Client.post`, where not even a plain completion is answered; ENDPOINT_CANNOT: the answer to
            it cannot be judged.
    """
    prompt = prompt[:_PROMPT_TOKENS]
    found = await probe_server(client, fallback_model)
    await _prompts(client, found, prompt, names)
    await _logprobs(client, found, prompt, names)
    for name, value in _OPTIONS.items():
        await _option(client, found, prompt, names, name, value)
    await _prompt_logprobs(client, found, prompt, names)
    await _streaming(client, found, prompt, names)
    await _tokenizer(client, found, prompt, names)
    await parameters(client, found, prompt, names)
    return found


async def probe_server(client: Client, fallback_model: str) -> Probed:
    """Ask for the health page, and for the models; raises HarnessError as `probe`."""
    found = Probed(Dialect(model=client.address.served_model or fallback_model))
    for path in ("/health", "/v1/models"):
        try:
            page = await client.get(path)
        except HarnessError as error:
            if error.code in FATAL:
                raise
            is_there = error.code is Code.ENDPOINT_UNREADABLE and path == "/health"  # vLLM's is an empty page
            found.note(path, is_there, "" if is_there else words(error))
            continue
        if path == "/health":
            found.note(path, True)
            continue
        cards = _cards(page)
        found.note(path, bool(cards), ", ".join(str(card.get("id")) for card in cards[:3]))
        if cards:
            card = next((card for card in cards if card.get("id") == client.address.served_model), cards[0])
            found.server = str(card.get("owned_by") or "")
            name = client.address.served_model or str(card.get("id"))
            found.dialect = replace(found.dialect, model=name)
    return found


def _cards(page: Any) -> list[Mapping[str, Any]]:
    data = page.get("data") if isinstance(page, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


async def _prompts(client: Client, found: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    """Try token ids; if they are refused, or counted as something else, try text."""
    name = "token id prompts"
    try:
        body = await client.post(COMPLETIONS, found.dialect.body(prompt, _TOKENS, names))
        only_choice(body, where=COMPLETIONS)
    except HarnessError as error:
        if error.code in FATAL or _is_closed(error):
            raise
        found.note(name, False, words(error))
    else:
        count = _prompt_tokens(body)
        if found.note(name, count in (None, len(prompt)), "" if count in (None, len(prompt)) else f"{count} tokens"):
            return
    found.dialect = replace(found.dialect, takes_token_ids=False)
    body = await client.post(COMPLETIONS, found.dialect.body(prompt, _TOKENS, names))
    only_choice(body, where=COMPLETIONS)
    count = _prompt_tokens(body)
    if count not in (None, len(prompt)):
        raise HarnessError(
            Code.ENDPOINT_CANNOT,
            "the server makes other tokens of the prompt's text than the model's tokenizer",
            where=COMPLETIONS,
            expected=f"{len(prompt)} tokens",
            actual=f"{count} tokens",
            hint="give --model the checkpoint that is served",
        )
    found.note("text prompts", True)


def _is_closed(error: HarnessError) -> bool:
    """Whether the server refuses every client: what is refused for another reason may be granted in another form.

    A page that is not there is asked for once more: mlx-lm's server says so of token ids.
    """
    return error.code is Code.ENDPOINT_REFUSED and any(f"status {code}" in error.what for code in (401, 403, 429))


def _prompt_tokens(body: Any) -> int | None:
    usage = body.get("usage") if isinstance(body, dict) else None
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and count > 0 else None


async def _logprobs(client: Client, found: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    detail = ""
    for number, fields in _LOGPROBS:
        dialect = replace(found.dialect, num_logprobs=number, options=fields)
        try:
            body = await client.post(COMPLETIONS, dialect.body(prompt, _TOKENS, names))
            given = only_choice(body, where=COMPLETIONS).get("logprobs")
        except HarnessError as error:
            if error.code in FATAL:
                raise
            detail = words(error)
            continue
        if given:
            most = max((len(top) for top in _tops(given) if isinstance(top, dict | list)), default=0)
            found.note("logprobs", True, f"of the chosen token and of {most} likeliest ones")
            if most < number:
                found.ignores("logprobs count", f"{number} asked for, {most} given")
            found.dialect = replace(dialect, num_top=min(most, number))
            return
    found.note("logprobs", False, detail or "not in the answer")


def _tops(given: Any) -> list[Any]:
    if isinstance(given, dict) and isinstance(given.get("content"), list):
        return [entry.get("top_logprobs") for entry in given["content"] if isinstance(entry, dict)]
    tops = given.get("top_logprobs") if isinstance(given, dict) else None
    return tops if isinstance(tops, list) else []


async def _option(
    client: Client, found: Probed, prompt: Sequence[int], names: TokenNames, name: str, value: Any
) -> None:
    """Ask with a field of the server's own, and keep the field where the answer shows that it was understood."""
    dialect = replace(found.dialect, options=(*found.dialect.options, (name, value)))
    try:
        body = await client.post(COMPLETIONS, dialect.body(prompt, _TOKENS, names))
        choice = only_choice(body, where=COMPLETIONS)
    except HarnessError as error:
        if error.code in FATAL:
            raise
        found.note(name, False, words(error))
        return
    if name == "return_token_ids":
        shown = isinstance(choice.get("token_ids"), list)
    elif name == "return_tokens_as_token_ids":
        shown = _names_ids(choice.get("logprobs"))
    else:
        shown = True  # whether it is followed is seen later
    if shown:
        found.dialect = dialect
        if name.startswith("return_"):
            found.note(name, True)
    else:
        found.ignores(name, "the answer is as without it")


def _names_ids(given: Any) -> bool:
    if not isinstance(given, dict) or not isinstance(given.get("tokens"), list):
        return False
    return all(isinstance(name, str) and name.startswith("token") for name in given["tokens"])


async def _prompt_logprobs(client: Client, found: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    detail = "there are no log probabilities at all"
    for fields in _PROMPT_LOGPROBS if found.dialect.num_logprobs else ():
        dialect = replace(found.dialect, prompt_logprobs=fields)
        try:
            body = await client.post(COMPLETIONS, dialect.body(prompt, 1, names, with_prompt=True))
            is_echoed = "echo" in dict(fields)
            answer = read_answer(body, prompt, names, where=COMPLETIONS, is_echoed=is_echoed)
            is_there = bool(answer.prompt_logprobs and any(answer.prompt_logprobs))
        except HarnessError as error:
            if error.code in FATAL:
                raise
            detail = words(error)
            is_there = error.code is Code.ENDPOINT_TOKENS  # of another prompt: each request will say so
        else:
            detail = "not in the answer"
        if is_there:
            found.note("prompt logprobs", True, f"by {fields[0][0]}")
            found.dialect = dialect
            return
    found.note("prompt logprobs", False, detail)


async def _streaming(client: Client, found: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    try:
        events = await client.stream(COMPLETIONS, found.dialect.body(prompt, _TOKENS, names))
    except HarnessError as error:
        if error.code in FATAL and error.code is not Code.ENDPOINT_HUNG_UP:  # transformers serve ends without [DONE]
            raise
        found.note("streaming", False, words(error))
    else:
        found.note("streaming", True, f"{len(events)} events for {_TOKENS} tokens")


async def _tokenizer(client: Client, found: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    """Compare the server's tokenizer with the checkpoint's, where it shows it."""
    text = names.text_of(prompt) if names.is_there else None
    if text is None:
        return
    try:
        page = await client.post("/tokenize", {"prompt": text, "content": text})
        tokens = page.get("tokens") if isinstance(page, dict) else None
        if not isinstance(tokens, list):
            raise unreadable("the answer has no tokens", where="/tokenize", actual=page)
    except HarnessError as error:
        if error.code in FATAL:
            raise
        found.note("/tokenize", False, words(error))
        return
    is_same = tokens in (list(prompt), list(prompt)[1:])  # with or without the begin-of-text token
    found.note("/tokenize", True, "" if is_same else f"other tokens than the checkpoint's: {tokens[:8]}")


_PARAMETER_TOKENS = 8
"""New tokens that are asked for."""
_HOT = (100.0, 2.0)
"""Temperatures at which other tokens than the likeliest are drawn; OpenAI's servers and vLLM's take none above 2."""
_GREEDY = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
"""Each leaves the likeliest token alone, whatever the temperature."""
ALL_TOKENS = "top_k of -1"
"""Whether it stands for all tokens; where it is refused, 0 does (mlx-lm)."""
_PENALTIES = ("repetition_penalty", "repeat_penalty")
_PENALTY = 100.0
_STOP_LENGTH = 4
"""Characters of a stop string."""

Content = tuple[Any, Any]
"""Text and token ids of an answer."""


async def parameters(client: Client, found: Probed, prompt: Sequence[int], names: TokenNames) -> None:
    """Find out which parameters the server follows, and which it takes and ignores.

    Raises:
        HarnessError: as `Client.post`, where a greedy completion is not answered; ENDPOINT_CANNOT: the answer to it
            cannot be judged.
    """
    asker = _Asker(client, found, found.dialect.body(prompt, _PARAMETER_TOKENS, names))
    body = await client.post(COMPLETIONS, asker.body)
    answer = read_answer(body, prompt, names, where=COMPLETIONS)  # or nothing of it can be judged
    plain = _content(body)
    await _stop(asker, plain)
    for name in [name for name in _PENALTIES if name in dict(found.dialect.options)]:
        await _penalty(asker, name, plain, repeats=_repeats(answer.token_ids))
    await _sampling(asker, plain)


def note_ignore_eos(found: Probed, answers: Iterable[Completion], eos: frozenset[int]) -> None:
    """Keep what the answers show of `ignore_eos`, which was sent with all of them if the server takes it."""
    if "ignore_eos" not in dict(found.dialect.options):
        return
    answers = list(answers)
    if any(answer.finish_reason == "stop" for answer in answers):
        found.ignores("ignore_eos", "an answer ends at an end of text")
    elif any(eos.intersection(answer.token_ids[:-1]) for answer in answers):
        found.note("ignore_eos", True)
    else:
        found.note("ignore_eos", False, "taken; no answer came to an end of text")


@dataclass(frozen=True, slots=True)
class _Asker:
    """Sends one body again with other fields."""

    client: Client
    found: Probed
    body: Mapping[str, Any]

    async def ask(self, name: str, fields: Mapping[str, Any]) -> Content | None:
        """Return the answer's content; None if the parameter of this name is refused, which is noted."""
        try:
            return _content(await self.client.post(COMPLETIONS, {**self.body, **fields}))
        except HarnessError as error:
            if error.code in FATAL:
                raise
            self.found.note(name, False, words(error))
            return None

    def note(self, name: str, is_followed: bool, seen: str) -> None:
        """Keep whether a parameter is followed; `seen` says what shows that it is not."""
        if is_followed:
            self.found.note(name, True)
        else:
            self.found.ignores(name, seen)


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


def _repeats(token_ids: Sequence[int]) -> bool:
    """Whether a penalty of repetitions changes an answer; llama-cpp-python counts no token of the prompt."""
    return len(set(token_ids)) < len(token_ids)


async def _penalty(asker: _Asker, name: str, plain: Content, *, repeats: bool) -> None:
    answer = await asker.ask(name, {name: _PENALTY})
    if answer is not None and answer == plain and not repeats:
        asker.found.note(name, False, "taken; the answer repeats no token, so nothing shows it")
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
    if asker.found.has("top_k") and await asker.ask(ALL_TOKENS, {"temperature": hot, "top_k": -1}) is not None:
        asker.found.note(ALL_TOKENS, True)
    await _seed(asker, hot)


async def _seed(asker: _Asker, hot: float) -> None:
    draws = []
    for seed in (1, 1, 2):
        draw = await asker.ask("seed", {"temperature": hot, "seed": seed})
        if draw is None:
            return
        draws.append(draw)
    first, again, other = draws
    seen = "other seeds draw the same" if first == again else "one seed draws twice differently"
    asker.note("seed", first == again != other, seen)
