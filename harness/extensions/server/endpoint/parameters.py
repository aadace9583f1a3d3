"""Parameters of sampling and stopping: asked with values that must show in the answer, and followed only if they do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import HarnessError
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.dialect import COMPLETIONS
from harness.extensions.server.endpoint.names import TokenNames
from harness.extensions.server.endpoint.parse import only_choice, read_answer
from harness.extensions.server.endpoint.probed import FATAL, Probed, words

_TOKENS = 8
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
    asker = _Asker(client, found, found.dialect.body(prompt, _TOKENS, names))
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
