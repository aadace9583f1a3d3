"""Completions: the bodies of requests in a server's dialect, and answers in all the forms that servers have."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.names import TokenNames

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Logprobs = Sequence[Mapping[int, float | None]]
"""For each token: log probabilities by token id, of the token itself and of the likeliest ones. None stands for `null`.
"""


_OF_THE_SAMPLER = ("ignore_eos", "repetition_penalty", "repeat_penalty")
"""Options that change which tokens are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The fields that the bodies of completions may have, as the probe found them."""

    model: str
    takes_token_ids: bool = True
    """Whether prompts may be token ids; else they are text."""
    num_logprobs: int = 0
    """Likeliest tokens to ask for; 0: no log probabilities."""
    num_top: int = 0
    """Likeliest tokens that the server gives where so many are asked for."""
    options: tuple[tuple[str, Any], ...] = ()
    """Fields outside of OpenAI's interface that name token ids, or that go on after an end of text."""
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

    def plain(self, *, as_text: bool = False) -> "Dialect":
        """Return the dialect of a client that asks for text alone: no log probabilities, no ids of tokens."""
        options = tuple(option for option in self.options if option[0] in _OF_THE_SAMPLER)
        takes_token_ids = self.takes_token_ids and not as_text
        return replace(self, takes_token_ids=takes_token_ids, num_logprobs=0, num_top=0, options=options)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A server's answer to one request, in tokens."""

    token_ids: tuple[int, ...]
    """Without an end-of-sequence token that the server does not name."""
    finish_reason: str | None
    """`length`, `stop`, or whatever else the server says."""
    logprobs: Logprobs | None = None
    """Of each new token; None if the server gives none."""
    logprobs_of: tuple[int | None, ...] = ()
    """Tokens that the log probabilities are of, by the server's names; None where a name tells no id."""
    num_named: tuple[int, ...] = ()
    """Likeliest tokens that the server names for each new token, with those whose name tells no id."""
    prompt_logprobs: Logprobs | None = None
    """Of each token of the prompt; the first is empty. None if the server gives none."""
    num_unechoed: int = 0
    """Tokens at the prompt's beginning that its echo leaves out: the one after them has no log probability."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt by the server's own count (`usage`)."""
    num_new_tokens: int | None = None
    """New tokens by the server's own count."""
    text: str | None = None
    misspelt: str | None = None
    """What the tokens are as text, where the server names their ids beside another text."""

    def logprobs_at(self, step: int) -> Mapping[int, float | None] | None:
        """Return the log probabilities of one new token; None if there are none."""
        return self.logprobs[step] if self.logprobs is not None and step < len(self.logprobs) else None


def wrong_length(num: int, num_asked: int, reason: str | None) -> str | None:
    """Return what is wrong with an answer of so many tokens that ends for a reason; None: nothing."""
    if num > num_asked:
        return f"{num} tokens where {num_asked} were asked for"
    if reason not in ("length", "stop"):
        return f"the answer ends after {num} of {num_asked} tokens with finish_reason {reason!r}"
    if reason == "length" and num < num_asked:
        return f"{num} tokens where {num_asked} were asked for, and finish_reason is 'length'"
    return None


def read_answer(
    body: Any, prompt: Sequence[int], names: TokenNames, *, where: str, is_echoed: bool = False
) -> Completion:
    """Return the only choice of a completion.

    `is_echoed` says whether the prompt was asked for as well; errors name `where`.

    Raises:
        HarnessError: ENDPOINT_UNREADABLE: it is no completion; ENDPOINT_CANNOT: its tokens cannot be told;
            ENDPOINT_TOKENS: the prompt comes back with other tokens.
    """
    choice = only_choice(body, where=where)
    text, reason = choice.get("text"), choice.get("finish_reason")
    num_counted = usage_count(body, "completion_tokens")
    entries, num_unechoed = logprob_entries(choice.get("logprobs"), names, where=where), 0
    num_echoed = _num_echoed(entries, prompt, num_counted) if is_echoed else 0
    if entries is not None and num_echoed and num_echoed == len(prompt) - 1:
        entries, num_unechoed = _with_omitted_entry(entries, prompt)
        num_echoed = len(prompt)
    new_entries = None if entries is None else entries[num_echoed:]
    token_ids = _token_ids(choice, new_entries, names, where=where)
    if token_ids is None and isinstance(text, str):
        num_new = num_counted if new_entries is None else len(new_entries)
        new_text = _new_text(text, num_echoed, prompt, names)
        token_ids = _retokenised(names.continuation(prompt, new_text, num_new), new_entries)
    if token_ids is None:
        raise _unknown_tokens(text, where)
    new_entries = None if new_entries is None else new_entries[: len(token_ids)]
    is_named = isinstance(choice.get("token_ids"), list) and names.is_there and not is_echoed
    return Completion(
        text=text if isinstance(text, str) else None,
        misspelt=_misspelt(token_ids, text, names) if is_named and isinstance(text, str) else None,
        token_ids=token_ids,
        finish_reason=reason if isinstance(reason, str) else None if reason is None else repr(reason)[:80],
        logprobs=None if new_entries is None else _by_id(new_entries, token_ids),
        logprobs_of=tuple(entry.token_id for entry in new_entries or ()),
        num_named=tuple(entry.num_named for entry in new_entries or ()),
        prompt_logprobs=_vllm_prompt_logprobs(choice, prompt, names, where=where)
        or _prompt_logprobs(entries[:num_echoed] if entries else [], prompt),
        num_unechoed=num_unechoed,
        num_prompt_tokens=usage_count(body, "prompt_tokens"),
        num_new_tokens=num_counted,
    )


def _unknown_tokens(text: Any, where: str) -> HarnessError:
    return HarnessError(
        Code.ENDPOINT_CANNOT,
        "the tokens of an answer cannot be told from its text",
        where=where,
        actual=repr(text)[:200],
        hint="a server that names token ids (return_token_ids, return_tokens_as_token_ids) can be judged",
    )


def read_text_answer(
    body: Any, prompt: Sequence[int], names: TokenNames, first: Completion | None, *, where: str
) -> Completion:
    """Return a completion that names no tokens: the first one's, if its text is the same; raises as `read_answer`.

    The last token may end within a character: a whole answer has a replacement character there, a stream may not.
    """
    text = only_choice(body, where=where).get("text")
    whole = None if first is None else first.text
    if first and whole is not None and isinstance(text, str) and text.rstrip("\ufffd") == whole.rstrip("\ufffd"):
        body = {**body, "choices": [{**body["choices"][0], "token_ids": list(first.token_ids)}]}
    try:
        return read_answer(body, prompt, names, where=where)
    except HarnessError as error:
        what = "the text is another one than in the first answer, and no tokens can be told from it"
        expected = None if first is None else repr(first.text)[:80]
        raise HarnessError(error.code, what, where=where, expected=expected, actual=error.actual) from error


def _misspelt(token_ids: Sequence[int], text: str, names: TokenNames) -> str | None:
    """Return the text of tokens if it is another one, but for spaces, special tokens and half of a character."""
    spellings = [names.decode(token_ids, with_special=with_special) for with_special in (False, True)]
    bare, *others = ("".join(item.replace("\ufffd", "").split()) for item in (text, *spellings))
    return None if bare in others else spellings[0]


def only_choice(body: Any, *, where: str) -> dict[str, Any]:
    """Return the first choice of an answer; raises HarnessError (ENDPOINT_UNREADABLE)."""
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise unreadable("the answer has no choices", where=where, actual=body)
    return choices[0]


def choices_of(body: Any, num_asked: int) -> list[dict[str, Any]]:
    """Return an answer of several choices as answers of one; raises HarnessError (ENDPOINT_TOKENS): there are fewer."""
    only_choice(body, where=COMPLETIONS)
    if len(body["choices"]) != num_asked:
        what, actual = "there are not as many answers as were asked for", len(body["choices"])
        raise HarnessError(Code.ENDPOINT_TOKENS, what, where=COMPLETIONS, expected=num_asked, actual=actual)
    return [{"choices": [choice]} for choice in body["choices"]]


def usage_count(body: Any, name: str) -> int | None:
    """Return one of the server's own counts of tokens; None if the answer does not have it."""
    usage = body.get("usage") if isinstance(body, dict) else None
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def unreadable(what: str, *, where: str, actual: object) -> HarnessError:
    """Return an error about a body of another form."""
    return HarnessError(Code.ENDPOINT_UNREADABLE, what, where=where, actual=repr(actual)[:200])


def join_events(events: Sequence[Any]) -> dict[str, Any]:
    """Join the events of a streamed completion to the body of the whole answer."""
    choice: dict[str, Any] = {"text": "", "finish_reason": None}
    body: dict[str, Any] = {"choices": [choice]}
    for event in events:
        if isinstance(event, dict) and event.get("usage"):
            body["usage"] = event["usage"]
        if isinstance(event, dict) and event.get("choices") == []:
            continue
        part = only_choice(event, where=COMPLETIONS)
        if isinstance(part.get("text"), str):
            choice["text"] += part["text"]
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        if isinstance(part.get("token_ids"), list):
            _extend(choice, {"token_ids": part["token_ids"]})
        if isinstance(part.get("logprobs"), dict):
            _extend(choice.setdefault("logprobs", {}), part["logprobs"])
    return body


def _extend(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, values in part.items():
        if isinstance(values, list):
            whole[name] = [*whole.get(name, ()), *values]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToken:
    """One token with its log probabilities; those of tokens whose id cannot be told are left out."""

    token_id: int | None = None
    has_logprob: bool = False
    """Whether the answer has a place for the token's log probability, which may be `null`."""
    logprob: float | None = None
    top: Mapping[int, float | None] = field(default_factory=dict)
    num_named: int = 0

    @classmethod
    def of(
        cls, token_id: int | None, logprob: Any, top: Iterable[tuple[int | None, Any]], *, has_logprob: bool = True
    ) -> "ParsedToken":
        """Return a token with the likeliest tokens beside it."""
        pairs = list(top)
        return cls(
            token_id=token_id,
            has_logprob=has_logprob,
            logprob=_number(logprob),
            top={top_id: _number(value) for top_id, value in pairs if top_id is not None},
            num_named=len(pairs),
        )

    def logprobs(self, token_id: int) -> dict[int, float | None]:
        """Return all log probabilities, with the token's own under the id that is known from elsewhere."""
        return {**self.top, **({token_id: self.logprob} if self.has_logprob else {})}


def logprob_entries(logprobs: Any, names: TokenNames, *, where: str) -> list[ParsedToken] | None:
    """Return the tokens of an answer's `logprobs`; None if it has none; raises HarnessError (ENDPOINT_UNREADABLE)."""
    if not isinstance(logprobs, dict):
        return None
    if isinstance(logprobs.get("content"), list):
        return [_chat_entry(entry, names, where) for entry in logprobs["content"]]
    tokens, chosen = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(tokens, list):
        return None
    values, tops = _padded(chosen, len(tokens)), _padded(logprobs.get("top_logprobs"), len(tokens))

    def known(name: str) -> int | None:
        return _known(names.id_of(name), names, where)

    return [
        ParsedToken.of(
            known(str(name)),
            value,
            [(known(top_name), logprob) for top_name, logprob in (top if isinstance(top, dict) else {}).items()],
            has_logprob=isinstance(chosen, list),
        )
        for name, value, top in zip(tokens, values, tops, strict=True)
    ]


def _chat_entry(entry: Any, names: TokenNames, where: str) -> ParsedToken:
    """Read an entry of a chat's log probabilities, which llama.cpp's server gives for completions as well."""
    if not isinstance(entry, dict):
        raise unreadable("a token's log probabilities have another form", where=where, actual=entry)

    def known(named: Mapping[str, Any]) -> int | None:
        token_id = named.get("id", named.get("token_id"))
        return _known(token_id if isinstance(token_id, int) else names.id_of(str(named.get("token"))), names, where)

    top = entry.get("top_logprobs")
    likeliest = [item for item in top if isinstance(item, dict)] if isinstance(top, list) else []
    return ParsedToken.of(
        known(entry), entry.get("logprob"), [(known(item), item.get("logprob")) for item in likeliest]
    )


def _known(token_id: object, names: TokenNames, where: str) -> int | None:
    return None if token_id is None else _checked(token_id, names, where)


def _checked(token_id: object, names: TokenNames, where: str) -> int:
    """Return the id of a token; raises HarnessError (ENDPOINT_UNREADABLE) if the model has no such token."""
    if not names.has(token_id):
        raise unreadable("the answer names a token that the model does not have", where=where, actual=token_id)
    assert isinstance(token_id, int)
    return token_id


def _number(value: Any) -> float | None:
    """Return a number as float64; None for `null` and for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(max(min(value, 1e300), -1e300)) if isinstance(value, int) else value  # JSON's have no largest


def _padded(values: Any, length: int) -> list[Any]:
    known = values if isinstance(values, list) else []
    return [*known, *[None] * (length - len(known))][:length]


def _num_echoed(entries: Sequence[ParsedToken] | None, prompt: Sequence[int], num_new: int | None) -> int:
    """Return how many entries are of the prompt: the first of all has no log probability then."""
    if not entries or entries[0].logprob is not None:
        return 0
    return len(prompt) if num_new is None else max(0, len(entries) - num_new)


def _with_omitted_entry(entries: Sequence[ParsedToken], prompt: Sequence[int]) -> tuple[list[ParsedToken], int]:
    """Return the entries with the one that llama-cpp-python omits, and how many are missing at the begin: 0 or 1.

    It omits the last token of the prompt, or begin-of-text.
    """
    if all(entry.token_id in (None, sent) for entry, sent in zip(entries, prompt, strict=False)):
        return [*entries, ParsedToken()], 0
    return [ParsedToken(), *entries], 1


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
    choice: Mapping[str, Any], entries: Sequence[ParsedToken] | None, names: TokenNames, *, where: str
) -> tuple[int, ...] | None:
    """Return the new tokens that the server names by their ids; None if any name tells no id."""
    named = choice.get("token_ids")
    if isinstance(named, list):
        return tuple(_checked(token_id, names, where) for token_id in named)
    token_ids = [None] if entries is None else [entry.token_id for entry in entries]
    return None if None in token_ids else tuple(token_id for token_id in token_ids if token_id is not None)


def _by_id(entries: Sequence[ParsedToken], token_ids: Sequence[int]) -> list[dict[int, float | None]]:
    return [entry.logprobs(token_id) for entry, token_id in zip(entries, token_ids, strict=False)]


def _vllm_prompt_logprobs(
    choice: Mapping[str, Any], prompt: Sequence[int], names: TokenNames, *, where: str
) -> list[dict[int, float | None]] | None:
    """Read vLLM's `prompt_logprobs`: for each token a mapping from ids, as text, to log probabilities."""
    tokens = choice.get("prompt_logprobs")
    if not isinstance(tokens, list):
        return None
    if len(tokens) > len(prompt):
        what = "there are log probabilities of more tokens of the prompt than were sent"
        raise HarnessError(Code.ENDPOINT_TOKENS, what, where=where, expected=len(prompt), actual=len(tokens))
    for token in tokens:
        is_known = token is None or (isinstance(token, dict) and all(isinstance(item, dict) for item in token.values()))
        if not is_known:
            raise unreadable("the prompt's log probabilities have another form", where=where, actual=token)

    def token_id(key: str) -> int:
        return _checked(int(key) if key.isdecimal() and len(key) < 20 else key, names, where)

    return [{token_id(key): _number(item.get("logprob")) for key, item in (token or {}).items()} for token in tokens]


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
