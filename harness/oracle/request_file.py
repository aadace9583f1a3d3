"""What is asked under load, and when: lengths and arrivals from distributions, or all from a file."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.files import parse_json, read_text
from harness.errors import Code, HarnessError
from harness.oracle.requests import Prompt

_KEYS = ("at", "max_tokens", "prompt", "prompt_token_ids", "prompt_tokens")
_MOST_REQUESTS = 1_000_000
_MOST_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of the load."""

    at_s: float
    """When it is sent, in seconds after the first."""
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """An open loop: requests come when they come, whether earlier ones are answered or not.

    Bursts begin as a Poisson process does, at gaps that are exponentially distributed.
    """

    rate: float
    """Requests a second on average; infinity: all at once."""
    burst: int = 1
    """Requests that come together."""

    def times(self, number: int, rng: random.Random) -> list[float]:
        """Return the seconds after the first at which so many requests are sent."""
        times, now = list[float](), 0.0
        while len(times) < number:
            times += [now] * min(self.burst, number - len(times))
            now += rng.expovariate(self.rate / self.burst) if math.isfinite(self.rate) else 0.0
        return times


def parse_lengths(text: str, option: str) -> Callable[[random.Random], int]:
    """Return a distribution of numbers of tokens: `128`, `64..512` (uniform), or `exp:256` (exponential, that mean).

    Raises:
        HarnessError: BAD_OPTION.
    """
    try:
        if text.startswith("exp:"):
            mean = float(text.removeprefix("exp:"))
            if 1 <= mean <= _MOST_TOKENS:
                return lambda rng: 1 + int(rng.expovariate(1 / mean))
        else:
            low, _, high = text.partition("..")
            first, last = int(low), int(high or low)
            if 1 <= first <= last <= _MOST_TOKENS:
                return lambda rng: rng.randint(first, last)
    except ValueError:
        pass
    raise HarnessError(
        Code.BAD_OPTION,
        "this is no distribution of lengths",
        where=option,
        expected="128, 64..512 or exp:256",
        actual=text,
    )


def drawn_requests(
    number: int,
    prompt_tokens: Callable[[random.Random], int],
    new_tokens: Callable[[random.Random], int],
    arrivals: Arrivals,
    *,
    ids: Sequence[int],
    seed: int,
) -> list[LoadRequest]:
    """Return requests with prompts of random tokens, which no server has in its prefix cache.

    `prompt_tokens` and `new_tokens` draw the lengths of a prompt and of an answer; prompts are made of `ids`.
    """
    rng = random.Random(seed)
    times = arrivals.times(number, rng)
    return [
        LoadRequest(
            at_s=at,
            prompt=Prompt(token_ids=tuple(rng.choices(ids, k=prompt_tokens(rng))), max_new_tokens=new_tokens(rng)),
        )
        for at in times
    ]


def read_requests(
    path: Path,
    tokenize: Callable[[str], Sequence[int]],
    arrivals: Arrivals,
    *,
    ids: Sequence[int],
    seed: int,
    max_tokens: Callable[[random.Random], int],
) -> list[LoadRequest]:
    """Return the requests of a file of JSON lines.

    Each line has `prompt`, `prompt_token_ids`, or a number of random `prompt_tokens`, and may have `max_tokens` and
    `at`, the seconds after the first. `tokenize` returns the tokens of a prompt that is text; random prompts are made
    of `ids`. Requests without `at` are sent as `arrivals` says, and `max_tokens` draws the length of an answer where a
    line has no `max_tokens`.

    Raises:
        HarnessError: BAD_OPTION: the file cannot be read, or a line cannot be understood.
    """
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if not 0 < len(lines) <= _MOST_REQUESTS:
        raise _bad("the file has no request, or too many", path, actual=f"{len(lines):,}")
    rng = random.Random(seed)
    times = arrivals.times(len(lines), rng)
    requests = []
    for number, (line, drawn) in enumerate(zip(lines, times, strict=True), 1):
        fields = _fields(line, f"{path}, line {number}")
        prompt = Prompt(
            token_ids=_prompt(fields, tokenize, ids, rng, f"{path}, line {number}"),
            max_new_tokens=fields.get("max_tokens") or max_tokens(rng),
        )
        requests.append(LoadRequest(at_s=float(fields.get("at", drawn)), prompt=prompt))
    return sorted(requests, key=lambda request: request.at_s)


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _bad("the requests cannot be read", path, actual=str(error)) from error


def _fields(line: str, where: str) -> Mapping[str, Any]:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise _bad("this line is no JSON", where, actual=str(error)) from error
    if not isinstance(fields, dict) or not fields.keys() <= set(_KEYS):
        raise _bad("this line has other fields", where, expected=", ".join(_KEYS), actual=line[:200])
    for name, least in (("max_tokens", 1), ("prompt_tokens", 1), ("at", 0)):
        value = fields.get(name, least)
        is_number = isinstance(value, int if name != "at" else int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= _MOST_TOKENS:
            raise _bad(f"{name} is no number from {least}", where, actual=value)
    return fields


def _prompt(
    fields: Mapping[str, Any],
    tokenize: Callable[[str], Sequence[int]],
    ids: Sequence[int],
    rng: random.Random,
    where: str,
) -> tuple[int, ...]:
    text, token_ids, length = (fields.get(name) for name in ("prompt", "prompt_token_ids", "prompt_tokens"))
    if sum(item is not None for item in (text, token_ids, length)) != 1:
        raise _bad("a line has one of prompt, prompt_token_ids and prompt_tokens", where, actual=sorted(fields))
    if isinstance(length, int):
        return tuple(rng.choices(ids, k=length))
    if isinstance(text, str):
        return tuple(tokenize(text))
    if isinstance(token_ids, list) and token_ids and all(type(item) is int for item in token_ids):
        return tuple(token_ids)
    raise _bad("the prompt is neither text nor token ids", where, actual=str(text or token_ids)[:200])


def _bad(what: str, where: object, **details: Any) -> HarnessError:
    return HarnessError(Code.BAD_OPTION, what, where=f"--requests {where}", **details)
