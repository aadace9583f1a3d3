"""Rollouts from JSON lines or Parquet: what cannot be used is refused, what is left out is counted."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.formats.rollout.columns import ParsedRow, expanded, parse_row
from harness.formats.rollout.row import Rollout, Rollouts
from harness.results.rollout import TokenCounts

_MOST_DIGITS = 6


def read_rollouts(
    source: Path | Sequence[Mapping[str, Any]], *, weight_version: str | None = None, num_rows: int | None = None
) -> Rollouts:
    """Read a file of rollouts, or rows that are in memory.

    Args:
        source: JSON lines, or Parquet if its name ends so. A line may be a row, or a batch with a list of rows a field.
        weight_version: the rows to compare; None where all are of one version.
        num_rows: most rows to compare; None for all.

    Raises:
        HarnessError: BAD_ROLLOUT_FILE, ROLLOUT_WITHOUT_TOKENS, ROLLOUT_MISALIGNED, BAD_ROLLOUT_LOGPROB,
            ROLLOUT_VERSIONS_DIFFER, PACKAGE_MISSING.
    """
    name = str(source) if isinstance(source, Path) else "rollouts"
    if isinstance(source, Path):
        records = _parquet(source) if source.suffix == ".parquet" else _json_lines(source)
    else:
        records = ((f"row {number}", record) for number, record in enumerate(source))
    parsed = [parse_row(record, f"{name}: {where}") for where, each in records for record in expanded(each, where)]
    if not parsed:
        what = "the file has no rows"
        raise HarnessError(Code.ROLLOUT_WITHOUT_TOKENS, what, where=name, hint="log some rollouts first")
    chosen = _of_version(parsed, weight_version, name)[:num_rows]
    return _rollouts(Path(name).name, parsed, chosen)


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


def _of_version(parsed: Sequence[ParsedRow], wanted: str | None, name: str) -> list[ParsedRow]:
    """Return the rows of one version of the weights, which both sides had."""
    chosen = [row for row in parsed if wanted is None or row.versions == (wanted,)]
    versions = sorted({version for row in chosen for version in row.versions})
    if len(versions) <= 1 and chosen:
        return chosen
    there = ", ".join(sorted({version for row in parsed for version in row.versions})) or "none is named"
    what = "the rows come from several versions of the weights" if chosen else "no row is of this version alone"
    raise HarnessError(
        Code.ROLLOUT_VERSIONS_DIFFER,
        what,
        where=name,
        expected="one version, the same for engine and trainer" if wanted is None else wanted,
        actual=there,
        hint="--weight-version NAME chooses the rows of one; the others are counted as left out",
    )


def _rollouts(name: str, parsed: Sequence[ParsedRow], chosen: Sequence[ParsedRow]) -> Rollouts:
    has_trainer = any(row.rollout.trainer is not None for row in chosen)
    rows = [replace(row.rollout, row=at) for at, row in enumerate(parsed) if any(row is each for each in chosen)]
    counted = [_kept(row, has_trainer) for row in rows]
    compared = [replace(row, mask=kept) for row, kept in zip(rows, counted, strict=True)]
    num_padding = sum(row.num_padding for row in parsed)
    num_tokens = sum(len(row.rollout.tokens) for row in parsed) + num_padding
    num_chosen = sum(len(row.tokens) for row in rows) + sum(row.num_padding for row in chosen)
    num_unmasked = sum(sum(row.mask) for row in rows)
    counts = TokenCounts(
        tokens=num_tokens,
        prompt=sum(row.num_prompt for row in rows),
        masked=sum(len(row.tokens) - row.num_prompt for row in rows) - num_unmasked,
        padding=sum(row.num_padding for row in chosen),
        without_value=num_unmasked - sum(map(sum, counted)),
        left_out=num_tokens - num_chosen,
        compared=sum(map(sum, counted)),
    )
    return Rollouts(name=name, rows=compared, counts=counts, has_trainer=has_trainer, num_digits=_digits(rows))


def _kept(row: Rollout, has_trainer: bool) -> tuple[bool, ...]:
    """Return the tokens that count and have a value on every side that there is; the first has none before it."""
    trainer = row.trainer if has_trainer else row.engine
    return tuple(
        bool(at and counts and row.engine[at] is not None and trainer is not None and trainer[at] is not None)
        for at, counts in enumerate(row.mask)
    )


def _digits(rows: Sequence[Rollout]) -> int | None:
    """Return with how few decimal places all of the engine's values are written exactly."""
    values = [value for row in rows for value in row.engine if value]
    exact = (places for places in range(1, _MOST_DIGITS) if all(round(value, places) == value for value in values))
    return next(exact, None) if values else None
