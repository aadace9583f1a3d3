"""One record of a log as a row: fields found by any of their names, columns aligned with tokens, values checked.

A column that is shorter than the tokens stands at the last of them: of a response, or of all tokens but the first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import Code, HarnessError
from harness.formats.rollout.names import FIELDS, SAMPLING, names_of
from harness.formats.rollout.row import Rollout, Sampling

_MOST_LOGPROB = 1e-5
"""A logit minus the logarithm of the sum may be above 0 by a rounding of the logit in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRow:
    """A row, and what only the file as a whole can judge."""

    rollout: Rollout
    versions: tuple[str, ...]
    """Versions of the weights that the record names, of either side."""
    num_padding: int


def expanded(record: Any, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the record, or the rows of one that is a batch: its fields are lists with an entry a row.

    Raises:
        HarnessError: BAD_ROLLOUT_FILE: it is no object; ROLLOUT_MISALIGNED: the lists have different lengths.
    """
    if not isinstance(record, dict):
        what, expected = "a row is no JSON object", "an object with token ids and log probabilities"
        raise HarnessError(
            Code.BAD_ROLLOUT_FILE, what, where=where, expected=expected, actual=f"{type(record).__name__}"
        )
    tokens = next((_found(record, field) for field in ("response", "sequence") if _found(record, field)), None)
    if not (isinstance(tokens, list) and tokens and isinstance(tokens[0], list)):
        yield record
        return
    known = {name for field in FIELDS for name in names_of(field)} - {"meta_info", "sampling_params"}
    lists = {name: value for name, value in record.items() if name in known and isinstance(value, list)}
    for name, value in lists.items():
        if len(value) != len(tokens):
            raise _misaligned(where, f"{name} has another number of rows than the tokens", len(tokens), len(value))
    for at in range(len(tokens)):
        yield {**record, **{name: value[at] for name, value in lists.items()}}


def parse_row(record: Mapping[str, Any], where: str) -> ParsedRow:
    """Return the row of a record.

    Raises:
        HarnessError: ROLLOUT_WITHOUT_TOKENS, ROLLOUT_MISALIGNED, BAD_ROLLOUT_LOGPROB.
    """
    tokens, attended, num_response = _tokens(record, where)
    own = _column(record, "mask", len(tokens), where)
    engine, trainer = (_logprobs(record, side, len(tokens), where) for side in ("engine", "trainer"))
    if num_response is None:
        num_response = _response_length(record, own, len(tokens))
    num_before = len(tokens) - num_response
    mask = [at >= num_before and (own is None or bool(own[at])) for at in range(len(tokens))]
    kept = [at for at, is_there in enumerate(attended) if is_there]
    if any(mask[at] and not attended[at] for at in range(len(tokens)) if own is not None):
        raise _misaligned(where, "the mask counts tokens that the attention mask takes out", "a mask within it", "")
    if engine is None:
        what = "the row has no log probabilities of the engine"
        raise HarnessError(
            Code.ROLLOUT_WITHOUT_TOKENS, what, where=where, expected=" or ".join(names_of("engine")), actual=[*record]
        )
    experts = _experts(record, attended, where)
    rollout = Rollout(
        row=0,
        tokens=tuple(tokens[at] for at in kept),
        num_prompt=sum(at < num_before for at in kept),
        mask=tuple(mask[at] for at in kept),
        engine=_kept(engine, kept, mask, where),
        trainer=None if trainer is None else _kept(trainer, kept, mask, where),
        sampling=_sampling(record, where),
        experts=experts,
        weight_version=next(iter(_versions(record, "weight_version")), None),
        pack=None if _found(record, "pack") is None else str(_found(record, "pack")),
    )
    versions = {*_versions(record, "weight_version"), *_versions(record, "trainer_version")}
    return ParsedRow(rollout=rollout, versions=tuple(sorted(versions)), num_padding=len(tokens) - len(kept))


def _found(record: Mapping[str, Any], field: str) -> Any:
    return next((record[name] for name in names_of(field) if record.get(name) is not None), None)


def _tokens(record: Mapping[str, Any], where: str) -> tuple[list[int], list[bool], int | None]:
    """Return token ids, which of them are no padding, and how many belong to the response."""
    sequence, response, prompt = (_found(record, field) for field in ("sequence", "response", "prompt"))
    if sequence is not None:
        attention = _found(record, "attention_mask")
        if attention is not None and len(attention) != len(sequence):
            raise _misaligned(where, "the attention mask does not fit the tokens", len(sequence), len(attention))
        num_response = _found(record, "num_response")
        if num_response is None and response is not None:
            num_response = len(response)
        attended = [True] * len(sequence) if attention is None else [bool(each) for each in attention]
    elif response is not None:
        masked, prompt = _found(record, "prompt_mask"), prompt or []
        if masked is not None and len(masked) != len(prompt):
            raise _misaligned(where, "the prompt's mask does not fit the prompt", len(prompt), len(masked))
        attended = [True] * len(prompt) if masked is None else [bool(each) for each in masked]
        sequence, num_response = [*prompt, *response], len(response)
        attended += [True] * len(response)
    if not sequence or num_response == 0 or not any(attended):
        raise HarnessError(
            Code.ROLLOUT_WITHOUT_TOKENS,
            "the row has no tokens of a response",
            where=where,
            expected="token ids of prompt and response, or of both as one sequence",
            actual=f"fields {', '.join(map(str, record)) or 'none'}",
            hint="docs/rollouts.md has a table of the fields' names",
        )
    if not all(type(token) is int for token in sequence):
        odd = next(token for token in sequence if type(token) is not int)
        raise HarnessError(
            Code.ROLLOUT_WITHOUT_TOKENS, "a token id is no integer", where=where, expected="ids", actual=repr(odd)[:60]
        )
    if num_response is not None and not 0 < num_response <= len(sequence):
        raise _misaligned(where, "the response is longer than the tokens", f"1 to {len(sequence)}", num_response)
    return sequence, attended, num_response


def _column(record: Mapping[str, Any], field: str, num_tokens: int, where: str) -> list[Any] | None:
    """Return a field with an entry for each token, None before its first."""
    values = _found(record, field)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) > num_tokens:
        actual = len(values) if isinstance(values, list) else repr(values)[:60]
        name = next(name for name in names_of(field) if record.get(name) is not None)
        raise _misaligned(where, f"{name} does not fit the tokens", f"a list of at most {num_tokens}", actual)
    return [*[None] * (num_tokens - len(values)), *values]


def _response_length(record: Mapping[str, Any], mask: list[Any] | None, num_tokens: int) -> int:
    """Return how many tokens belong to the response, by the first that is counted, or has a value."""
    if mask is not None and any(mask):
        return num_tokens - next(at for at, counts in enumerate(mask) if counts)
    values = _found(record, "engine")
    return len(values) if isinstance(values, list) and values else num_tokens


def _logprobs(record: Mapping[str, Any], side: str, num_tokens: int, where: str) -> list[Any] | None:
    values = _column(record, side, num_tokens, where)
    given, response = _found(record, side), _found(record, "response")
    if given is not None and response is not None and len(given) not in (len(response), num_tokens, num_tokens - 1):
        raise _misaligned(where, f"the {side}'s log probabilities do not fit the response", len(response), len(given))
    return values


def _kept(values: Sequence[Any], kept: Sequence[int], mask: Sequence[bool], where: str) -> tuple[float | None, ...]:
    """Return the values of tokens that count; others may be anything: padding is often 0 or NaN.

    Raises:
        HarnessError: BAD_ROLLOUT_LOGPROB.
    """

    def checked(at: int) -> float | None:
        value = values[at]
        if value is None or not mask[at]:
            return None
        number = _number(value)
        if number is None or not math.isfinite(number) or number > _MOST_LOGPROB:
            raise HarnessError(
                Code.BAD_ROLLOUT_LOGPROB,
                "this is no log probability",
                where=f"{where}, token {at}",
                expected="a finite number of nats, at most 0",
                actual=repr(value)[:60],
                hint="take the token out by the mask, or write null: it is counted, and not compared",
            )
        return min(number, 0.0)

    return tuple(checked(at) for at in kept)


def _experts(record: Mapping[str, Any], attended: Sequence[bool], where: str) -> tuple[tuple[int, ...], ...] | None:
    values = _found(record, "experts")
    if values is None:
        return None
    if not isinstance(values, list) or not len(attended) - 1 <= len(values) <= len(attended):
        actual = len(values) if isinstance(values, list) else repr(values)[:60]
        raise _misaligned(where, "the routed experts do not fit the tokens", f"{len(attended)}, or one less", actual)
    rows = tuple(tuple(_flat(row)) for row, is_there in zip(values, attended, strict=False) if is_there)
    if len({len(row) for row in rows}) > 1 or not all(type(each) is int for row in rows for each in row):
        raise _misaligned(where, "the routed experts differ in number from token to token", "[layers][k] ids", "")
    return rows


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _sampling(record: Mapping[str, Any], where: str) -> Sampling:
    found = _found(record, "sampling")
    given = {**(found if isinstance(found, dict) else {}), **record}
    values = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    sound = {"temperature": lambda x: x > 0, "top_p": lambda x: 0 < x <= 1, "min_p": lambda x: 0 <= x < 1}
    for name, value in values.items():
        number = _number(value)
        if number is None or not sound.get(name, math.isfinite)(number):
            what = f"{name} of the sampling makes no sense"
            raise _misaligned(where, what, "temperature > 0, 0 < top_p <= 1, 0 <= min_p < 1", repr(value)[:60])
    if "top_k" in values:
        values["top_k"] = max(0, int(values["top_k"]))  # -1 means all tokens, as 0 does
    return Sampling(**values)


def _number(value: Any) -> float | None:
    """Return a number as a float; None for anything else, and for an integer that no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _versions(record: Mapping[str, Any], field: str) -> tuple[str, ...]:
    found = _found(record, field)
    several = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys(map(str, several)))


def _misaligned(where: str, what: str, expected: object, actual: object) -> HarnessError:
    hint = "docs/rollouts.md says how columns are aligned"
    return HarnessError(Code.ROLLOUT_MISALIGNED, what, where=where, expected=expected, actual=actual, hint=hint)
