"""Bodies of answers in the forms that servers have: OpenAI's lists, the entries of chats, vLLM's additions."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.campaigns.endpoint.answer import Answer
from harness.campaigns.endpoint.names import TokenNames
from harness.errors import Code, HarnessError


def read_answer(body: Any, prompt: Sequence[int], names: TokenNames, *, where: str, seconds: float = 0.0) -> Answer:
    """Return the only choice of a completion.

    Args:
        body: JSON of the answer.
        prompt: the tokens that were sent.
        names: what tokens are called.
        where: named in errors.
        seconds: how long the answer took.

    Raises:
        HarnessError: ENDPOINT_UNREADABLE: it is no completion; ENDPOINT_CANNOT: its tokens cannot be told.
    """
    choice = only_choice(body, where=where)
    text, given = choice.get("text"), choice.get("logprobs")
    entries = logprob_entries(given, names)
    num_echoed = _num_echoed(entries, prompt, _count(body, "completion_tokens"))
    if entries is not None and num_echoed == len(prompt) - 1:
        entries, num_echoed = [Entry(None, None, {}, 0), *entries], len(prompt)  # without the begin-of-text token
    token_ids = _token_ids(choice, entries, num_echoed)
    if token_ids is None:
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
    prompt_logprobs = _vllm_prompt_logprobs(choice) or (entries[:num_echoed] if entries and num_echoed else None)
    own = entries[num_echoed:][: len(token_ids)] if entries is not None else None
    return Answer(
        token_ids=token_ids,
        finish_reason=choice.get("finish_reason"),
        logprobs=None if own is None else _by_id(own, token_ids),
        num_top=min((entry.num_top for entry in own), default=0) if own else 0,
        prompt_logprobs=_prompt_logprobs(prompt_logprobs, prompt),
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


class Entry:
    """One token with its log probabilities; those of tokens whose id cannot be told are left out."""

    def __init__(
        self, token_id: int | None, logprob: float | None, top: Mapping[int | None, float], num_top: int
    ) -> None:
        self.token_id, self.logprob = token_id, logprob
        self.top = {key: value for key, value in top.items() if key is not None}
        self.num_top = num_top if len(self.top) == num_top else 0

    def logprobs(self, token_id: int) -> dict[int, float]:
        """Return all log probabilities, given what the token's id is."""
        return self.top | ({} if self.logprob is None else {token_id: self.logprob})


def logprob_entries(given: Any, names: TokenNames) -> list[Entry] | None:
    """Return the tokens of an answer's `logprobs`; None if it has none."""
    if not isinstance(given, dict):
        return None
    if isinstance(given.get("content"), list):
        return [_chat_entry(entry, names) for entry in given["content"] if isinstance(entry, dict)]
    tokens = given.get("tokens")
    if not isinstance(tokens, list):
        return None
    own = _padded(given.get("token_logprobs"), len(tokens))
    top = _padded(given.get("top_logprobs"), len(tokens))
    return [_entry(str(name), *pair, names) for name, pair in zip(tokens, zip(own, top, strict=True), strict=True)]


def _entry(name: str, logprob: Any, top: Any, names: TokenNames) -> Entry:
    pairs = top.items() if isinstance(top, dict) else ()
    known = {names.id_of(name): float(value) for name, value in pairs if isinstance(value, int | float)}
    own = float(logprob) if isinstance(logprob, int | float) else None
    return Entry(names.id_of(name), own, known, len(pairs))


def _chat_entry(entry: Mapping[str, Any], names: TokenNames) -> Entry:
    """Read an entry of a chat's log probabilities, which llama.cpp's server gives for completions as well."""
    alternatives = [each for each in entry.get("top_logprobs") or () if isinstance(each, dict)]
    top = {_id(each, names): float(each["logprob"]) for each in alternatives if _has_logprob(each)}
    own = float(entry["logprob"]) if _has_logprob(entry) else None
    return Entry(_id(entry, names), own, top, len(alternatives))


def _has_logprob(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("logprob"), int | float)


def _id(entry: Mapping[str, Any], names: TokenNames) -> int | None:
    own = entry.get("id", entry.get("token_id"))
    return own if isinstance(own, int) else names.id_of(str(entry.get("token")))


def _padded(values: Any, length: int) -> list[Any]:
    found = values if isinstance(values, list) else []
    return [*found, *[None] * (length - len(found))][:length]


def _count(body: Mapping[str, Any], name: str) -> int | None:
    usage = body.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else None


def _num_echoed(entries: Sequence[Entry] | None, prompt: Sequence[int], num_new: int | None) -> int:
    """Return how many entries are of the prompt: the first of all has no log probability then."""
    if not entries or entries[0].logprob is not None:
        return 0
    return len(prompt) if num_new is None else max(0, len(entries) - num_new)


def _new_text(text: object, num_echoed: int, prompt: Sequence[int], names: TokenNames) -> str:
    before = names.text_of(prompt) if num_echoed and names.is_there else None
    return str(text).removeprefix(before or "")


def _retokenised(token_ids: tuple[int, ...] | None, entries: Sequence[Entry] | None) -> tuple[int, ...] | None:
    """Return the tokens of a text if they are those that the server names, as far as the names tell."""
    if token_ids is None or entries is None:
        return token_ids
    pairs = zip(token_ids, entries, strict=True)
    return token_ids if all(entry.token_id in (None, token_id) for token_id, entry in pairs) else None


def _token_ids(choice: Mapping[str, Any], entries: Sequence[Entry] | None, num_echoed: int) -> tuple[int, ...] | None:
    named = choice.get("token_ids")
    if isinstance(named, list) and all(isinstance(token_id, int) for token_id in named):
        return tuple(named)
    if entries is None:
        return None
    found = [entry.token_id for entry in entries[num_echoed:]]
    return None if None in found else tuple(token_id for token_id in found if token_id is not None)


def _by_id(entries: Sequence[Entry], token_ids: Sequence[int]) -> list[dict[int, float]]:
    return [entry.logprobs(token_id) for entry, token_id in zip(entries, token_ids, strict=False)]


def _vllm_prompt_logprobs(choice: Mapping[str, Any]) -> list[Entry] | None:
    """Read vLLM's `prompt_logprobs`: for each token a mapping from ids, as text, to log probabilities."""
    given = choice.get("prompt_logprobs")
    if not isinstance(given, list):
        return None
    return [
        Entry(None, None, {int(key): float(value["logprob"]) for key, value in each.items()}, 0)
        if isinstance(each, dict)
        else Entry(None, None, {}, 0)
        for each in given
    ]


def _prompt_logprobs(entries: Sequence[Entry] | None, prompt: Sequence[int]) -> list[dict[int, float]] | None:
    """Return the log probabilities of the prompt's tokens.

    Raises:
        HarnessError: ENDPOINT_TOKENS: the prompt comes back with other tokens.
    """
    if entries is None:
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
