"""The checks of a server's chats, and of a function that renders them.

A server shows what it saw of a conversation: the tokens, or only their text, or only their number.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.chat.conversations import Conversation, Renderer, Seen, template_notes
from harness.extensions.server.chat.result import Difference, TokensResult
from harness.extensions.server.chat.search import ConversationSearch, find_smallest, texts
from harness.extensions.server.chat.text import TextCheck
from harness.extensions.server.client import Client
from harness.extensions.server.completion import CHAT, COMPLETIONS, only_choice, unreadable, usage_count
from harness.extensions.server.names import TokenNames
from harness.extensions.server.probe import error_text, probe_server, refusal, tokenize
from harness.extensions.server.truth import eos_ids
from harness.formats.checkpoint import Checkpoint
from harness.results.check import Finding

_USER = Conversation(messages=({"role": "user", "content": "x"},))
_BIAS = 100.0
RenderFunction = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], Sequence[int]]
"""Takes messages and tools, in HF's form, and returns token ids up to where the assistant's answer begins."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A way to observe what a server sees of a conversation."""

    name: str
    proves: str
    see: Callable[["ChatClient", Conversation], Awaitable[Seen]]
    shows: str = "token_ids"
    """The field of `Seen` that this way is for."""


class ChatClient:
    """Sends conversations to one server."""

    def __init__(self, client: Client, model: str, names: TokenNames) -> None:
        self.model, self._client, self._names = model, client, names

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the JSON that answers a body; empty if it is no mapping."""
        return _mapping(await self._client.post(path, body))

    async def chat(self, conversation: Conversation, **fields: Any) -> Mapping[str, Any]:
        """Return the answer to a chat."""
        return await self.post(CHAT, self.body(conversation, **fields))

    def body(self, conversation: Conversation, **fields: Any) -> dict[str, Any]:
        """Return the body of a chat."""
        return {"model": self.model, **conversation.wire, "max_tokens": 1, "temperature": 0, **fields}

    def ids(self, token_ids: object, where: str) -> tuple[int, ...] | None:
        """Return token ids that a server gives; raises HarnessError (ENDPOINT_UNREADABLE) if they are none."""
        if not isinstance(token_ids, list):
            return None
        if not all(map(self._names.has, token_ids)):
            raise unreadable("the prompt's tokens are not tokens of the model", where=where, actual=token_ids)
        return tuple(token_ids)


async def _chat_ids(client: ChatClient, conversation: Conversation) -> Seen:
    answer = await client.chat(conversation, return_token_ids=True)
    choice = (_list(answer.get("choices")) or [{}])[0]
    token_ids = answer.get("prompt_token_ids") or _mapping(choice).get("prompt_token_ids")
    return Seen(token_ids=client.ids(token_ids, CHAT), count=_count(answer))


async def _chat_logprobs(client: ChatClient, conversation: Conversation) -> Seen:
    """Read vLLM's `prompt_logprobs`, which name the prompt's own tokens; the first of them has none."""
    answer = await client.chat(conversation, prompt_logprobs=0)
    logprobs = _list(answer.get("prompt_logprobs"))
    names = [next(iter(item), "") for item in logprobs[1:] if isinstance(item, dict)]
    if not logprobs or len(names) < len(logprobs) - 1 or not all(name.isdecimal() for name in names):
        return Seen(count=_count(answer))
    return Seen(token_ids=client.ids([int(name) for name in names], CHAT), is_first_hidden=True)


async def _tokenize(client: ChatClient, conversation: Conversation) -> Seen:
    body = {"model": client.model, **conversation.wire, "add_generation_prompt": True}
    answer = await client.post("/tokenize", body)
    return Seen(token_ids=client.ids(answer.get("tokens"), "/tokenize"))


async def _template(client: ChatClient, conversation: Conversation) -> Seen:
    answer = await client.post("/apply-template", conversation.wire)
    text = answer.get("prompt")
    return Seen(text=text if isinstance(text, str) else None)


async def _usage(client: ChatClient, conversation: Conversation) -> Seen:
    return Seen(count=_count(await client.chat(conversation)))


WAYS = (
    Observation("prompt_token_ids", "the tokens that the chat was computed from", _chat_ids),
    Observation("prompt_logprobs", "the tokens that the chat was computed from, but for the first", _chat_logprobs),
    Observation(
        "/tokenize",
        "the tokens that the server's own page makes of a conversation, which a chat may do otherwise",
        _tokenize,
    ),
    Observation(
        "/apply-template",
        "the text that the server's own page makes of a conversation, not its tokens",
        _template,
        shows="text",
    ),
    Observation("usage.prompt_tokens", "the number of tokens, not which they are", _usage, shows="count"),
)
"""The strongest first."""


async def see(way: Observation, client: ChatClient, conversation: Conversation) -> Seen:
    """Return what the server saw, or how it refuses.

    Raises:
        HarnessError: as `Client.post`, but for ENDPOINT_REFUSED.
    """
    try:
        return await way.see(client, conversation)
    except HarnessError as error:
        if error.code is not Code.ENDPOINT_REFUSED:
            raise
        return Seen(refusal=error_text(error))


async def strongest_observation(client: ChatClient, conversation: Conversation) -> Observation:
    """Return the observation that shows the most.

    Raises:
        HarnessError: ENDPOINT_CANNOT: none shows anything.
    """
    refusals = []
    for way in WAYS:
        try:
            seen = await see(way, client, conversation)
        except HarnessError as error:
            seen = Seen(refusal=refusal(error))
        if getattr(seen, way.shows) is not None:
            return way
        refusals.append(f"{way.name}: {seen.refusal or 'not in the answer'}")
    raise HarnessError(
        Code.ENDPOINT_CANNOT,
        "the server shows nothing of what it makes of a conversation",
        where=CHAT,
        expected="prompt_token_ids, /tokenize, /apply-template, or usage.prompt_tokens",
        actual="; ".join(refusals)[:400],
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(answer: Any) -> int | None:
    count = usage_count(answer, "prompt_tokens")
    return count if count is not None and count >= 0 else None


def compare_renderings(
    render: RenderFunction,
    model: Checkpoint | str | os.PathLike[str],
    *,
    num_conversations: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokensResult:
    """Compare a function with HF's tokenizer and chat template.

    An exception of `render` is a refusal; `model` is a checkpoint, or its folder.

    Raises:
        HarnessError: NO_TOKENIZER, NO_CHAT_TEMPLATE, BAD_TEMPLATE.
    """
    checkpoint = Checkpoint.of(model)
    renderer = Renderer(checkpoint.tokenizer)

    def seen(conversation: Conversation) -> Seen:
        messages, tools = [dict(item) for item in conversation.messages], [dict(item) for item in conversation.tools]
        try:
            return Seen(token_ids=tuple(int(token_id) for token_id in render(messages, tools or None)))
        except Exception as error:
            return Seen(refusal=f"{type(error).__name__}: {error}"[:200])

    search = ConversationSearch(
        renderer=renderer, see=seen, num=num_conversations, seed=seed, progress=progress or no_progress
    )
    search.look()
    return TokensResult(
        subject=getattr(render, "__name__", "function"),
        server="",
        served_model="",
        model=str(checkpoint.folder),
        evidence="token ids",
        proves="the tokens that the function returns",
        features=[str(feature) for feature in search.features],
        differences=search.run(),
        num_conversations=search.num_compared,
        not_judged=search.not_judged,
        notes=tuple(template_notes(renderer)),
    )


def check_tokens(
    checkpoint: Checkpoint,
    address: Address,
    *,
    model: str,
    num_conversations: int = 100,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokensResult:
    """Compare what a server makes of conversations with HF's tokenizer and chat template.

    `model` is what the checkpoint is called.

    Raises:
        HarnessError: NO_TOKENIZER, NO_CHAT_TEMPLATE, BAD_TEMPLATE; as `Client.post`; ENDPOINT_CANNOT: the server shows
            nothing of what it makes of a conversation.
    """
    renderer = Renderer(checkpoint.tokenizer)
    with asyncio.Runner() as runner:
        job = _Job(runner, checkpoint, address, renderer)
        return job.result(model, num_conversations, seed, progress or no_progress)


class _Job:
    """The check of one server, whose requests run on one event loop."""

    def __init__(self, runner: asyncio.Runner, checkpoint: Checkpoint, address: Address, renderer: Renderer) -> None:
        self._runner, self._checkpoint, self._renderer = runner, checkpoint, renderer
        self._client = Client(address)
        size = checkpoint.config.get("vocab_size")
        self._size = max(len(renderer.tokenizer.hf), size if isinstance(size, int) else 0)
        self._names = TokenNames(checkpoint, vocab_size=self._size)
        self._not_judged: dict[str, str] = {}

    def result(self, model: str, num: int, seed: int, progress: Progress) -> TokensResult:
        """Run the check."""
        run, client = self._runner.run, self._client
        run(client.__aenter__())
        try:
            progress("probe", 0, 1)
            probed = run(probe_server(client, model))
            chat_client = ChatClient(client, probed.dialect.model, self._names)
            way = run(strongest_observation(chat_client, _USER))
            findings: list[Finding] = []

            def seen(conversation: Conversation) -> Seen:
                seen_now = run(see(way, chat_client, conversation))
                findings.extend(_miscounted(seen_now) if not findings else ())
                return seen_now

            search = ConversationSearch(
                renderer=self._renderer, see=seen, num=num, seed=seed, body_of=chat_client.body, progress=progress
            )
            search.look()
            differences = search.run()
            num_texts, text_differences = self._texts(num, seed)
            num_ends, end_findings = self._ends(probed.dialect.model)
            progress("text", 0, 1)
            writing = TextCheck(client, probed.dialect.model, self._renderer.tokenizer.hf)
            run(writing.run())
            return TokensResult(
                subject=client.address.url,
                server=probed.server,
                served_model=probed.dialect.model,
                model=model,
                evidence=way.name,
                proves=way.proves,
                features=[str(feature) for feature in search.features],
                differences=[*differences, *text_differences, *writing.differences],
                num_conversations=search.num_compared,
                num_texts=num_texts,
                num_ends=num_ends,
                num_answers=writing.num_answers,
                not_judged=search.not_judged | self._not_judged | writing.not_judged,
                findings=[*findings, *end_findings],
                notes=tuple(template_notes(self._renderer)),
            )
        finally:
            run(client.__aexit__(None, None, None))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._runner.run(self._client.post(path, body))

    def _texts(self, num: int, seed: int) -> tuple[int, list[Difference]]:
        """Compare plain texts that the server tokenises, and puts together again."""
        try:
            self._tokens_of("x")
        except HarnessError as error:
            self._not_judged["plain text"] = refusal(error)
            return 0, []
        asked: dict[str, str | None] = {}

        def wrong(text: str) -> bool:
            if text not in asked:
                asked[text] = self._wrong_text(text)
            return asked[text] is not None

        smallest = find_smallest(texts(self._renderer.special), wrong, num, seed)
        if smallest is None:
            return len(asked), []
        hf = self._renderer.tokenizer.hf
        difference = Difference(
            name="plain text is tokenised otherwise",
            messages=({"role": "text", "content": smallest},),
            tools=(),
            expected=repr(hf(smallest)["input_ids"])[:200],
            actual=str(asked[smallest]),
            expected_ids=hf(smallest)["input_ids"],
            actual_ids=None,
        )
        return len(asked), [difference]

    def _tokens_of(self, text: str) -> list[int]:
        tokens = self._runner.run(tokenize(self._client, text))
        if not all(map(self._names.has, tokens)):
            raise unreadable("the answer has tokens that the model does not have", where="/tokenize", actual=tokens)
        return tokens

    def _wrong_text(self, text: str) -> str | None:
        """Return the server's tokens of a text if they differ from HF's with and without special tokens."""
        hf, tokens = self._renderer.tokenizer.hf, self._tokens_of(text)
        expected = [list(hf(text, add_special_tokens=adds)["input_ids"]) for adds in (True, False)]
        return None if tokens in expected else repr(tokens)[:200]

    def _ends(self, model: str) -> tuple[int, list[Finding]]:
        """Check that each end token of the generation config ends an answer; a bias makes the token certain."""
        prompt = self._renderer.render(_USER)
        assert prompt is not None
        ends = sorted(eos_ids(self._checkpoint.folder, self._checkpoint.config.get("eos_token_id")))
        plain = next(token_id for token_id in range(self._size) if token_id not in {*ends, *self._renderer.special})
        base = {"model": model, "prompt": list(prompt.token_ids), "max_tokens": 3, "temperature": 0}
        reasons = {}
        try:
            for token_id in (plain, *ends):
                body = base | {"logit_bias": {str(token_id): _BIAS}}
                reasons[token_id] = only_choice(self._post(COMPLETIONS, body), where=COMPLETIONS).get("finish_reason")
            unbiased = only_choice(self._post(COMPLETIONS, base), where=COMPLETIONS)
            biased = only_choice(self._post(COMPLETIONS, base | {"logit_bias": {str(plain): _BIAS}}), where=COMPLETIONS)
        except HarnessError as error:
            self._not_judged["end tokens"] = refusal(error)
            return 0, []
        if not ends or unbiased.get("text") == biased.get("text") or reasons[plain] != "length":
            self._not_judged["end tokens"] = "no logit_bias makes a token certain" if ends else "the model names none"
            return 0, []
        return len(ends), list(_unending(ends, reasons))


def _miscounted(seen: Seen) -> Iterator[Finding]:
    if seen.token_ids is not None and seen.count not in (None, len(seen.token_ids)):
        message = f"usage counts {seen.count} tokens of the prompt, the server shows {len(seen.token_ids)}"
        yield Finding(code=Code.ENDPOINT_TOKENS, message=message)


def _unending(ends: Sequence[int], reasons: Mapping[int, Any]) -> Iterator[Finding]:
    for token_id in ends:
        if reasons[token_id] != "stop":
            message = f"token {token_id}, an end of text by the model's configuration, does not end an answer"
            yield Finding(code=Code.ENDPOINT_TOKENS, message=message)
