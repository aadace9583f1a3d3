"""Rows that were read back from a cache, against a loop over everything that was written before."""

import math
import random

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Locator
from harness.judge.compare.cache import KEPT_AS_DECLARED, cache_errors
from harness.judge.compare.cache_format import CacheFormat
from harness.judge.compare.propagated import RATIO_BOUND

from .in_memory import Step, recording_of

WIDTH = 4
GRAPH = Graph((
    Operation(tap="embed", kind=Kind.EMBEDDING), Operation(tap="k", kind=Kind.LINEAR),
    Operation(tap="k_cache", kind=Kind.CACHE, inputs=("k",)), Operation(tap="v_cache", kind=Kind.CACHE, inputs=("v",)),
))  # fmt: skip
TOKENS = {4: (1, 2, 3, 4), 9: (1, 2, 3, 9), 6: (1, 2, 8), 2: (5, 6)}


def errors_of_steps(
    steps, *, usable=("k", "v", "k_cache", "v_cache"), golden=None, noise=None, tokens=None, **manifest
):
    """Errors by tap."""
    tokens = tokens or TOKENS
    expected = None if golden is None else Locator(recording_of(tokens, golden))
    locator = Locator(recording_of(tokens, steps, **manifest))
    return {op.tap: errors for op, errors in cache_errors(locator, GRAPH, usable, expected, noise)}


def one(written, read, *, dtype="float32", cache=None, tap="k", **numerics):
    """Errors of the one row of a cache that was given and gives back these."""
    declared = None if cache is None else Numerics(cache=cache, **numerics)
    steps = [
        Step([(2, 0)], taps={tap: written[None]}),
        Step([(2, 0)], phase="readback", taps={f"{tap}_cache": read[None]}),
    ]
    return errors_of_steps(steps, dtype=dtype, numerics=declared)[f"{tap}_cache"]


ROW = torch.tensor([1.0, -2.3, 0.7, 5.1])


# Whose writing counts.


@pytest.mark.parametrize("seed", range(12))
def test_a_cached_row_equals_an_earlier_write_of_the_same_tokens(seed):
    generator = random.Random(seed)
    every = [(request, at) for request, tokens in TOKENS.items() for at in range(len(tokens))]
    steps, written, expected = [], [], []
    for index in range(8):
        rows = generator.sample(every, generator.randint(1, 5))
        if index in (0, 2, 3, 5):  # writes, of all rows or of some
            chosen = generator.sample(range(len(rows)), generator.randint(1, len(rows)))
            values = torch.randn(len(chosen), WIDTH, generator=torch.Generator().manual_seed(100 * seed + index))
            is_whole = index == 2
            taps = {"k": values if not is_whole else values[:1].repeat(len(rows), 1)}
            steps.append(Step(rows, taps=taps, rows_of={} if is_whole else {"k": chosen}))
            for at, row in enumerate(range(len(rows)) if is_whole else chosen):
                request, position = rows[row]
                written.append((TOKENS[request][: position + 1], taps["k"][at]))
            continue
        if index == 6:
            steps.append(Step(rows, taps={"other": torch.zeros(len(rows), 1)}))
            continue
        kept = []
        for request, position in rows:
            known = [value for content, value in written if content == TOKENS[request][: position + 1]]
            kind = generator.choice(["latest", "earlier", "wrong"])
            value = torch.full((WIDTH,), 7.0) if kind == "wrong" or not known else generator.choice(known)
            value = known[-1] if kind == "latest" and known else value
            kept.append(value)
            if known:
                is_bad = not any(torch.equal(value, item) for item in known)
                distance = float((value.double() - known[-1].double()).norm() / known[-1].double().norm())
                expected.append((request, position, index, distance / rounding_unit(torch.float32) if is_bad else 0.0))
        steps.append(Step(rows, phase="readback", taps={"k_cache": torch.stack(kept)}))
    errors = errors_of_steps(steps).get("k_cache")
    if errors is None:
        assert expected == []
        return
    rows = errors.rows
    judged = zip(rows.request.tolist(), rows.position.tolist(), rows.step.tolist(), strict=True)
    assert [*judged] == [item[:3] for item in expected]
    assert errors.roundings.tolist() == pytest.approx([item[3] for item in expected], rel=1e-9)
    assert errors.bad.tolist() == [item[3] > 0 for item in expected]
    assert not errors.bound.any()
    assert errors.is_exact == (not any(item[3] for item in expected))
    assert errors.convention is None


def test_what_is_written_afterwards_is_not_what_was_read():
    old, new = torch.ones(1, WIDTH), torch.full((1, WIDTH), 2.0)

    def read(value):
        return Step([(2, 0)], phase="readback", taps={"k_cache": value})

    def write(value):
        return Step([(2, 0)], taps={"k": value})

    errors = errors_of_steps(
        [write(old), read(new), write(new), read(new), read(old), read(new * 3), write(old), read(old)]
    )
    assert errors["k_cache"].bad.tolist() == [True, False, False, True, False]
    assert errors["k_cache"].roundings[0] == pytest.approx(1 / rounding_unit(torch.float32))


def test_each_cache_is_compared_with_its_own_writes():
    steps = [
        Step([(2, 0)], taps={"k": ROW[None], "v": -ROW[None]}),
        Step([(2, 0)], phase="readback", taps={"k_cache": ROW[None], "v_cache": ROW[None]}),
    ]
    errors = errors_of_steps(steps)
    assert (errors["k_cache"].bad.tolist(), errors["v_cache"].bad.tolist()) == ([False], [True])
    assert list(errors_of_steps(steps, usable=("k", "k_cache", "v"))) == ["k_cache"]
    assert list(errors_of_steps(steps, usable=("k_cache", "v_cache"))) == []
    assert list(errors_of_steps([steps[0], Step([(2, 0)], taps={"k_cache": ROW[None]})])) == [], "not read back"


# What a cache makes of what it is given.


def off_by_a_bit(row):
    flipped = row.clone()
    flipped.view(torch.int16 if row.dtype.itemsize == 2 else torch.int32)[2] ^= 1
    return flipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_keeps_every_bit(dtype):
    row, name = ROW.to(dtype), str(dtype).removeprefix("torch.")
    assert one(row, row, dtype=name).is_exact
    wrong = one(row, off_by_a_bit(row), dtype=name)
    assert wrong.bad.tolist() == [True]
    distance = float((off_by_a_bit(row).double() - row.double()).norm() / row.double().norm())
    assert wrong.roundings.tolist() == pytest.approx([distance / rounding_unit(dtype)], rel=1e-9)
    zero = torch.zeros(WIDTH, dtype=dtype)
    assert one(zero, -zero, dtype=name).roundings.tolist() == [math.inf]
    for written, read in ((0.7, math.nan), (math.nan, 0.7), (0.7, math.inf), (math.nan, math.inf), (math.inf, 0.7)):
        before, after = (torch.where(torch.arange(WIDTH) == 1, value, row) for value in (written, read))
        assert one(before, after, dtype=name).roundings.tolist() == [math.inf]
        assert one(before, before, dtype=name).is_exact
    nan = zero / zero
    assert one(nan, nan, dtype=name).is_exact
    assert one(nan, off_by_a_bit(nan), dtype=name).bad.tolist() == [True]


@pytest.mark.parametrize(
    ("engine", "written", "read", "is_bad"),
    [
        ("bfloat16", ROW, ROW.bfloat16(), False),
        ("bfloat16", ROW, ROW.bfloat16().float(), False),
        ("bfloat16", ROW, ROW, False),
        ("bfloat16", ROW, ROW.half(), True),
        ("bfloat16", ROW.bfloat16(), ROW.bfloat16().float(), False),
        ("bfloat16", ROW.bfloat16(), ROW, True),
        ("float32", ROW, ROW.bfloat16(), True),
        ("float32", ROW.bfloat16(), ROW.bfloat16().float(), False),
        ("float32", ROW.bfloat16(), ROW, True),
    ],
)
def test_what_was_computed_in_another_dtype(engine, written, read, is_bad):
    """It is kept in the engine's; a cache whose content is not on that grid keeps what it is given."""
    assert one(written, read, dtype=engine).bad.tolist() == [is_bad]


def test_a_declared_dtype_is_the_cache_s():
    kept = one(ROW, ROW.half(), cache="float16")
    assert (kept.bad.tolist(), kept.roundings.tolist(), kept.is_exact) == ([False], [0.0], True)
    assert kept.convention == KEPT_AS_DECLARED.format("float16")
    assert not one(ROW, ROW.half().float(), cache="float16").bad.any()
    assert one(ROW, ROW.bfloat16(), cache="float16").bad.all()
    assert one(ROW, ROW, cache="float16").bad.all()
    assert not one(ROW, ROW.bfloat16(), cache="float16", cache_values="bfloat16", tap="v").bad.any()
    assert one(ROW, ROW.bfloat16(), cache="float16", cache_values="bfloat16").bad.all()


@pytest.mark.parametrize(("tap", "name"), [("k", "Q8_0"), ("v", "Q4_0")])
def test_a_declared_format_of_blocks_is_the_cache_s(tap, name):
    row = torch.randn(64, generator=torch.Generator().manual_seed(1))
    held = CacheFormat(name=name, rotation=32 if tap == "v" else 0)
    read = held.unturned(held.stored(row[None]).values)[0].float()
    declared = {"cache": "Q8_0", "cache_values": "Q4_0", "cache_rotations": (0, 32), "tap": tap}
    kept = one(row, read, **declared)
    assert (kept.bad.tolist(), kept.convention) == ([False], f"kept in {name}, as declared")
    changed = read.clone()
    changed[3] *= 1.5
    wrong = one(row, changed, **declared)
    distance = float((changed.double() - read.double()).norm() / read.double().norm())
    assert wrong.bad.all()
    assert wrong.roundings.tolist() == pytest.approx([distance / rounding_unit(torch.float32)], rel=1e-4)


# Rows whose writing was not recorded.

GOLDEN = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 6.0, 8.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
PLACES = [(4, 0), (4, 1), (2, 0)]


def off_golden(shares):
    """What the golden holds, each row off by a share of its norm."""
    rows = GOLDEN.clone().double()
    rows[:, 3] = torch.tensor(shares, dtype=torch.float64) * rows.norm(dim=1)
    return rows


def against_golden(shares, noise, *, steps=(), dtype=torch.float32):
    golden = [Step(PLACES[:1], taps={"k": GOLDEN[:1]}), Step(PLACES[1:], taps={"k": GOLDEN[1:]})]
    read = Step(PLACES, phase="readback", taps={"k_cache": off_golden(shares).to(dtype)})
    name = str(dtype).removeprefix("torch.")
    return errors_of_steps([*steps, read], golden=golden, noise=noise, dtype=name)["k_cache"]


def test_unwritten_rows_may_differ_from_the_golden_by_ten_times_its_noise():
    """The noise of a row, and the median of all rows at least."""
    noise = {"k": torch.tensor([0.001, 0.01, math.nan, 0.002])}
    for more, is_bad in ((0.99, False), (1.01, True)):
        limits = [RATIO_BOUND * share * more for share in (0.002, 0.01)]
        errors = against_golden([*limits, 0.0], noise)
        assert errors.bad.tolist()[:2] == [is_bad, is_bad]
        unit = rounding_unit(torch.float32)
        assert errors.roundings.tolist()[:2] == pytest.approx([limit / unit for limit in limits], rel=1e-4)
        assert errors.bound.tolist()[:2] == pytest.approx([RATIO_BOUND * share / unit for share in (0.002, 0.01)])
    assert errors.rows.position.tolist() == [0, 1, 0]
    assert not errors.is_exact


@pytest.mark.parametrize("noise", [None, {}, {"k": torch.zeros(0)}, {"v": torch.ones(3)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_noise_by_what_the_roundings_so_far_add_up_to(noise, dtype):
    errors = against_golden([0.0] * 3, noise, dtype=dtype)
    assert errors.bound.tolist() == pytest.approx([RATIO_BOUND * math.sqrt(3)] * 3)


def test_a_row_that_is_not_finite_is_infinitely_far():
    errors = against_golden([0.0, math.nan, math.inf], {"k": torch.full((3,), 0.1)})
    assert errors.roundings.tolist() == [0.0, math.inf, math.inf]
    assert errors.bad.tolist() == [False, True, True]


def test_the_golden_is_used_only_for_rows_without_a_write():
    wrote = [Step([(9, 0)], taps={"k": GOLDEN[:1] * 2})]  # the same tokens as (4, 0)
    errors = against_golden([0.0] * 3, {"k": torch.full((3,), 0.1)}, steps=wrote)
    assert list(zip(errors.rows.request.tolist(), errors.rows.position.tolist(), strict=True)) == [
        (4, 0),
        (4, 1),
        (2, 0),
    ]
    assert errors.bad.tolist() == [True, False, False]
    assert errors.bound[0] == 0


def test_what_neither_has_is_left_out():
    read = Step([(6, 2), (2, 0)], phase="readback", taps={"k_cache": GOLDEN[:2]})
    golden = [Step([(2, 0)], taps={"k": GOLDEN[1:2]})]
    errors = errors_of_steps([read], golden=golden)["k_cache"]
    assert errors.rows.request.tolist() == [2]
    nothing = Step([(6, 2)], phase="readback", taps={"k_cache": GOLDEN[:1]})
    assert errors_of_steps([nothing], golden=golden) == errors_of_steps([read]) == {}
    assert errors_of_steps([nothing, read], golden=golden)["k_cache"].rows.step.tolist() == [1]
