"""The distance between a golden and its sketch, and its description in words."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from harness.oracle.sketch.file import RequestSketch, Sketch, TapSketch

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
