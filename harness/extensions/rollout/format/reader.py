"""Rollouts from JSON lines or Parquet: what cannot be used is refused, what is left out is counted."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.rollout.format.columns import expanded, parse_row
from harness.extensions.rollout.format.row import Rollout, Rollouts
from harness.extensions.rollout.result import TokenCounts


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
    found = (record for where, fields in records for record in expanded(fields, f"{name}: {where}"))
    rows = [parse_row(record, number) for number, record in enumerate(found)]
    if not rows:
        what = "the file has no rows"
        raise HarnessError(Code.ROLLOUT_WITHOUT_TOKENS, what, where=name, hint="log some rollouts first")
    chosen = _of_version(rows, weight_version, name)
    chosen = (sorted(chosen, key=_gap, reverse=True) if by_gap else chosen)[:num_rows]
    counted = _with_counted(chosen)
    return Rollouts(name=Path(name).name, rows=counted, counts=_counts(rows, chosen, counted))


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
        has_all = [counts and engine is not None and other is not None for counts, engine, other in values]
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
