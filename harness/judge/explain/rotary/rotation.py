"""The model's rotation, and mistakes that rotate pairs of elements wrongly: other pairs, signs, tables, coarse angles.

`R` rows, `N` heads, `P` pairs of a head, `H` head size. Pair i of a head turns by position * frequency_i. Where the
model's rotation has no known form (`WrongOperation.rotation`), nothing is yielded.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.oracle.rotation import Rotation

Causes = Iterator[Hypothesis]
_MIN_ROWS = 2
_SAME = 1e-5
"""Relative standard deviation of a head's norm, before and after it is turned, of what is the same head."""
Where = tuple[torch.Tensor | slice, ...]
"""Rows and columns of the wrong rows."""
_CLEARLY = 0.1
"""Of what a pair is off by at its own frequency, what may be left at another one that is said to be used."""
_SMALL_SHARE = 1e-2
"""Of an angle; beyond it, another theta or scaling says more."""


def with_rotation(causes: Callable[[WrongOperation, Rotation], Causes]) -> Callable[[WrongOperation], Causes]:
    """Give a function the model's rotation, or that of each part. Parts without a rotation stay as they are."""

    @wraps(causes)
    def explain_with_rotation(wrong: WrongOperation) -> Causes:
        read = heads_read(wrong.inputs[0].flatten(1), wrong.expected, wrong.head_dim)
        if read.shape != wrong.inputs[0].shape:
            wrong = replace(wrong, inputs=[read, *wrong.inputs[1:]])
        if wrong.rotation is not None:
            yield from causes(wrong, wrong.rotation)
            return
        for part, where in parts_turned(wrong):
            for hypothesis in causes(part, part.rotation) if part.rotation is not None else ():
                yield replace(hypothesis, output=put(wrong, where, hypothesis.output))

    return explain_with_rotation


def parts_turned(wrong: WrongOperation) -> Iterator[tuple[WrongOperation, Where]]:
    """Yield the most rows that one rotation gives, and the heads that are turned, where others are copies."""
    rows = wrong.rows_of_a_rotation()
    if 2 * int(rows.sum()) > len(rows):
        yield wrong.take(rows), (rows,)
    size = wrong.head_dim
    pool = [x.flatten(1).unflatten(1, (-1, size)) for x in wrong.inputs if not x.flatten(1).shape[1] % size]
    if not pool or wrong.expected.shape[1] % size or len(wrong.rows) < _MIN_ROWS:
        return
    heads, expected = torch.cat(pool, dim=1), wrong.expected.unflatten(1, (-1, size))
    spread, read = _spread(expected, heads).min(dim=1)
    is_turned = (spread < _SAME) & (expected != heads[:, read]).any(dim=2).any(dim=0)
    where = (slice(None), is_turned.repeat_interleave(size))
    if 0 < int(is_turned.sum()) < len(is_turned):  # latent attention turns a part of each head
        inputs = [heads[:, read[is_turned]].flatten(1)]
        yield replace(wrong, inputs=inputs, expected=wrong.expected[where], actual=wrong.actual[where]), where


def put(wrong: WrongOperation, where: Where, output: torch.Tensor) -> torch.Tensor:
    """Return [R, W] what should be, with a part of it replaced."""
    whole = wrong.expected.clone()
    whole[where] = output
    return whole


def pairs_of(wrong: WrongOperation, right: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs before they are turned and as they were recorded: [R, N, P] complex each."""
    before, after = right.heads(wrong.inputs[0]), right.heads(wrong.actual)
    return torch.view_as_complex(right.pairs(before)), torch.view_as_complex(right.pairs(after, is_turned=True))


def turned_by(wrong: WrongOperation, right: Rotation) -> torch.Tensor:
    """Return how far each pair was turned, weighted by its size: [R, P] complex."""
    before, after = pairs_of(wrong, right)
    return (before.conj() * after).sum(dim=1)


def turned_to(wrong: WrongOperation, rotation: Rotation, cause: str, **fields: Any) -> Hypothesis:
    """Return the hypothesis that the rows are rotated by another rotation, with other fields of it."""
    return Hypothesis(cause=cause, output=rotation.turn(wrong.inputs[0], wrong.positions), **fields)


def heads_read(x: torch.Tensor, expected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the heads of a fused product [R, M*H] that a rotation to [R, N*H] reads; `x` where that is not known.

    Turning a head keeps its norm, but for a factor that all rows share.
    """
    is_fused = x.shape[1] > expected.shape[1] and not (x.shape[1] % head_dim or expected.shape[1] % head_dim)
    if not is_fused or len(x) < _MIN_ROWS:
        return x
    heads = x.unflatten(1, (-1, head_dim))
    spread, read = _spread(expected.unflatten(1, (-1, head_dim)), heads).min(dim=1)
    return heads[:, read].flatten(1) if bool((spread < _SAME).all()) else x


def _spread(expected_RNH: torch.Tensor, heads_RMH: torch.Tensor) -> torch.Tensor:
    """Return [N, M]: how unequal the ratio of two heads' norms is over the rows, relative to itself."""
    ratios = expected_RNH.norm(dim=2)[:, :, None] / heads_RMH.norm(dim=2)[:, None]
    spread: torch.Tensor = (ratios.std(dim=0) / ratios.mean(dim=0)).nan_to_num(torch.inf)
    return spread


@with_rotation
def frequencies_of_other_pairs(wrong: WrongOperation, right: Rotation) -> Causes:
    """Some pairs do not turn, or turn as fast as another pair should.

    Causes: some pairs of a head do not turn: their frequencies are zero; the frequencies of the pairs are in another
    order.
    """
    zero = len(right.frequencies)
    pairs, candidates = (
        torch.arange(zero),
        torch.cat((right.frequencies, torch.zeros(1))),
    )  # that of each pair, and none
    left = _left_by_frequency(wrong, right, candidates)  # [P, P + 1]
    is_changed = left.amin(dim=1) < _CLEARLY * left[pairs, pairs]
    is_still = left[:, zero] < _CLEARLY * left[pairs, pairs]
    runs = _runs(is_changed.nonzero()[:, 0].tolist())
    if not runs or bool(is_still.all()):  # no pair turns: that has a name of its own
        return
    if torch.equal(is_still, is_changed):
        cause = "some pairs of a head do not turn: their frequencies are zero"
        source = torch.where(is_changed, zero, pairs)
        num_fitted = sum(1 if run[0] == 0 or run[-1] == zero - 1 else 2 for run in runs)  # where each begins and ends
    else:
        cause = "the frequencies of the pairs are in another order"
        source = torch.where(is_changed, left[:, :zero].argmin(dim=1), pairs)
        num_fitted = int(is_changed.sum())
    yield Hypothesis(
        cause=cause,
        output=right.turned(right.heads(wrong.inputs[0]), *right.angles(wrong.positions, candidates[source])),
        detail=f"{_named(runs)} of {zero}",
        num_fitted=num_fitted,
    )


def _left_by_frequency(wrong: WrongOperation, right: Rotation, candidates: torch.Tensor) -> torch.Tensor:
    """Return the energy that is left of each pair if it turns at each frequency: [P, candidates]."""
    before, after = pairs_of(wrong, right)
    energy = (before * right.scaling).abs().square().sum(dim=(0, 1)) + after.abs().square().sum(dim=(0, 1))  # [P]
    phases = right.phases(wrong.positions, candidates)  # [R, candidates]
    turned = turned_by(wrong, right) * right.scaling  # [R, P]
    alike = (turned.T @ torch.polar(torch.ones_like(phases), -phases)).real
    return (energy[:, None] - 2 * alike).clamp(min=0)


def _runs(numbers: list[int]) -> list[list[int]]:
    """Cut numbers in ascending order into runs of neighbours."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _named(runs: list[list[int]]) -> str:
    return "pairs " + ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@with_rotation
def other_pairs(wrong: WrongOperation, right: Rotation) -> Causes:
    """Neighbours 2i and 2i + 1 form a pair where HF pairs i with i + H/2, or the reverse.

    Causes: rotary over neighbouring pairs (interleaved) instead of half-split ones, or half-split pairs instead of
    neighbouring ones.
    """
    changed = replace(right, is_interleaved=not right.is_interleaved, is_regrouped=False)
    neighbours = "neighbouring pairs (interleaved)"
    done, meant = ("half-split pairs", neighbours) if right.is_interleaved else (neighbours, "half-split ones")
    yield turned_to(wrong, changed, f"rotary over {done} instead of {meant}")


def not_rotated(wrong: WrongOperation) -> Causes:
    """The input comes out as it went in: not turned, or not scaled where that is all that the layer does to it.

    Causes: rotary is not applied, to none or to those heads that it turns; the rows' factors, which grow with the
    position, are not applied.
    """
    x = heads_read(wrong.inputs[0].flatten(1), wrong.expected, wrong.head_dim)
    cause = "the rows' factors, which grow with the position, are" if _is_scaled(wrong, x) else "rotary is"
    if x.shape == wrong.expected.shape:
        yield Hypothesis(cause=f"{cause} not applied", output=x)
    for part, where in parts_turned(wrong) if wrong.rotation is None else ():
        yield Hypothesis(cause="rotary is not applied", output=put(wrong, where, part.inputs[0].flatten(1)))


def _is_scaled(wrong: WrongOperation, x: torch.Tensor) -> bool:
    """Whether each row is its input [R, W] times a number: a temperature of queries that are not rotated."""
    if x.shape != wrong.expected.shape:
        return False
    energy = x.square().sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return wrong.is_expected((wrong.expected * x).sum(dim=1, keepdim=True) / energy * x)


@with_rotation
def backwards(wrong: WrongOperation, right: Rotation) -> Causes:
    """Rotary turns backwards (sign of the sine)."""
    yield Hypothesis(
        cause="rotary turns backwards (sign of the sine)", output=right.turn(wrong.inputs[0], -wrong.positions)
    )


@with_rotation
def stretched(wrong: WrongOperation, right: Rotation) -> Causes:
    """Every angle is too large or too small by the same small share of it, fitted to the rows.

    Causes: rotary frequencies are off by a factor of *value*.
    """
    turned, phases = turned_by(wrong, right), right.phases(wrong.positions)
    left = (turned * torch.polar(torch.ones_like(phases), -phases)).angle()
    weights = phases * turned.abs()
    size = float((weights * phases).sum())
    share = float((weights * left).sum()) / size if size else 0.0
    if 0 < abs(share) < _SMALL_SHARE:
        frequencies = right.frequencies.double() * (1 + share)  # `angles` rounds them to float32, as an engine does
        yield Hypothesis(
            cause=f"rotary frequencies are off by a factor of {1 + share:.7g}",
            output=right.turned(right.heads(wrong.inputs[0]), *right.angles(wrong.positions, frequencies)),
            num_fitted=1,
        )


@with_rotation
def coarse_table(wrong: WrongOperation, right: Rotation) -> Causes:
    """Cosine and sine, or the positions and frequencies behind them, were held in a 16-bit dtype.

    Causes: cos/sin table in *dtype*; rotary frequencies in *dtype*; rotary angles in *dtype*.
    """
    heads = right.heads(wrong.inputs[0])
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for first in (torch.float64, wrong.dtype):  # straight from the angles, or after the engine's own rounding
            cos, sin = (x.to(first).to(dtype).to(torch.float64) for x in right.angles(wrong.positions))
            yield Hypothesis(cause=f"cos/sin table in {name}", output=right.turned(heads, cos, sin))
        low = right.frequencies.to(dtype).to(torch.float32)
        output = right.turned(heads, *right.angles(wrong.positions, low))
        yield Hypothesis(cause=f"rotary frequencies in {name}", output=output)
        phases = (wrong.positions.to(dtype)[:, None] * right.frequencies.to(dtype)).to(torch.float64)
        for table, cause in ((dtype, f"cos/sin table in {name}, its angles too"), (None, f"rotary angles in {name}")):
            cos, sin = ((x.to(table).to(torch.float64) if table else x)[:, None] for x in (phases.cos(), phases.sin()))
            yield Hypothesis(cause=cause, output=right.turned(heads, cos, sin))
