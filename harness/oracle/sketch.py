"""Sketches: a golden in a few kilobytes, committed beside its case, so that a change of the oracle itself is noticed.

A golden is made where it is needed and never committed. Without a sketch, a new transformers or a bug of our own could
move the truth, and engines would be compared with the wrong numbers. A sketch has the tokens and, for every tap, the
mean L2 norm of its rows and a few projections. As JSON it has one line a request and a tap, so that a diff shows which
of them changed.

A projection weights the rows r_i of the tap with random signs and takes them along a direction of random signs,

    p_k = sum_i s_ik <r_i, u_k> / sqrt(rows),    s_ik and u_k of +1 and -1,

so that a change of any element of any row moves all of them, by about the change's share of the row norm (over
sqrt(rows) where it touches one row only). The signs come out of a hash: they depend on no library's generator.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.base.files import read_bytes, write_text
from harness.errors import Code, HarnessError
from harness.formats.recording import Step
from harness.oracle.golden import Golden
from harness.oracle.sketch_rows import is_wide, parts_of, sketch_rows, sketched_taps

NUM_PROJECTIONS = 3


class RequestSketch(BaseModel):
    """The tokens that were fed for one request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompt_length: int
    token_ids: list[int]
    """Prompt and continuation without its last token."""


class TapSketch(BaseModel):
    """One tap of the truth."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_rows: int
    norm: float
    """Mean L2 norm of the rows."""
    projections: Annotated[list[float], Field(min_length=NUM_PROJECTIONS, max_length=NUM_PROJECTIONS)]

    @property
    def figures(self) -> tuple[float, ...]:
        """All that is compared at a tolerance."""
        return (self.norm, *self.projections)


class Sketch(BaseModel):
    """A golden in brief."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    made_with: dict[str, str]
    """Versions of the libraries: for a reader who looks for the cause of a change; never compared."""
    requests: list[RequestSketch]
    taps: dict[str, TapSketch]


def sketch_path(case_path: Path) -> Path:
    """Return where the sketch of a case is kept."""
    return case_path.parent / "sketches" / f"{case_path.stem}.json"


def read_sketch(path: Path, *, command: str | None = None) -> Sketch:
    """Read a sketch; `command` is what makes it anew.

    Raises:
        HarnessError: BAD_CASE: it is damaged.
    """
    try:
        return Sketch.model_validate_json(read_bytes(path))
    except (OSError, ValidationError) as error:
        detail = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise HarnessError(
            Code.BAD_CASE, f"the golden's sketch cannot be read: {detail}", where=path, hint=command
        ) from error


def write_sketch(path: Path, sketch: Sketch) -> None:
    """Write a sketch whole, or leave what is there.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    write_text(path, _to_text(sketch))


def _to_text(sketch: Sketch) -> str:
    document = sketch.model_dump()
    requests = ",\n".join(f"  {json.dumps(request)}" for request in document["requests"])
    taps = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tap)}" for name, tap in document["taps"].items())
    made_with = json.dumps(document["made_with"])
    return (
        f'{{\n "schema_version": {sketch.schema_version},\n "made_with": {made_with},\n'
        f' "requests": [\n{requests}\n ],\n "taps": {{\n{taps}\n }}\n}}\n'
    )


SIGNIFICANT_DIGITS = 12


def make_sketch(golden: Golden) -> Sketch:
    """Return the sketch of a golden; one tap of one step is held in float64 at a time.

    Raises:
        HarnessError: ORACLE_NOT_FINITE: the golden holds NaN or Inf.
    """
    manifest, sketched = golden.recording.manifest, sketched_taps(golden.graph)
    sums: dict[str, _Sums] = {}
    for step in golden.recording.steps:
        for name in step.tap_names:
            sums.setdefault(name, _Sums(name)).add(step, *_values(golden, step, name, sketched))
    return Sketch(
        made_with={name: str(manifest.environment[name]) for name in ("torch", "transformers")},
        requests=[RequestSketch(prompt_length=r.prompt_length, token_ids=r.token_ids) for r in manifest.requests],
        taps={name: tap.sketch() for name, tap in sums.items()},
    )


def _values(
    golden: Golden, step: Step, tap: str, sketched: frozenset[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what is projected of each row of a tap, and the norms of the rows: [rows, W] and [rows].

    Of a wide tap that is its sketch (oracle/sketch_rows.py), also where the golden keeps all values.
    """
    rows, is_sketch = step.tap(tap), tap in golden.sketched
    if tap in sketched and not is_sketch and is_wide(rows):
        rows, is_sketch = sketch_rows(rows, torch.float64), True
    if is_sketch:
        projections, norms = parts_of(rows.cpu())
        return projections.numpy(), norms.numpy()
    values = rows.flatten(1).to(torch.float64).cpu().numpy()
    return values, np.linalg.norm(values, axis=1)


class _Sums:
    """Sums over the rows of one tap."""

    def __init__(self, tap: str) -> None:
        self.tap = tap
        self.num_rows = 0
        self.norm = 0.0
        self.projections = np.zeros(NUM_PROJECTIONS)

    def add(self, step: Step, values: NDArray[np.float64], norms: NDArray[np.float64]) -> None:
        """Add the rows of one step, [rows, W] and [rows]."""
        self.num_rows += len(values)
        self.norm += float(norms.sum())
        directions = _signs(self.tap, values.shape[1])
        covered = step.rows_of(self.tap)
        requests = step.request if covered is None else step.request[covered]
        weights = _weights(requests.tolist())
        self.projections += (weights * (values @ directions)).sum(axis=0)

    def sketch(self) -> TapSketch:
        """Return the means."""
        figures = [self.norm / self.num_rows, *(self.projections / math.sqrt(self.num_rows)).tolist()]
        if not all(map(math.isfinite, figures)):
            raise HarnessError(Code.ORACLE_NOT_FINITE, "the golden holds NaN or Inf", where=self.tap)
        norm, *projections = (float(f"{figure:.{SIGNIFICANT_DIGITS}g}") for figure in figures)
        return TapSketch(num_rows=self.num_rows, norm=norm, projections=projections)


def _weights(requests: list[int]) -> NDArray[np.float64]:
    """Return the signs of some rows, given by their requests: [rows, NUM_PROJECTIONS].

    They are a request's own, so that it does not matter which requests were computed together.
    """
    signs = np.empty((len(requests), NUM_PROJECTIONS))
    for request in dict.fromkeys(requests):
        here = [row for row, item in enumerate(requests) if item == request]
        signs[here] = _signs(f"step {request}", len(here))
    return signs


def _signs(label: str, num: int) -> NDArray[np.float64]:
    """Return +1 and -1 that depend on the label alone: [num, NUM_PROJECTIONS]."""
    digest = hashlib.shake_256(label.encode()).digest((num * NUM_PROJECTIONS + 7) // 8)
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=num * NUM_PROJECTIONS)
    return 1.0 - 2.0 * bits.reshape(num, NUM_PROJECTIONS).astype(np.float64)


TOLERANCE = 1e-6
"""Largest change, as a share of the mean row norm, that is no change.

The truth is computed in float64: other threads and other CPU kernels moved it by 2e-12 at most. What it takes from
float32 is HF's rotary table: one float32 ulp on every cosine and sine moved it by 7e-7. Above that lies what should be
noticed: one weight out of 27,000 off by one bfloat16 rounding moved its tap by 1e-5 to 3e-5, the norms' eps 10 % off
moved most taps by 1e-5 and more. (Measured on the embedded checkpoints. A platform that rounds HF's inverse
frequencies themselves otherwise moves late positions by 1e-5, and needs sketches of its own.)
"""
MAX_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchDifference:
    """One thing that a golden says otherwise than its sketch."""

    where: str
    """A tap, or a token's place."""
    expected: str
    actual: str
    size: float = math.inf
    """Of a tap: largest change of norm and projections as a share of the mean row norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The distance between a golden and its sketch."""

    tokens: tuple[SketchDifference, ...]
    """Tokens that differ, or are on one side only."""
    taps: tuple[SketchDifference, ...]
    """Every tap, in graph order, however little it moved."""

    @property
    def moved_taps(self) -> tuple[SketchDifference, ...]:
        """Taps out of tolerance."""
        return tuple(tap for tap in self.taps if not tap.size <= TOLERANCE)

    @property
    def first(self) -> SketchDifference | None:
        """The first token that differs, or else the first tap."""
        return next(iter((*self.tokens, *self.moved_taps)), None)


def compare(expected: Sketch, actual: Sketch) -> Change:
    """Measure how far a golden moved."""
    taps = dict.fromkeys([*expected.taps, *actual.taps])
    return Change(
        tokens=tuple(_token_differences(expected.requests, actual.requests)),
        taps=tuple(_tap_difference(name, expected.taps.get(name), actual.taps.get(name)) for name in taps),
    )


def _token_differences(
    expected: Sequence[RequestSketch], actual: Sequence[RequestSketch]
) -> Iterator[SketchDifference]:
    absent: dict[str, int] = {}
    for index, (old, new) in enumerate(zip_longest(map(_places, expected), map(_places, actual), fillvalue=absent)):
        for place in dict.fromkeys([*old, *new]):
            if old.get(place) != new.get(place):
                yield SketchDifference(
                    where=f"request {index}, {place}",
                    expected=str(old.get(place, "absent")),
                    actual=str(new.get(place, "absent")),
                )


def _places(request: RequestSketch) -> dict[str, int]:
    tokens = {f"token {position}": token for position, token in enumerate(request.token_ids)}
    return {"prompt length": request.prompt_length} | tokens


def _tap_difference(name: str, expected: TapSketch | None, actual: TapSketch | None) -> SketchDifference:
    size = math.inf
    if expected and actual and expected.num_rows == actual.num_rows:
        pairs = zip(expected.figures, actual.figures, strict=True)
        largest = max(abs(new - old) for old, new in pairs)
        if expected.norm or not largest:
            size = largest / (expected.norm or 1.0)
    return SketchDifference(where=name, expected=_figures(expected), actual=_figures(actual), size=size)


def _figures(tap: TapSketch | None) -> str:
    if tap is None:
        return "absent"
    return f"{tap.num_rows} rows of norm {tap.norm:.8g}, projections {', '.join(f'{p:.8g}' for p in tap.projections)}"


def describe(change: Change) -> str:
    """Return a change in words and numbers, one line for most, with a table of the taps that moved."""
    largest = max((tap.size for tap in change.taps), default=0.0)
    if not change.first:
        return f"unchanged (largest change {largest:.2g} of the row norm)"
    moved = change.moved_taps
    lines = [f"tokens changed: {len(change.tokens)}, taps moved: {len(moved)} of {len(change.taps)}"]
    lines += [f"  {token.where}: {token.expected} -> {token.actual}" for token in change.tokens[:MAX_LISTED]]
    lines += _and_more(len(change.tokens))
    lines += [f"  {tap.size:<7.2g} {tap.where}: {tap.expected} -> {tap.actual}" for tap in moved[:MAX_LISTED]]
    lines += _and_more(len(moved), f"; the largest change is {largest:.2g} of the row norm")
    return "\n".join(lines)


def _and_more(number: int, addition: str = "") -> list[str]:
    return [f"  and {number - MAX_LISTED} more{addition}"] if number > MAX_LISTED else []


def check(case_path: Path, golden: Golden, *, command: str) -> None:
    """Compare the golden of a case with the committed sketch.

    Raises:
        HarnessError: SKETCH_MISSING; SKETCH_DIFFERS for the first token or tap; BAD_CASE where the sketch is damaged.
    """
    path = sketch_path(case_path)
    if not path.exists():
        raise HarnessError(Code.SKETCH_MISSING, "the golden's sketch is missing", where=path, hint=command)
    first = compare(read_sketch(path, command=command), make_sketch(golden)).first
    if first:
        raise HarnessError(
            Code.SKETCH_DIFFERS,
            "the golden differs from its sketch",
            where=f"{path}: {first.where}",
            expected=first.expected,
            actual=first.actual,
            hint=command,
        )


def update(case_path: Path, golden: Golden) -> str:
    """Rewrite the sketch of a case and return what changed; one within tolerance stays as it is.

    Raises:
        HarnessError: CANNOT_WRITE; ORACLE_NOT_FINITE.
    """
    path, actual = sketch_path(case_path), make_sketch(golden)
    try:
        change = compare(read_sketch(path), actual) if path.exists() else None
    except HarnessError:  # damaged, by a merge for one
        change = None
    if change is None or change.first:
        write_sketch(path, actual)
    return describe(change) if change else f"new sketch of {len(actual.taps)} taps"
