"""Figures of what has a direction over all rows, against the formulas over whole matrices; and every limit of them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind
from harness.judge.compare.systematic import MAX_ROWS, MIN_CHANNELS, MIN_ROWS, THRESHOLD, Effects, beyond_control
from harness.results.check import Effect

HEAD_DIM = MIN_CHANNELS


def matrices(num_rows=60, width=3 * HEAD_DIM, seed=0):
    """Truth [rows, width] of channels of different size, an error with a direction, and positions."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    truth *= torch.rand(width, generator=generator, dtype=torch.float64) + 0.1
    positions = torch.randperm(3 * num_rows, generator=generator)[:num_rows]
    noise = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    error = 1e-3 * noise + 2e-3 * truth + 1e-5 * positions[:, None] * truth
    error[:, 5] += 0.01
    return truth, truth + error, positions


def added(truth, actual, positions, *, kind=Kind.ROTARY, dtype=torch.bfloat16, num_heads=1, chunk=25):
    sums = Effects(kind, dtype, num_heads=num_heads)
    for at in range(0, len(truth), chunk):
        here = slice(at, at + chunk)
        sums.add(positions[here], actual[here], truth[here], torch.ones(len(truth[here]), dtype=torch.bool))
    return sums


def clustered(kind, which, p, size, unit, times=1.0):
    """An effect of the elements p [rows, channels], of which each row and each channel is one sample."""
    rows, channels = p.sum(axis=1), p.sum(axis=0)
    deviation = math.sqrt(len(rows) * rows.var(ddof=1) + len(channels) * channels.var(ddof=1))
    value, margin = p.sum() / size * times, 1.96 * deviation / size * times
    return Effect(
        kind=kind, which=which, size=value, low=value - margin, high=value + margin, roundings=value / unit,
        statistic=p.sum() / deviation, num_rows=len(rows),
    )  # fmt: skip


def by_hand(truth, actual, positions, *, num_heads, chunk=25, dtype=torch.bfloat16):
    t, e, at = truth.numpy(), (actual - truth).numpy(), positions.double().numpy()
    scale, unit = np.sqrt((t[:chunk] ** 2).mean(axis=0)), rounding_unit(dtype)
    t, e = t / scale, e / scale
    centred = (at - at.mean())[:, None]
    expected = [clustered("gain", "", e * t, (t**2).sum(), unit)]
    trend_size = (centred**2 * t**2).sum()
    expected.append(clustered("trend", "", centred * e * t, trend_size, unit, times=at.max() - at.min()))
    for head in range(num_heads if num_heads > 1 else 0):
        channels = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        expected.append(clustered("gain of head", str(head), (e * t)[:, channels], (t[:, channels] ** 2).sum(), unit))
    channel = int(np.abs(e.mean(axis=0)).argmax())
    mean, deviation = e[:, channel].mean(), e[:, channel].std() / math.sqrt(len(e))
    expected.append(
        Effect(
            kind="offset",
            which=str(channel),
            size=mean,
            low=mean - 1.96 * deviation,
            high=mean + 1.96 * deviation,
            roundings=mean / unit,
            statistic=mean / deviation,
            num_rows=len(e),
        )
    )
    return expected


def same(actual, expected):
    assert (actual.kind, actual.which, actual.num_rows) == (expected.kind, expected.which, expected.num_rows)
    for figure in ("size", "low", "high", "roundings", "statistic"):
        assert getattr(actual, figure) == pytest.approx(getattr(expected, figure), rel=1e-4), figure


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_figures_are_those_of_the_formulas(num_heads, dtype):
    truth, actual, positions = matrices()
    effects = added(truth, actual, positions, num_heads=num_heads, dtype=dtype).all()
    expected = by_hand(truth, actual, positions, num_heads=num_heads, dtype=dtype)
    assert len(effects) == len(expected)
    for ours, theirs in zip(effects, expected, strict=True):
        same(ours, theirs)


def test_rows_of_any_shape_are_flat():
    truth, actual, positions = matrices()
    shaped = added(*(x.unflatten(1, (3, -1)) for x in (truth, actual)), positions, num_heads=3)
    assert shaped.all() == added(truth, actual, positions, num_heads=3).all()


def test_what_like_finds_is_the_same_effect_of_other_rows():
    first, second = added(*matrices(), num_heads=3), added(*matrices(seed=1), num_heads=3)
    for at, effect in enumerate(first.all()[:-1]):
        assert second.like(effect) == second.all()[at]
    truth, actual, _ = matrices(seed=1)
    offset = replace(first.all()[-1], which="7")
    error = ((actual - truth) / truth[:25].square().mean(dim=0).sqrt())[:, 7]
    assert second.like(offset).size == pytest.approx(float(error.mean()), rel=1e-4)
    assert second.like(offset).which == "7"
    assert second.like(offset).num_rows == 60
    assert second.like(replace(offset, kind="gain of head", which="3")) is None
    few = added(*(x[: MIN_ROWS - 1] for x in matrices()))
    assert few.like(offset) is None


def test_a_channel_of_zeros_is_no_channel():
    truth, actual, positions = matrices()
    truth[:, 9], actual[:, 9] = 0.0, 1.0
    effects = added(truth, actual, positions).all()
    assert all(math.isfinite(effect.size) and math.isfinite(effect.statistic) for effect in effects)
    assert effects[-1].which == "5"


def test_a_head_of_zeros_has_no_gain():
    truth, actual, positions = matrices()
    truth[:, HEAD_DIM : 2 * HEAD_DIM] = 0.0
    effects = {effect.which: effect for effect in added(truth, actual, positions, num_heads=3).all()[2:-1]}
    assert (effects["1"].size, effects["1"].low, effects["1"].high, effects["1"].statistic) == (0, 0, 0, 0)
    assert effects["0"].size > 0


def test_rows_that_are_all_at_one_position_have_no_trend():
    truth, actual, positions = matrices()
    effects = added(truth, actual, positions * 0, kind=Kind.LINEAR).all()
    assert [effect.kind for effect in effects] == ["gain", "offset"]


@pytest.mark.parametrize(
    ("kind", "width", "num_heads", "shown"),
    [
        (Kind.ROTARY, 2 * HEAD_DIM, 2, 2),
        (Kind.ATTENTION, 2 * HEAD_DIM, 2, 2),
        (Kind.LINEAR, 2 * HEAD_DIM, 2, 0),
        (Kind.ROTARY, 2 * HEAD_DIM - 2, 2, 0),
    ],
)
def test_heads_are_separate_where_they_are_wide_enough(kind, width, num_heads, shown):
    truth, actual, positions = matrices(width=width)
    effects = added(truth, actual, positions, kind=kind, num_heads=num_heads).all()
    assert sum(effect.kind == "gain of head" for effect in effects) == shown


@pytest.mark.parametrize(("num_rows", "width", "is_enough"), [
    (MIN_ROWS, MIN_CHANNELS, True), (MIN_ROWS - 1, MIN_CHANNELS, False), (MIN_ROWS, MIN_CHANNELS - 1, False),
])  # fmt: skip
def test_how_many_rows_and_channels_are_enough(num_rows, width, is_enough):
    effects = added(*matrices(num_rows, width), kind=Kind.ROTARY)
    assert bool(effects.all()) is is_enough
    assert (effects.scale is not None) is (width == MIN_CHANNELS)


def test_an_embedding_has_no_effects():
    assert added(*matrices(), kind=Kind.EMBEDDING).all() == []


def test_no_more_rows_are_taken_than_are_needed():
    truth, actual, positions = matrices(num_rows=60)
    full = Effects(Kind.ROTARY, torch.bfloat16, seen=set(range(-MAX_ROWS + 1, 0)))
    full.add(positions[:1], actual[:1], truth[:1], torch.ones(1, dtype=torch.bool))
    full.add(positions[1:2], actual[1:2], truth[1:2], torch.ones(1, dtype=torch.bool))
    assert len(full.positions) == 1
    filled = Effects(Kind.ROTARY, torch.bfloat16, seen=set(range(-MAX_ROWS - 1, 0)))
    filled.add(positions[:1], actual[:1], truth[:1], torch.ones(1, dtype=torch.bool))
    assert filled.positions == []


def test_which_rows_are_new():
    """Neither what may not be looked at, nor zeros, nor what has come before: the same norm, or of a rotation the same
    position."""
    truth = torch.eye(5, MIN_CHANNELS, dtype=torch.float64) * torch.tensor([[1.0], [1.1], [0.0], [1.0], [1.3]])
    allowed, positions = torch.tensor([True, True, True, True, False]), torch.tensor([4, 4, 5, 6, 7])
    assert Effects(Kind.LINEAR, torch.bfloat16)._new_rows(positions, truth, allowed).tolist() == [0, 1]
    assert Effects(Kind.ROTARY, torch.bfloat16)._new_rows(positions, truth, allowed).tolist() == [0, 3]


@pytest.mark.parametrize(("factor", "is_new"), [(1 + 4e-7, False), (1 + 3e-6, True), (2.0, False)])
def test_norms_are_compared_in_six_digits_of_their_fraction(factor, is_new):
    truth = torch.full((2, MIN_CHANNELS), 0.70001 / 4, dtype=torch.float64)
    truth[1] *= factor
    sums = Effects(Kind.LINEAR, torch.bfloat16)
    assert sums._new_rows(torch.arange(2), truth, torch.ones(2, dtype=torch.bool)).tolist() == [0, 1][: 1 + is_new]


# What is significant.


def effect(kind="gain", which="", *, roundings=1000.0, statistic=1000.0, size=1.0, margin=0.1):
    return Effect(
        kind=kind, which=which, size=size, low=size - margin, high=size + margin, roundings=roundings,
        statistic=statistic, num_rows=50,
    )  # fmt: skip


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_least_statistic(sign):
    judge = Effects(Kind.LINEAR, torch.bfloat16)
    assert judge.is_significant(effect(statistic=sign * THRESHOLD))
    assert not judge.is_significant(effect(statistic=sign * (THRESHOLD - 0.01)))


SCALE = torch.tensor([3.0, 4.0, 2.0, torch.inf], dtype=torch.float64)
RMS = math.sqrt((9 + 16 + 4) / 3)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("kind", "dtype", "what", "floor"),
    [
        (Kind.LINEAR, torch.bfloat16, ("gain", ""), 0.05),
        (Kind.LINEAR, torch.float32, ("gain", ""), 2.0),
        (Kind.LINEAR, torch.float64, ("trend", ""), 2.0),
        (Kind.ATTENTION, torch.float16, ("gain of head", "2"), 0.5),
        (Kind.LINEAR, torch.bfloat16, ("offset", "2"), 4.0),
        (Kind.LINEAR, torch.float32, ("offset", "2"), 8.0),
        (Kind.ATTENTION, torch.bfloat16, ("offset", "1"), 4.0),
        (Kind.ATTENTION, torch.bfloat16, ("offset", "2"), 4.0 * RMS / 2),
        (Kind.ATTENTION, torch.float32, ("offset", "2"), 4 * 8.0 * RMS / 2),
        (Kind.ATTENTION, torch.float64, ("offset", "1"), 4 * 8.0),
    ],
)
def test_the_least_effect(kind, dtype, what, floor, sign):
    judge = Effects(kind, dtype, scale=SCALE)
    assert judge.is_significant(effect(*what, roundings=sign * floor * 1.0001))
    assert not judge.is_significant(effect(*what, roundings=sign * floor * 0.9999))


def test_attention_without_a_scale_has_the_floor_of_any_other():
    assert Effects(Kind.ATTENTION, torch.bfloat16).is_significant(effect("offset", "0", roundings=4.01))


# Beyond the control: sizes are given by hand.


def unexplained(of_rows, control, allowance=0.0):
    """What is left of an effect that is held against the control's."""
    left = []
    effects = SimpleNamespace(significant=lambda: [of_rows], is_significant=lambda effect: left.append(effect) or True)
    of_control = None if control is None else SimpleNamespace(like=lambda _effect: control)
    return beyond_control(effects, of_control, allowance=allowance), left


@pytest.mark.parametrize(
    ("size", "control", "left"),
    [(3.0, 1.0, 2.0), (-3.0, 1.0, -3.0), (3.0, -1.0, 3.0), (-3.0, -1.0, -2.0), (0.5, 1.0, 0.0), (-0.5, -1.0, 0.0)],
)
def test_what_is_left_of_an_effect(size, control, left):
    """The margins are half of the intervals at 95 %: both count where both effects do."""
    of_rows, of_control = effect(size=size, margin=0.3, roundings=100 * size), effect(size=control, margin=0.4)
    actual, (excess,) = unexplained(of_rows, of_control)
    assert actual is of_rows
    assert excess.size == pytest.approx(left)
    assert excess.roundings == pytest.approx(100 * left)
    margin = 0.5 if left != size and left != 0 else 0.3
    if left:
        assert excess.statistic == pytest.approx(left / (margin / 1.96))
    else:
        assert excess.statistic == 0


def test_an_effect_of_no_size_has_nothing_left():
    _, (excess,) = unexplained(effect(size=0.0, roundings=5.0), effect(size=0.0))
    assert (excess.size, excess.roundings, excess.statistic) == (0, 0, 0)


@pytest.mark.parametrize(("size", "statistic"), [(2.0, math.inf), (-2.0, -math.inf), (0.0, 0.0)])
def test_a_margin_of_nothing(size, statistic):
    _, (excess,) = unexplained(effect(size=size, margin=0.0), effect(size=0.0, margin=0.0))
    assert excess.statistic == statistic


def test_effects_within_the_room_of_a_convention_are_none():
    for roundings in (3.0, -3.0):
        assert unexplained(effect(roundings=roundings), None, allowance=3.0)[0] is None
        assert unexplained(effect(roundings=roundings), None, allowance=2.9)[0] is not None


def test_the_effect_of_the_largest_statistic_is_the_strongest():
    three = [effect(statistic=9.0), effect(statistic=-30.0), effect(statistic=20.0)]
    effects = SimpleNamespace(significant=lambda: three, is_significant=lambda _effect: True)
    assert beyond_control(effects, None) is three[1]
    assert Effects.strongest(effects) is three[1]
    assert Effects.strongest(SimpleNamespace(significant=list)) is None


def test_an_error_that_is_the_same_in_every_row_is_certain():
    truth = torch.ones(MIN_ROWS, MIN_CHANNELS, dtype=torch.float64)
    effects = added(truth, truth * 1.5, torch.arange(MIN_ROWS)).all()
    assert effects[0].size == 0.5
    assert effects[0].statistic == math.inf
    (no_error, *_) = added(truth, truth, torch.arange(MIN_ROWS)).all()
    assert (no_error.size, no_error.statistic) == (0, 0)
