"""What a server saw of a conversation: its tokens where it shows them, else its text, else their number."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.chat.tokens.conversations import Conversation
from harness.extensions.server.endpoint.client import Client
from harness.extensions.server.endpoint.dialect import CHAT
from harness.extensions.server.endpoint.probed import FATAL, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A conversation as it was seen; what is not known is None."""

    token_ids: tuple[int, ...] | None = None
    is_first_hidden: bool = False
    """Whether the first token is not among them: it is taken to be HF's."""
    text: str | None = None
    count: int | None = None
    """Tokens by the server's own count."""
    refusal: str | None = None
    """The words in the place of an answer."""


@dataclass(frozen=True, slots=True)
class SeeingWay:
    """A way to see."""

    name: str
    proves: str
    see: Callable[["Sight", Conversation], Awaitable[Seen]]


class Sight:
    """Asks one server."""

    def __init__(self, client: Client, model: str, has_token: Callable[[object], bool]) -> None:
        self.client, self.model, self._has_token = client, model, has_token

    def body(self, conversation: Conversation, **fields: Any) -> dict[str, Any]:
        """Return the body of a chat."""
        return {"model": self.model, **conversation.wire, "max_tokens": 1, "temperature": 0, **fields}

    def ids(self, given: object, where: str) -> tuple[int, ...] | None:
        """Return token ids that a server gives; raises HarnessError (ENDPOINT_UNREADABLE) if they are none."""
        if not isinstance(given, list):
            return None
        if not all(self._has_token(item) for item in given):
            what = "the prompt's tokens are not tokens of the model"
            raise HarnessError(Code.ENDPOINT_UNREADABLE, what, where=where, actual=repr(given)[:200])
        return tuple(given)


async def _chat_ids(sight: Sight, conversation: Conversation) -> Seen:
    answer = _mapping(await sight.client.post(CHAT, sight.body(conversation, return_token_ids=True)))
    choice = (_list(answer.get("choices")) or [{}])[0]
    given = answer.get("prompt_token_ids") or _mapping(choice).get("prompt_token_ids")
    return Seen(token_ids=sight.ids(given, CHAT), count=_count(answer))


async def _chat_logprobs(sight: Sight, conversation: Conversation) -> Seen:
    """Read vLLM's `prompt_logprobs`, which name the prompt's own tokens; the first of them has none."""
    answer = _mapping(await sight.client.post(CHAT, sight.body(conversation, prompt_logprobs=0)))
    given = _list(answer.get("prompt_logprobs"))
    names = [next(iter(item), "") for item in given[1:] if isinstance(item, dict)]
    if not given or len(names) < len(given) - 1 or not all(name.isdecimal() for name in names):
        return Seen(count=_count(answer))
    return Seen(token_ids=sight.ids([int(name) for name in names], CHAT), is_first_hidden=True)


async def _tokenize(sight: Sight, conversation: Conversation) -> Seen:
    body = {"model": sight.model, **conversation.wire, "add_generation_prompt": True}
    answer = _mapping(await sight.client.post("/tokenize", body))
    return Seen(token_ids=sight.ids(answer.get("tokens"), "/tokenize"))


async def _template(sight: Sight, conversation: Conversation) -> Seen:
    answer = _mapping(await sight.client.post("/apply-template", conversation.wire))
    text = answer.get("prompt")
    return Seen(text=text if isinstance(text, str) else None)


async def _usage(sight: Sight, conversation: Conversation) -> Seen:
    return Seen(count=_count(_mapping(await sight.client.post(CHAT, sight.body(conversation)))))


WAYS = (
    SeeingWay("prompt_token_ids", "the tokens that the chat was computed from", _chat_ids),
    SeeingWay("prompt_logprobs", "the tokens that the chat was computed from, but for the first", _chat_logprobs),
    SeeingWay(
        "/tokenize",
        "the tokens that the server's own page makes of a conversation, which a chat may do otherwise",
        _tokenize,
    ),
    SeeingWay(
        "/apply-template", "the text that the server's own page makes of a conversation, not its tokens", _template
    ),
    SeeingWay("usage.prompt_tokens", "the number of tokens, not which they are", _usage),
)
"""The strongest first."""


def knows(way: SeeingWay, seen: Seen) -> bool:
    """Whether an answer has what the way is for."""
    if way.name == "usage.prompt_tokens":
        return seen.count is not None
    return (seen.text if way.name == "/apply-template" else seen.token_ids) is not None


async def see(way: SeeingWay, sight: Sight, conversation: Conversation) -> Seen:
    """Return what the server saw, or how it refuses.

    Raises:
        HarnessError: as `Client.post`, but for ENDPOINT_REFUSED.
    """
    try:
        return await way.see(sight, conversation)
    except HarnessError as error:
        if error.code is not Code.ENDPOINT_REFUSED:
            raise
        return Seen(refusal=words(error))


async def strongest(sight: Sight, conversation: Conversation) -> SeeingWay:
    """Return the way that shows the most.

    Raises:
        HarnessError: ENDPOINT_CANNOT: none shows anything.
    """
    refusals = []
    for way in WAYS:
        try:
            seen = await see(way, sight, conversation)
        except HarnessError as error:
            if error.code in FATAL:
                raise
            seen = Seen(refusal=words(error))
        if knows(way, seen):
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


def _count(answer: Mapping[str, Any]) -> int | None:
    value = _mapping(answer.get("usage")).get("prompt_tokens")
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
