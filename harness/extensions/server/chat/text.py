"""What a server writes: the text of its tokens, whole and in pieces, where it ends, and how often.

The server's own plain answer is the measure of its other answers to the same request, and HF's decoder that of the
plain answer, where the server names its tokens. A wrong answer counts if it comes back a second time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.chat.causes import around_difference
from harness.extensions.server.chat.result import Difference
from harness.extensions.server.client import Client
from harness.extensions.server.completion import CHAT, COMPLETIONS, only_choice, unreadable, wrong_length
from harness.extensions.server.probe import error_text, refusal

_TOKENS = 48
_PROMPTS = tuple(
    4 * pattern
    for pattern in (
        "one two three four five six seven eight ",
        "🙂👩\u200d👩\u200d👧 é日本 \U0001d518 ",
        '{"a": [1, "b\\n"], "c": null}\n',
    )
)
"""Patterns, which models continue: words, characters of many bytes, and what is escaped in JSON."""
_TEMPERATURES = (1.0, 0.0)
"""Draws show more text than the likeliest tokens do, where a seed makes them again."""
_STOP_LENGTHS = (4, 3, 2)
_NEVER = "\ue000"
"""A character that no answer has: of private use."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MOST_DIFFERENCES = 6
_HOT, _HOTTEST = 100.0, 2.0
"""A temperature at which no two draws are alike, and the largest that OpenAI's servers and vLLM's take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """One answer, joined where it came in pieces."""

    text: str
    token_ids: tuple[int, ...] | None
    finish_reason: str | None
    num_new: int | None
    """New tokens by the server's own count."""
    texts: tuple[str, ...]
    """Of all choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVariant:
    """A request that differs from the plain one, and what its answer must be."""

    of: str
    """The ability that is checked."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_streamed: bool = False
    expected: str | None = None
    """None: the text is not judged."""
    finish_reason: str | None = None


class TextCheck:
    """The check of one server's text."""

    def __init__(self, client: Client, model: str, tokenizer: Any) -> None:
        self._client, self._model, self._tokenizer = client, model, tokenizer
        self.differences: list[Difference] = []
        self.not_judged: dict[str, str] = {}
        self.num_answers = 0
        """Answers that were judged."""

    async def run(self) -> None:
        """Check completions and chats; raises HarnessError as `Client.post`, where the server is gone."""
        for path in (COMPLETIONS, CHAT):
            for prompt in _PROMPTS:
                try:
                    await self._judge(path, prompt)
                except HarnessError as error:
                    self.not_judged.setdefault(f"text of {path}", refusal(error))

    async def _judge(self, path: str, prompt: str) -> None:
        asked = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
        options = {"seed": _PROMPTS.index(prompt), "return_token_ids": True}
        body = await self._taken(path, {"model": self._model, **asked, "max_tokens": _TOKENS}, options)
        hot = (await self._taken(path, body, {"temperature": _HOT})).get("temperature", _HOTTEST)
        for temperature in _TEMPERATURES:
            body = {**body, "temperature": temperature}
            plain = await self._ask(path, body)
            if plain == await self._ask(path, body):
                break
        else:
            self.not_judged[f"text of {path}"] = "the same request with the same seed is answered otherwise"
            return
        if not plain.text:
            self.not_judged.setdefault(f"text of {path}", "the answers have no text")
            return
        self._keep(path, prompt, body, self._wrong_plain(prompt, plain, _TOKENS))
        is_lossless = self._tokenizer.decode(self._tokenizer(prompt)["input_ids"], skip_special_tokens=True) == prompt
        for variant in _variants(prompt if path == COMPLETIONS and is_lossless else None, plain, hot):
            await self._run(path, prompt, body, plain, variant)

    async def _taken(self, path: str, body: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body with those options that the server takes."""
        for name, value in options.items():
            try:
                await self._client.post(path, {**body, name: value, "max_tokens": 1})
                body = {**body, name: value}
            except HarnessError as error:
                if error.code is not Code.ENDPOINT_REFUSED:
                    raise
        return body

    async def _run(
        self, path: str, prompt: str, body: Mapping[str, Any], plain: WrittenAnswer, variant: RequestVariant
    ) -> None:
        name = f"streams of {path}" if variant.is_streamed else variant.of
        if name in self.not_judged:
            return
        sent = {key: value for key, value in {**body, **variant.fields}.items() if value is not None}
        try:
            answer = await self._ask(path, sent, is_streamed=variant.is_streamed)
            wrong = self._wrong(prompt, plain, answer, variant)
            is_sure = wrong is None or [plain, answer] == [
                await self._ask(path, body),
                await self._ask(path, sent, is_streamed=variant.is_streamed),
            ]
        except HarnessError as error:
            is_unfinished = variant.is_streamed and error.code is Code.ENDPOINT_HUNG_UP
            self.not_judged.setdefault(name, error_text(error) if is_unfinished else refusal(error))
            return
        if is_sure or variant.of == "n":  # which is drawn anew each time
            self._keep(path, prompt, {**sent, "stream": True} if variant.is_streamed else sent, wrong)

    def _keep(self, path: str, prompt: str, body: Mapping[str, Any], wrong: tuple[str, str, str] | None) -> None:
        self.num_answers += 1
        if wrong is None or wrong[0] in {difference.name for difference in self.differences[-_MOST_DIFFERENCES:]}:
            return
        name, expected, actual = wrong
        self.differences.append(
            Difference(
                name=name, code=Code.TEXT_DIFFERS, messages=({"role": "text", "content": prompt},), tools=(),
                expected=expected, actual=actual, expected_ids=(), actual_ids=None, path=path, body=body,
            )
        )  # fmt: skip

    async def _ask(self, path: str, body: Mapping[str, Any], *, is_streamed: bool = False) -> WrittenAnswer:
        if is_streamed:
            return _joined(await self._client.stream(path, body), path)
        answer = await self._client.post(path, body)
        only_choice(answer, where=path)
        return _joined([{**answer, "choices": [choice]} for choice in answer["choices"]], path)

    def _wrong(
        self, prompt: str, plain: WrittenAnswer, answer: WrittenAnswer, variant: RequestVariant
    ) -> tuple[str, str, str] | None:
        """Return name, expected and actual of what is wrong."""
        if variant.of == "n":
            if len(answer.texts) != 2:
                return f"n is 2, and there is {len(answer.texts)} choice", "2", str(len(answer.texts))
            is_same = answer.texts[0] == answer.texts[1] and len(plain.text) > 1
            is_same &= (
                variant.fields["temperature"] == _HOT or answer.text != plain.text
            )  # or the model may be sure of it
            return ("both choices are the same draw", "two draws", repr(answer.text)[:80]) if is_same else None
        if variant.of == "max_tokens":
            return self._wrong_plain(prompt, answer, variant.fields["max_tokens"])
        if variant.expected is not None and _whole(answer.text) != _whole(variant.expected):
            return _named(variant, plain, answer), *around_difference(variant.expected, answer.text)
        if variant.finish_reason not in (None, answer.finish_reason):
            return f"finish_reason of {variant.of}", repr(variant.finish_reason), repr(answer.finish_reason)
        return None

    def _wrong_plain(self, prompt: str, answer: WrittenAnswer, num_asked: int) -> tuple[str, str, str] | None:
        ids, num = answer.token_ids, answer.num_new
        if ids is not None and num is not None and not 0 <= num - len(ids) <= (answer.finish_reason == "stop"):
            return "usage counts other tokens than the answer has", str(len(ids)), str(num)
        num = len(ids) if ids is not None else num
        wrong = None if num is None else wrong_length(num, num_asked, answer.finish_reason)
        if wrong is not None:
            return "the number of tokens, or finish_reason", f"max_tokens {num_asked}", wrong
        if ids is None or _whole(answer.text) in (known := [_whole(text) for text in self._texts(prompt, ids)]):
            return None
        name = "the text is not that of its tokens"
        name = f"{name}: special tokens are written" if _whole(answer.text) in self._with_special(ids) else name
        return name, *around_difference(known[0], answer.text)

    def _texts(self, prompt: str, ids: Sequence[int]) -> Iterator[str]:
        """Yield what HF makes of new tokens: after the prompt's, where a space may be written, and by themselves."""
        before = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        for start in (before, before[:0]):
            for cleans in (False, None):
                options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": cleans}
                start_text = self._tokenizer.decode(start, **options)
                yield self._tokenizer.decode([*start, *ids], **options)[len(start_text) :]

    def _with_special(self, ids: Sequence[int]) -> list[str]:
        return [
            _whole(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=cleans)) for cleans in (False, None)
        ]


def _joined(events: Sequence[Any], path: str) -> WrittenAnswer:
    """Join the pieces of the choices; raises HarnessError (ENDPOINT_UNREADABLE)."""
    texts, ids, num, reason = dict[Any, str](), [], None, None
    for event in events:
        if not isinstance(event, dict):
            raise unreadable("an event of the stream has another form", where=path, actual=event)
        usage = event.get("usage")
        num = usage.get("completion_tokens", num) if isinstance(usage, dict) else num
        if not event.get("choices"):
            continue  # counts alone
        choice = only_choice(event, where=path)
        part = choice.get("message") or choice.get("delta") or choice
        text = part.get("text" if path == COMPLETIONS else "content") if isinstance(part, dict) else None
        at = choice.get("index", 0)
        if not isinstance(text, str | None) or not isinstance(at, int):
            raise unreadable("a choice has another form", where=path, actual=choice)
        texts[at] = texts.get(at, "") + (text or "")
        token_ids = choice.get("token_ids")
        ids += token_ids if isinstance(token_ids, list) and not at else []
        reason = choice.get("finish_reason") or reason
    if not texts:
        raise unreadable("the answer has no choices", where=path, actual=events[:1])
    is_named = bool(ids) and all(isinstance(token_id, int) and 0 <= token_id < 2**31 for token_id in ids)
    return WrittenAnswer(
        text=texts[min(texts)],
        token_ids=tuple(ids) if is_named else None,
        finish_reason=reason if isinstance(reason, str) else None,
        num_new=num if isinstance(num, int) else None,
        texts=tuple(texts.values()),
    )


def _variants(prompt: str | None, plain: WrittenAnswer, hot: float) -> Iterator[RequestVariant]:
    """Yield the requests beside the plain one; without a prompt, no echo is asked for. Two choices are `hot`."""
    text = plain.text.rstrip(_BROKEN)
    yield RequestVariant(of="streaming", is_streamed=True, expected=plain.text, finish_reason=plain.finish_reason)
    yield RequestVariant(of="max_tokens", fields={"max_tokens": 1})
    yield RequestVariant(of="n", fields={"temperature": hot, "n": 2, "seed": None})
    if prompt is not None:  # vLLM echoes no text where token ids are asked for
        yield RequestVariant(of="echo", fields={"echo": True, "return_token_ids": None}, expected=prompt + plain.text)
    stops = _stops(text)
    if stops is None:
        return
    for fields in ({"stop": [stops[1]]}, {"stop": [stops[1], stops[0]]}):
        cut = text[: min(text.find(stop) for stop in fields["stop"])]
        for is_streamed in (False, True):
            yield RequestVariant(of="stop", fields=fields, is_streamed=is_streamed, expected=cut, finish_reason="stop")
    almost = {"stop": [text[-2:] + _NEVER]}
    for is_streamed in (False, True):
        yield RequestVariant(
            of="stop", fields=almost, is_streamed=is_streamed, expected=text, finish_reason=plain.finish_reason
        )


def _stops(text: str) -> tuple[str, str] | None:
    """Return two parts of a text, the second of which begins after the first; None if there are none."""
    for length in _STOP_LENGTHS:
        parts = [text[at : at + length] for at in range(len(text) // 4, len(text) - length)]
        candidates = [part for part in parts if _BROKEN not in part and not part.isspace()]
        candidates = [part for part in candidates if text.find(part) > 0]
        pairs = [part for part in candidates if text.find(part) > text.find(candidates[0])]
        if pairs:
            return candidates[0], pairs[len(pairs) // 2]
    return None


def _whole(text: str) -> str:
    """Return a text without half a character at its end, which servers write or hold back."""
    return text.rstrip(_BROKEN)


def _named(variant: RequestVariant, plain: WrittenAnswer, answer: WrittenAnswer) -> str:
    """Return the name of a text that is not the expected one."""
    text, expected = answer.text, variant.expected or ""
    if variant.of == "echo":
        return "echo is ignored" if text == plain.text else "the echo is not the prompt and its answer"
    more = text.count(_BROKEN) > expected.count(_BROKEN) and len(text.replace(_BROKEN, "")) <= len(expected)
    if variant.of == "streaming":
        is_cut = bool(text) and expected.startswith(_whole(text))
        name = "the end of a streamed text is lost" if is_cut else "the pieces of a stream are not the whole text"
        return "characters are broken in pieces" if more else name
    how = " in a stream" if variant.is_streamed else ""
    if any(_whole(text) == _whole(expected + item) for item in variant.fields["stop"]):
        return f"the stop string is written{how}"
    if _whole(text) == _whole(plain.text):
        return f"a stop string is ignored{how}"
    if expected.startswith(_whole(text)):
        return f"text is lost before a stop string{how}, or where none comes"
    if text.startswith(expected):
        return f"text beyond a stop string is written{how}"
    return "characters are broken in pieces" if more else f"a stop string changes text{how}"
