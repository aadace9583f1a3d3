"""Rollouts from JSON lines or Parquet: what cannot be used is refused, what is left out is counted."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.rollout.format.record import FIELDS, SAMPLING, Record, Rollout, Rollouts, as_number, names_of
from harness.extensions.rollout.result import TokenCounts

_MOST_LOGPROB = 1e-5
"""A logit minus the logarithm of the sum may be above 0 by a rounding of the logit in float32."""
_NAMES = {*SAMPLING, *(name for field in FIELDS for name in names_of(field))}


def expanded(fields: Any, where: str) -> Iterator[Record]:
    """Yield the record, or the rows of one that is a batch: its fields are lists with an entry a row.

    Raises:
        HarnessError: BAD_ROLLOUT_FILE: it is no object; ROLLOUT_MISALIGNED: the lists have different lengths.
    """
    if not isinstance(fields, Mapping):
        what, expected = "a row is no JSON object", "an object with token ids and log probabilities"
        actual = type(fields).__name__
        raise HarnessError(Code.BAD_ROLLOUT_FILE, what, where=where, expected=expected, actual=actual)
    record = Record({name: _as_list(value) for name, value in fields.items()}, where)
    tokens = record.find("response") or record.find("sequence")
    if not (isinstance(tokens, list) and tokens and isinstance(_as_list(tokens[0]), list)):
        yield record
        return
    lists = {name: value for name, value in record.fields.items() if name in _NAMES and isinstance(value, list)}
    for name, value in lists.items():
        if len(value) != len(tokens):
            what = f"{name} has another number of rows than the tokens"
            raise record.misaligned(what, len(tokens), len(value))
    for at in range(len(tokens)):
        columns = {name: _as_list(value[at]) for name, value in lists.items()}
        yield Record({**record.fields, **columns}, f"{where}, row {at} of the batch")


def _as_list(value: Any) -> Any:
    """Return the list of a tensor, an array or a tuple: rows in memory may hold any of them."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def parse_row(record: Record, number: int) -> Rollout:
    """Return the row of a record, the `number`-th one of the log.

    Raises:
        HarnessError: ROLLOUT_WITHOUT_TOKENS, ROLLOUT_MISALIGNED, BAD_ROLLOUT_LOGPROB.
    """
    tokens, attended, num_response = _tokens(record)
    size = len(tokens)
    every = range(size + 1)
    lengths: Collection[int] = every if num_response is None else {num_response, size - 1, size}
    masks = [mask for field in ("mask", "tool_mask") if (mask := record.mask(field, size, lengths)) is not None]
    loss_mask = [all(item) for item in zip(*masks, strict=True)] if masks else None
    span = num_response
    if span is None and loss_mask is not None:
        span = len(record.find("mask") or record.find("tool_mask"))
    lengths = every if span is None else {span, size - 1, size}
    engine, trainer = (record.column(side, size, lengths) for side in ("engine", "trainer"))
    if engine is None:
        what = "the row has no log probabilities of the engine"
        raise record.without_tokens(what, " or ".join(names_of("engine")), _field_names(record))
    if num_response is None:
        num_response = _response_length(loss_mask, len(record.find("engine")), size)
    num_before = size - num_response
    mask = [at >= num_before and (loss_mask is None or loss_mask[at]) for at in range(size)]
    odd = next((at for at in range(size) if loss_mask is not None and mask[at] and not attended[at]), None)
    if odd is not None:
        what = "the mask counts tokens that the attention mask takes out"
        raise record.misaligned(what, "a mask within the attention mask", f"token {odd} counts")
    kept = [at for at, is_there in enumerate(attended) if is_there]
    pack = record.find("pack")
    return Rollout(
        row=number,
        tokens=tuple(tokens[at] for at in kept),
        num_prompt=sum(at < num_before for at in kept),
        num_padding=size - len(kept),
        mask=tuple(mask[at] for at in kept),
        engine=_logprobs(engine, kept, mask, record.where),
        trainer=None if trainer is None else _logprobs(trainer, kept, mask, record.where),
        sampling=record.sampling(),
        experts=_experts(record, attended),
        versions=record.versions(),
        pack=None if pack is None else str(pack),
    )


def _tokens(record: Record) -> tuple[list[int], list[bool], int | None]:
    """Return token ids, which of them are no padding, and how many belong to the response, if that is said."""
    sequence, response = record.entries("sequence"), record.entries("response")
    has_prompt = sequence is None or record.find("prompt_mask") is not None  # OpenRLHF has text under verl's name
    num_response, prompt = record.find("num_response"), (record.entries("prompt") if has_prompt else None) or []
    if sequence is None:
        sequence, num_response = [*prompt, *(response or [])], len(response or [])
    elif response is None and len(record.entries("mask") or ()) in (len(sequence) - 1, len(sequence)):
        num_response = None  # a mask of all tokens says more: OpenRLHF's length leaves padding out
    elif response is not None:
        num_response = len(response) if num_response is None else num_response
        if sequence[len(sequence) - len(response) :] != response:
            raise record.misaligned("the tokens do not end with the response", response[-3:], sequence[-3:])
    size = len(sequence)
    attended = record.mask("attention_mask", size, {size})
    if attended is None:
        of_prompt = record.mask("prompt_mask", len(prompt), {len(prompt)}) if size > len(prompt) else None
        attended = [True] * size if of_prompt is None else [*of_prompt, *[True] * (size - len(prompt))]
    if not sequence or num_response == 0 or not any(attended):
        expected = "token ids of prompt and response, or of both as one sequence"
        raise record.without_tokens("the row has no tokens of a response", expected, _field_names(record))
    odd = next((token for token in sequence if type(token) is not int), None)
    if odd is not None:
        raise record.without_tokens("a token id is no integer", "integers", repr(odd)[:60])
    if num_response is not None and (type(num_response) is not int or not 0 < num_response <= size):
        what = "the length of the response does not fit the tokens"
        raise record.misaligned(what, f"1 to {size}", repr(num_response)[:60])
    return sequence, attended, num_response


def _field_names(record: Record) -> str:
    return f"fields {', '.join(map(str, record.fields)) or 'none'}"


def _response_length(mask: Sequence[bool] | None, num_values: int, num_tokens: int) -> int:
    """Return how many tokens belong to the response, by the first that counts, or has a value."""
    if mask is not None and any(mask):
        return num_tokens - mask.index(True)
    return num_values or num_tokens


def _logprobs(values: Sequence[Any], kept: Sequence[int], mask: Sequence[bool], where: str) -> tuple[float | None, ...]:
    """Return the values of tokens that count; others may be anything: padding is often 0 or NaN.

    Raises:
        HarnessError: BAD_ROLLOUT_LOGPROB.
    """
    return tuple(_logprob(values[at], f"{where}, token {at}") if mask[at] else None for at in kept)


def _logprob(value: Any, where: str) -> float | None:
    if value is None:
        return None
    number = as_number(value)
    if number is None or not math.isfinite(number) or number > _MOST_LOGPROB:
        raise HarnessError(
            Code.BAD_ROLLOUT_LOGPROB,
            "this is no log probability",
            where=where,
            expected="a finite number of nats, at most 0",
            actual=repr(value)[:60],
            hint="take the token out by the mask, or write null: it is counted, and not compared",
        )
    return min(number, 0.0)


def _experts(record: Record, attended: Sequence[bool]) -> tuple[tuple[int, ...], ...] | None:
    values, name = record.entries("experts"), record.name_of("experts")
    if values is None:
        return None
    if not len(attended) - 1 <= len(values) <= len(attended):
        raise record.misaligned(f"{name} does not fit the tokens", f"{len(attended)}, or one less", len(values))
    rows = tuple(tuple(_flat(row)) for row, is_there in zip(values, attended, strict=False) if is_there)
    if len({len(row) for row in rows}) > 1 or not all(type(item) is int for row in rows for item in row):
        what = f"{name} has other than the same number of ids for each token"
        raise record.misaligned(what, "[tokens][layers][k] ids", f"{sorted({len(row) for row in rows})} a token")
    return rows


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def read_rollouts(
    source: str | Path | Sequence[Mapping[str, Any]],
    *,
    weight_version: str | None = None,
    num_rows: int | None = None,
    by_gap: bool = False,
) -> Rollouts:
    """Read a file of rollouts, or rows that are in memory.

    Args:
        source: JSON lines, or Parquet if its name ends so. A line may be a row, or a batch with a list of rows a field.
        weight_version: the rows to compare; None where all are of one version.
        num_rows: most rows to compare; None for all.
        by_gap: whether the rows with the largest mean absolute gap come first, and not those of the file.

    Raises:
        HarnessError: BAD_ROLLOUT_FILE, ROLLOUT_WITHOUT_TOKENS, ROLLOUT_MISALIGNED, BAD_ROLLOUT_LOGPROB,
            ROLLOUT_VERSIONS_DIFFER, PACKAGE_MISSING.
    """
    source = Path(source) if isinstance(source, str) else source
    name = str(source) if isinstance(source, Path) else "rollouts"
    if isinstance(source, Path):
        records = _parquet(source) if source.suffix == ".parquet" else _json_lines(source)
    else:
        records = ((f"row {number}", record) for number, record in enumerate(source))
    expanded_records = (record for where, fields in records for record in expanded(fields, f"{name}: {where}"))
    unread = dict[str, None]()
    rows = []
    for number, record in enumerate(expanded_records):
        rows.append(parse_row(record, number))
        unread.update(dict.fromkeys(record.unread()))
    if not rows:
        what = "the file has no rows"
        raise HarnessError(Code.ROLLOUT_WITHOUT_TOKENS, what, where=name, hint="log some rollouts first")
    chosen = _of_version(rows, weight_version, name)
    chosen = (sorted(chosen, key=_gap, reverse=True) if by_gap else chosen)[:num_rows]
    counted = _with_counted(chosen)
    return Rollouts(name=Path(name).name, rows=counted, counts=_counts(rows, chosen, counted), unread=tuple(unread))


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_file(path, f"it cannot be read: {error}") from error
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            is_last = number == len(lines)
            what = "the file ends in the middle of a row" if is_last else f"this is no JSON: {error}"
            raise _bad_file(f"{path}: line {number}", what, actual=repr(line[-60:])) from error
        yield f"line {number}", record


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        what = "Parquet is read by a package that is not installed: pyarrow"
        raise HarnessError(Code.PACKAGE_MISSING, what, where=path, hint="pip install pyarrow") from error
    try:
        records = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has errors of its own, and OSError
        raise _bad_file(path, f"it cannot be read as Parquet: {error}") from error
    yield from ((f"row {number}", record) for number, record in enumerate(records))


def _bad_file(where: object, what: str, *, actual: str | None = None) -> HarnessError:
    return HarnessError(
        Code.BAD_ROLLOUT_FILE,
        what,
        where=where,
        expected="one JSON object a line, or a Parquet file named .parquet",
        actual=actual,
        hint="write the file again; docs/rollouts.md names the fields",
    )


def _of_version(rows: Sequence[Rollout], wanted: str | None, name: str) -> list[Rollout]:
    """Return the rows of one version of the weights, which both sides had."""
    chosen = [row for row in rows if wanted is None or row.versions == (wanted,)]
    if chosen and len({version for row in chosen for version in row.versions}) <= 1:
        return chosen
    raise HarnessError(
        Code.ROLLOUT_VERSIONS_DIFFER,
        "the rows come from several versions of the weights" if chosen else "no row is of this version alone",
        where=name,
        expected="one version, the same for engine and trainer" if wanted is None else wanted,
        actual=", ".join(sorted({version for row in rows for version in row.versions})) or "none is named",
        hint="--weight-version NAME chooses the rows of one; the others are counted as left out",
    )


def _gap(row: Rollout) -> float:
    """Return the mean absolute gap of the tokens that have both values; 0 if none has."""
    pairs = zip(row.engine, row.trainer or (), strict=False)
    gaps = [abs(trainer - engine) for engine, trainer in pairs if engine is not None and trainer is not None]
    return sum(gaps) / max(1, len(gaps))


def _with_counted(rows: Sequence[Rollout]) -> list[Rollout]:
    """Return the rows with the mask of what is compared: what counts and has a value on every side that there is.

    A row's first token has none before it, so that no model gives its probability.
    """
    has_trainer = any(row.trainer is not None for row in rows)
    compared = []
    for row in rows:
        trainer = (row.trainer or [None] * len(row.tokens)) if has_trainer else row.engine
        values = zip(row.mask, row.engine, trainer, strict=True)
        has_all = [counts and engine is not None and logprobs is not None for counts, engine, logprobs in values]
        compared.append(replace(row, mask=(False, *has_all[1:])))
    return compared


def _counts(rows: Sequence[Rollout], chosen: Sequence[Rollout], counted: Sequence[Rollout]) -> TokenCounts:
    """Count every token of all rows once."""
    num_tokens = sum(len(row.tokens) + row.num_padding for row in rows)
    num_padding = sum(row.num_padding for row in chosen)
    num_prompt = sum(row.num_prompt for row in chosen)
    num_chosen = sum(len(row.tokens) for row in chosen)
    num_unmasked, num_compared = (sum(sum(row.mask) for row in item) for item in (chosen, counted))
    return TokenCounts(
        tokens=num_tokens,
        prompt=num_prompt,
        masked=num_chosen - num_prompt - num_unmasked,
        padding=num_padding,
        without_value=num_unmasked - num_compared,
        left_out=num_tokens - num_chosen - num_padding,
        compared=num_compared,
    )
