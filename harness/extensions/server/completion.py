"""A server's answer to one request, in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.names import TokenNames

Logprobs = Sequence[Mapping[int, float | None]]
"""For each token: log probabilities by token id, that of the token itself and those of the likeliest ones. None stands
for `null`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation."""

    token_ids: tuple[int, ...]
    """Without an end-of-sequence token that the server does not name."""
    finish_reason: str | None
    """`length`, `stop`, or whatever else the server says."""
    logprobs: Logprobs | None = None
    """Of each new token; None if the server gives none."""
    logprobs_of: tuple[int | None, ...] = ()
    """Tokens that the log probabilities are of, in the server's own words; None where no id can be told."""
    num_named: tuple[int, ...] = ()
    """Likeliest tokens that it names of each new token, those without an id that can be told among them."""
    prompt_logprobs: Logprobs | None = None
    """Of each token of the prompt; the first is empty. None if the server gives none."""
    num_unechoed: int = 0
    """Tokens at the prompt's beginning that its echo leaves out: the one after them has no log probability."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt by the server's own count (`usage`)."""
    num_new_tokens: int | None = None
    """New tokens by the server's own count."""
    text: str | None = None
    seconds: float = 0.0
    """From the request to the end of the answer."""

    def logprobs_at(self, step: int) -> Mapping[int, float | None] | None:
        """Return the log probabilities of one new token; None if there are none."""
        return self.logprobs[step] if self.logprobs is not None and step < len(self.logprobs) else None


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The fields that the bodies of completions may have."""

    model: str
    takes_token_ids: bool = True
    """Whether prompts may be token ids; else they are text."""
    num_logprobs: int = 0
    """Likeliest tokens to ask for; 0: no log probabilities."""
    num_top: int = 0
    """Likeliest tokens that the server gives where so many are asked for."""
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of its own that name token ids, or that go on after an end of text."""
    prompt_logprobs: tuple[tuple[str, Any], ...] = ()
    """Fields that ask for log probabilities of the prompt; empty if it has none."""

    def body(
        self, prompt: Sequence[int], max_tokens: int, names: TokenNames, *, with_prompt: bool = False
    ) -> dict[str, Any]:
        """Return the body of a greedy completion.

        Raises:
            HarnessError: ENDPOINT_CANNOT: the server takes text, and no text becomes these tokens.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt) if self.takes_token_ids else _text(prompt, names),
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if self.num_logprobs:
            body["logprobs"] = self.num_logprobs
        return body | dict(self.options) | (dict(self.prompt_logprobs) if with_prompt else {})


def _text(prompt: Sequence[int], names: TokenNames) -> str:
    text = names.text_of(prompt)
    if text is None:
        raise HarnessError(
            Code.ENDPOINT_CANNOT,
            "the server takes text alone, and no text becomes the tokens of this prompt",
            where="prompt",
            actual=f"{list(prompt)[:8]}{'...' if len(prompt) > 8 else ''}",
            hint='give the prompt as --prompt "..."',
        )
    return text


def read_answer(
    body: Any, prompt: Sequence[int], names: TokenNames, *, where: str, is_echoed: bool = False, seconds: float = 0.0
) -> Completion:
    """Return the only choice of a completion.

    `is_echoed` says whether the prompt was asked for as well, `seconds` how long the answer took; errors name `where`.

    Raises:
        HarnessError: ENDPOINT_UNREADABLE: it is no completion; ENDPOINT_CANNOT: its tokens cannot be told;
            ENDPOINT_TOKENS: the prompt comes back with other tokens.
    """
    choice = only_choice(body, where=where)
    text, reason = choice.get("text"), choice.get("finish_reason")
    entries, num_unechoed = logprob_entries(choice.get("logprobs"), names, where=where), 0
    num_echoed = _num_echoed(entries, prompt, _count(body, "completion_tokens")) if is_echoed else 0
    if entries is not None and num_echoed and num_echoed == len(prompt) - 1:  # llama-cpp-python leaves one out:
        is_whole = all(entry.token_id in (None, sent) for entry, sent in zip(entries, prompt, strict=False))
        num_echoed, num_unechoed = len(prompt), 0 if is_whole else 1
        entries = [*entries, ParsedToken()] if is_whole else [ParsedToken(), *entries]  # the last, or begin-of-text
    token_ids = _token_ids(choice, entries, num_echoed, names, where=where)
    if token_ids is None and isinstance(text, str):
        own = None if entries is None else entries[num_echoed:]
        num_new = _count(body, "completion_tokens") if own is None else len(own)
        token_ids = _retokenised(names.continuation(prompt, _new_text(text, num_echoed, prompt, names), num_new), own)
    if token_ids is None:
        raise HarnessError(
            Code.ENDPOINT_CANNOT,
            "the tokens of an answer cannot be told from its text",
            where=where,
            actual=repr(text)[:200],
            hint="a server that names token ids (return_token_ids, return_tokens_as_token_ids) can be judged",
        )
    own = None if entries is None else entries[num_echoed:][: len(token_ids)]
    return Completion(
        token_ids=token_ids,
        finish_reason=reason if isinstance(reason, str) else None if reason is None else repr(reason)[:80],
        logprobs=None if own is None else _by_id(own, token_ids),
        logprobs_of=tuple(entry.token_id for entry in own or ()),
        num_named=tuple(entry.num_named for entry in own or ()),
        prompt_logprobs=_vllm_prompt_logprobs(choice, prompt, names, where=where)
        or _prompt_logprobs(entries[:num_echoed] if entries else [], prompt),
        num_unechoed=num_unechoed,
        num_prompt_tokens=_count(body, "prompt_tokens"),
        num_new_tokens=_count(body, "completion_tokens"),
        text=text if isinstance(text, str) else None,
        seconds=seconds,
    )


def only_choice(body: Any, *, where: str) -> dict[str, Any]:
    """Return the first choice of an answer; raises HarnessError (ENDPOINT_UNREADABLE)."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise unreadable("the answer has no choices", where=where, actual=body)
    return choices[0]


def unreadable(what: str, *, where: str, actual: object) -> HarnessError:
    """Return an error about a body of another form."""
    return HarnessError(Code.ENDPOINT_UNREADABLE, what, where=where, actual=repr(actual)[:200])


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToken:
    """One token with its log probabilities; those of tokens whose id cannot be told are left out."""

    token_id: int | None = None
    own: Mapping[str, float | None] = field(default_factory=dict)
    """The token's own log probability as `logprob`; empty if the answer has no place for it."""
    top: Mapping[int, float | None] = field(default_factory=dict)
    num_named: int = 0

    def logprobs(self, token_id: int) -> dict[int, float | None]:
        """Return all log probabilities, given what the token's id is."""
        return {**self.top, **({token_id: self.own["logprob"]} if self.own else {})}


def logprob_entries(given: Any, names: TokenNames, *, where: str) -> list[ParsedToken] | None:
    """Return the tokens of an answer's `logprobs`; None if it has none; raises HarnessError (ENDPOINT_UNREADABLE)."""
    if not isinstance(given, dict):
        return None
    if isinstance(given.get("content"), list):
        return [_chat_entry(entry, names, where) for entry in given["content"]]
    tokens = given.get("tokens")
    if not isinstance(tokens, list):
        return None
    own, top = given.get("token_logprobs"), _padded(given.get("top_logprobs"), len(tokens))
    owns = [{"logprob": _logprob(item)} for item in _padded(own, len(tokens))] if isinstance(own, list) else None
    return [
        _entry(str(name), owns[at] if owns else {}, top[at] if isinstance(top[at], dict) else {}, names, where)
        for at, name in enumerate(tokens)
    ]


def _entry(
    name: str, own: Mapping[str, float | None], top: Mapping[str, Any], names: TokenNames, where: str
) -> ParsedToken:
    pairs = [(_known(names.id_of(key), names, where), _logprob(value)) for key, value in top.items()]
    return ParsedToken(
        token_id=_known(names.id_of(name), names, where),
        own=own,
        top={token_id: value for token_id, value in pairs if token_id is not None},
        num_named=len(pairs),
    )


def _chat_entry(entry: Any, names: TokenNames, where: str) -> ParsedToken:
    """Read an entry of a chat's log probabilities, which llama.cpp's server gives for completions as well."""
    if not isinstance(entry, dict):
        raise unreadable("a token's log probabilities have another form", where=where, actual=entry)
    given = entry.get("top_logprobs")
    alternatives = [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
    pairs = [(_id(alternative, names, where), _logprob(alternative.get("logprob"))) for alternative in alternatives]
    return ParsedToken(
        token_id=_id(entry, names, where),
        own={"logprob": _logprob(entry.get("logprob"))},
        top={token_id: value for token_id, value in pairs if token_id is not None},
        num_named=len(pairs),
    )


def _id(entry: Mapping[str, Any], names: TokenNames, where: str) -> int | None:
    own = entry.get("id", entry.get("token_id"))
    return _known(own if isinstance(own, int) else names.id_of(str(entry.get("token"))), names, where)


def _known(token_id: Any, names: TokenNames, where: str) -> int | None:
    """Return the id of a token, or None; raises HarnessError (ENDPOINT_UNREADABLE) if the model has no such token."""
    if token_id is None or names.has(token_id):
        return token_id  # type: ignore[no-any-return]
    raise unreadable("the answer names a token that the model does not have", where=where, actual=token_id)


def _logprob(value: Any) -> float | None:
    """Return a number as float64; None for `null` and for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(max(min(value, 1e300), -1e300)) if isinstance(value, int) else value  # JSON's have no largest


def _padded(values: Any, length: int) -> list[Any]:
    found = values if isinstance(values, list) else []
    return [*found, *[None] * (length - len(found))][:length]


def _count(body: Mapping[str, Any], name: str) -> int | None:
    usage = body.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _num_echoed(entries: Sequence[ParsedToken] | None, prompt: Sequence[int], num_new: int | None) -> int:
    """Return how many entries are of the prompt: the first of all has no log probability then."""
    if not entries or entries[0].own.get("logprob") is not None:
        return 0
    return len(prompt) if num_new is None else max(0, len(entries) - num_new)


def _new_text(text: str, num_echoed: int, prompt: Sequence[int], names: TokenNames) -> str:
    before = names.text_of(prompt) if num_echoed and names.is_there else None
    return text.removeprefix(before or "")


def _retokenised(token_ids: tuple[int, ...] | None, entries: Sequence[ParsedToken] | None) -> tuple[int, ...] | None:
    """Return the tokens of a text if they are those that the server names, as far as the names tell."""
    if token_ids is None or entries is None:
        return token_ids
    pairs = zip(token_ids, entries, strict=True)
    return token_ids if all(entry.token_id in (None, token_id) for token_id, entry in pairs) else None


def _token_ids(
    choice: Mapping[str, Any], entries: Sequence[ParsedToken] | None, num_echoed: int, names: TokenNames, *, where: str
) -> tuple[int, ...] | None:
    named = choice.get("token_ids")
    if isinstance(named, list):
        if None in named:
            raise unreadable("the answer names a token that the model does not have", where=where, actual=None)
        return tuple(token_id for item in named if (token_id := _known(item, names, where)) is not None)
    if entries is None:
        return None
    found = [entry.token_id for entry in entries[num_echoed:]]
    return None if None in found else tuple(token_id for token_id in found if token_id is not None)


def _by_id(entries: Sequence[ParsedToken], token_ids: Sequence[int]) -> list[dict[int, float | None]]:
    return [entry.logprobs(token_id) for entry, token_id in zip(entries, token_ids, strict=False)]


def _vllm_prompt_logprobs(
    choice: Mapping[str, Any], prompt: Sequence[int], names: TokenNames, *, where: str
) -> list[dict[int, float | None]] | None:
    """Read vLLM's `prompt_logprobs`: for each token a mapping from ids, as text, to log probabilities."""
    given = choice.get("prompt_logprobs")
    if not isinstance(given, list):
        return None
    if len(given) > len(prompt):
        what = "there are log probabilities of more tokens of the prompt than were sent"
        raise HarnessError(Code.ENDPOINT_TOKENS, what, where=where, expected=len(prompt), actual=len(given))
    return [
        {_prompt_id(key, names, where): _logprob(value.get("logprob")) for key, value in _entries_of(item, where)}
        for item in given
    ]


def _entries_of(given: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    pairs = list(given.items()) if isinstance(given, dict) else []
    if not isinstance(given, dict | None) or any(not isinstance(value, dict) for _, value in pairs):
        raise unreadable("the prompt's log probabilities have another form", where=where, actual=given)
    return pairs


def _prompt_id(key: str, names: TokenNames, where: str) -> int:
    token_id = int(key) if key.isdecimal() and len(key) < 20 else key
    if not names.has(token_id):
        raise unreadable("the answer names a token that the model does not have", where=where, actual=key)
    return int(token_id)


def _prompt_logprobs(entries: Sequence[ParsedToken], prompt: Sequence[int]) -> list[dict[int, float | None]] | None:
    """Return the log probabilities of the prompt's tokens.

    Raises:
        HarnessError: ENDPOINT_TOKENS: the prompt comes back with other tokens.
    """
    if not entries:
        return None
    pairs = zip(prompt, entries, strict=False)
    told = [sent if entry.token_id is None else entry.token_id for sent, entry in pairs]
    if told != list(prompt):
        at = next((at for at, pair in enumerate(zip(told, prompt, strict=False)) if pair[0] != pair[1]), len(told))
        raise HarnessError(
            Code.ENDPOINT_TOKENS,
            "the echo of the prompt has other tokens than were sent",
            where=f"position {at}",
            expected=prompt[at] if at < len(prompt) else "the end",
            actual=told[at] if at < len(told) else "the end",
            hint="the server tokenises anew: look for a second begin-of-text token",
        )
    return _by_id(entries, prompt)
