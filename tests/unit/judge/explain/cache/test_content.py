"""Coarser, scaled, reordered and flipped content of the cache, on rows of numbers of our own."""

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.formats.taps import Kind, Operation
from harness.judge.explain.cache import entries, formats
from harness.judge.explain.causes import EXPLANATIONS

from ..toy_attention import K_CACHE, KEY, PLACES, READBACK, H, K, Toy, graph
from ..toys import ToyModel, by_cause, failure_of, named, outputs, random, recorded

OPERATION = Operation(tap=K_CACHE, kind=Kind.CACHE, inputs=(KEY,))
ROWS, HEADS, HEAD_DIM = 40, 3, 4
WRITTEN = random(ROWS, HEADS * HEAD_DIM, seed=1)
LOWER = "the cache is in a lower dtype"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Two blocks of eight positions each, so that boundaries are known."""
    step = {"request": [0] * ROWS, "position": list(range(ROWS)), "slot_mapping": list(range(ROWS)),
            "block_tables": {0: list(range(5))}, "taps": {KEY: WRITTEN}}  # fmt: skip
    return recorded(tmp_path_factory.mktemp("cache") / "r", [step], lengths=((ROWS, 2),))


@pytest.fixture
def of(recording):
    def make(actual, written=WRITTEN, dtype=torch.float32, **rows):
        model = ToyModel(*graph(), head_dim=HEAD_DIM)
        return failure_of(OPERATION, actual, written, model=model, recording=recording, dtype=dtype, **rows)

    return make


def levels(values):
    """Eight bits of numbers that share a scale."""
    scale = max(abs(value) for value in values) / 127
    return [round(value / scale) * scale for value in values]


def in_pieces(size, change, x=WRITTEN):
    rows = [[v for at in range(0, len(row), size) for v in change(row[at : at + size])] for row in x.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def eighth(dtype):
    def change(values):
        scale = max(abs(value) for value in values) / torch.finfo(dtype).max
        return [float(torch.tensor(value / scale).to(dtype)) * scale for value in values]

    return change


def test_coarser_dtypes(of):
    hypotheses = {(h.cause, h.detail): h.output for h in entries.coarser_dtype(of(WRITTEN))}
    expected = {}
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        dtype = getattr(torch, name)
        expected[f"{LOWER}: {name}", ""] = WRITTEN.to(dtype).double()
        if "float8" not in name:
            bits = torch.finfo(dtype).bits
            step = {"bfloat16": 2.0**-7, "float16": 2.0**-10}[name] if bits == 16 else None
            power = WRITTEN.abs().log2().floor()
            cut = (WRITTEN / 2**power / step).trunc() * step * 2**power
            expected[f"what is cached is cut off to {name} instead of rounded", ""] = cut
    assert set(hypotheses) == set(expected)
    for name, output in expected.items():
        torch.testing.assert_close(hypotheses[name], output, rtol=1e-6, atol=1e-9, msg=str(name))


def test_few_bits_with_a_scale_for_each_group(of):
    failure = of(WRITTEN)
    hypotheses = {(h.cause, h.detail): h.output for h in formats.in_few_bits(failure)}
    expected = {}
    for name in ("float8_e4m3fn", "float8_e5m2", "int8"):
        change = levels if name == "int8" else eighth(getattr(torch, name))
        expected[f"{LOWER}: {name}", "one scale for each token"] = in_pieces(12, change)
        expected[f"{LOWER}: {name}", "one scale for each head of a token"] = in_pieces(4, change)
    of_heads = WRITTEN.unflatten(1, (-1, 4)).transpose(0, 1).flatten(1)
    expected[f"{LOWER}: int8", "one scale for each channel"] = in_pieces(len(WRITTEN), levels, WRITTEN.T).T
    of_heads = in_pieces(of_heads.shape[1], levels, of_heads)
    expected[f"{LOWER}: int8", "one scale for each head"] = of_heads.unflatten(1, (-1, 4)).transpose(0, 1).flatten(1)
    for name, output in expected.items():
        torch.testing.assert_close(hypotheses[name], output, rtol=1e-6, atol=1e-9, msg=str(name))


# Grids.


@pytest.mark.parametrize("scale", [0.013, 0.25, 3.0])
@pytest.mark.parametrize("largest", [127, 90, 31, 2])
def test_a_grid_of_whole_numbers(of, scale, largest):
    """What is cut off at the largest number comes out there."""
    step = float(WRITTEN.abs().max()) / largest / 1.25
    actual = (WRITTEN / step).round().clamp(-largest, largest) * step
    (hypothesis,) = (
        h for h in by_cause(entries.grid, of(scale * actual, scale * WRITTEN)).values() if "int8" in h.cause
    )
    torch.testing.assert_close(hypothesis.output, scale * actual, rtol=1e-9, atol=1e-12)
    assert hypothesis.num_fitted == 1
    assert hypothesis.detail == f"with one scale, {scale * step:.4g}"


def test_a_grid_is_cut_off_on_either_side_where_its_own_numbers_end(of):
    actual = (WRITTEN / 0.1).round().clamp(-8, 5) * 0.1
    hypothesis = by_cause(entries.grid, of(actual))[f"{LOWER}: int8"]
    torch.testing.assert_close(hypothesis.output, actual, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [0.03, 0.7])
def test_a_grid_of_a_float8(of, dtype, scale):
    actual = (WRITTEN / scale).to(dtype).double() * scale
    name = str(dtype).removeprefix("torch.")
    hypothesis = by_cause(entries.grid, of(actual))[f"{LOWER}: {name}"]
    normal = actual.abs() >= 2**-6 * scale  # what is smaller has fewer bits than the grid that is fitted
    torch.testing.assert_close(hypothesis.output[normal], actual[normal], rtol=1e-9, atol=1e-12)
    assert hypothesis.num_fitted == 1
    fitted = float(hypothesis.detail.removeprefix("with a scale of ").split()[0])
    assert hypothesis.detail.endswith(" times a power of two")
    assert (
        abs(torch.tensor(fitted / scale).log2() % 1) < 1e-3 or abs(torch.tensor(fitted / scale).log2() % 1 - 1) < 1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("roundings", "is_grid"), [(3.5, True), (4.5, False)])
def test_a_grid_holds_up_to_four_roundings(of, dtype, roundings, is_grid):
    """Half the elements are off to one side, half to the other, so that the scale is not."""
    grid = (WRITTEN / 0.25).round() * 0.25
    signs = torch.ones_like(WRITTEN)
    signs[::2] = -1
    actual = grid * (1 + roundings * rounding_unit(dtype) * signs)
    assert any("int8" in cause for cause in by_cause(entries.grid, of(actual, dtype=dtype))) == is_grid


@pytest.mark.parametrize(("num_off", "is_grid"), [(9, True), (60, False)])
def test_next_to_all_elements_lie_on_it(of, num_off, is_grid):
    """Of 480, two of a hundred may be otherwise."""
    actual = (WRITTEN / 0.25).round() * 0.25
    off = (actual != 0).nonzero()[:num_off]
    actual[off[:, 0], off[:, 1]] *= 1 + 0.03 * (-1.0) ** torch.arange(num_off)
    failure = of(actual, dtype=torch.bfloat16)
    assert any("int8" in cause for cause in by_cause(entries.grid, failure)) == is_grid


def test_numbers_of_no_grid_and_zeros_have_none(of):
    assert by_cause(entries.grid, of(WRITTEN.float().double())) == {}
    assert by_cause(entries.grid, of(torch.zeros_like(WRITTEN))) == {}


# Gains and orders.


@pytest.mark.parametrize("factor", [0.5, -2.0, 0.0011])
def test_a_gain(of, factor):
    hypotheses = by_cause(entries.gain, of(factor * WRITTEN))
    hypothesis = hypotheses[f"what comes back is that with a gain of {factor:.6g}"]
    torch.testing.assert_close(hypothesis.output, factor * WRITTEN)
    assert (hypothesis.num_fitted, hypothesis.is_vague) == (1, False)


def test_a_gain_of_next_to_nothing_is_none(of):
    assert by_cause(entries.gain, of(0.0009 * WRITTEN)) == {}
    assert by_cause(entries.gain, of(-0.0009 * WRITTEN)) == {}


def test_a_gain_of_each_head(of):
    factors = [0.25, 3.0, -1.5]
    actual = torch.cat([factor * WRITTEN[:, 4 * at : 4 * at + 4] for at, factor in enumerate(factors)], dim=1)
    hypothesis = by_cause(entries.gain, of(actual))["each head comes back with a gain of its own"]
    torch.testing.assert_close(hypothesis.output, actual)
    assert (hypothesis.num_fitted, hypothesis.is_vague, hypothesis.detail) == (3, True, "by head: 0.25, 3, -1.5")


EXCHANGED = "heads and elements of a row are exchanged: it is written as [heads, elements] and read as the reverse"


# Bits.

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def flipped(x, bit, places, dtype):
    bits = x.to(dtype).contiguous().view(INTEGERS[dtype]).clone()
    sign = 8 * dtype.itemsize - 1
    for row, column in places:
        bits[row, column] ^= -(1 << bit) if bit == sign else 1 << bit
    return bits.view(dtype).double()


@pytest.mark.parametrize(
    ("dtype", "bit", "name"),
    [
        (torch.float32, 31, "the sign"), (torch.float32, 22, "bit 22 of the mantissa"),
        (torch.float32, 23, "bit 0 of the exponent"), (torch.float32, 0, "bit 0 of the mantissa"),
        (torch.bfloat16, 15, "the sign"), (torch.bfloat16, 6, "bit 6 of the mantissa"),
        (torch.bfloat16, 7, "bit 0 of the exponent"), (torch.float16, 9, "bit 9 of the mantissa"),
        (torch.float16, 10, "bit 0 of the exponent"), (torch.float16, 13, "bit 3 of the exponent"),
    ],
)  # fmt: skip
def test_one_bit(of, dtype, bit, name):
    written = WRITTEN.to(dtype).double()
    every = flipped(written, bit, [(row, 6) for row in range(ROWS)], dtype)
    (hypothesis,) = by_cause(entries.single_bits, of(every, written, dtype)).values()
    assert hypothesis.cause == f"one bit is flipped: {name}"
    assert hypothesis.detail == "element 2 of KV head 1, in every wrong row"
    assert hypothesis.num_fitted == 1
    assert torch.equal(hypothesis.output, every)
    some = flipped(written, bit, [(0, 1), (7, 6), (8, 11)], dtype)
    (hypothesis,) = by_cause(entries.single_bits, of(some, written, dtype)).values()
    assert hypothesis.detail == f"in 3 elements of {ROWS} rows"
    assert hypothesis.num_fitted == 6


def test_what_is_no_single_bit(of):
    two = flipped(flipped(WRITTEN, 3, [(0, 1)], torch.float32), 4, [(5, 1)], torch.float32)
    together = flipped(flipped(WRITTEN, 3, [(0, 1)], torch.float32), 4, [(0, 1)], torch.float32)
    written = WRITTEN.float().double()
    for actual in (two, together, written):
        assert by_cause(entries.single_bits, of(actual, written)) == {}
    assert by_cause(entries.single_bits, of(two, written, torch.float64)) == {}


# Content that nobody has.

BOUNDARY = ", at a block boundary (slot mapping)"


@pytest.mark.parametrize(
    ("position", "where"),
    [([8, 16, 32], BOUNDARY), ([0, 8, 16], ""), ([8, 17], ""), ([8], BOUNDARY)],
)  # fmt: skip
def test_unknown_content(of, position, where):
    actual = random(len(position), 12, seed=5)
    (hypothesis,) = by_cause(entries.unknown_content, of(actual, WRITTEN[position], position=position)).values()
    assert hypothesis.cause == f"the slot holds what no recorded row has{where}"
    assert torch.equal(hypothesis.output, actual)
    assert not hypothesis.is_cause
    assert hypothesis.provenance().position == position[0]


def test_blocks_of_one_token_have_no_boundary(tmp_path):
    step = {"request": [0] * 4, "position": list(range(4)), "slot_mapping": [5, 2, 7, 0],
            "block_tables": {0: [5, 2, 7, 0]}, "taps": {KEY: WRITTEN[:4]}}  # fmt: skip
    recording = recorded(tmp_path / "r", [step])
    failure = failure_of(
        OPERATION, WRITTEN[:2], WRITTEN[1:3], model=ToyModel(*graph()), recording=recording, position=[1, 2]
    )
    assert list(by_cause(entries.unknown_content, failure)) == ["the slot holds what no recorded row has"]


def test_every_explanation_is_tried(tmp_path):
    zeros = {place: torch.zeros(K, H, dtype=torch.float64) for place in PLACES}
    toy = Toy(tmp_path / "r", readback={K_CACHE: zeros})
    failure = toy.cache_failure(lambda place: 0.5 * toy.tensors[KEY][place])
    assert failure.rows.step.unique().tolist() == [READBACK]
    tried = {cause for explain in EXPLANATIONS[Kind.CACHE] for cause in outputs(explain, failure)}
    assert "what comes back is that with a gain of 0.5" in tried


# What the trial names of it.

HEADS_OF_ROWS = WRITTEN.unflatten(1, (-1, HEAD_DIM))
MISTAKES = {
    f"{LOWER}: float8_e4m3fn": (WRITTEN / 0.03).to(torch.float8_e4m3fn).double() * 0.03,
    f"{LOWER}: float16": WRITTEN.half().double(),
    f"{LOWER}: int8": in_pieces(HEAD_DIM, levels),
    "what is cached is cut off to bfloat16 instead of rounded": (
        (WRITTEN.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double()
    ),
    "what comes back is that with a gain of 0.5": 0.5 * WRITTEN,
    "each head comes back with a gain of its own": (
        (HEADS_OF_ROWS * torch.tensor([0.25, 3.0, 2.0])[:, None]).flatten(1)
    ),
    "the heads are in another order: [2, 1, 0]": HEADS_OF_ROWS.flip(1).flatten(1),
    "the elements are in another order: 6 runs of them": HEADS_OF_ROWS.roll(1, dims=2).flatten(1),
    EXCHANGED: HEADS_OF_ROWS.transpose(1, 2).flatten(1),
    "one bit is flipped: bit 20 of the mantissa": flipped(
        WRITTEN, 20, [(row, 5) for row in range(ROWS)], torch.float32
    ),
}


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(of, cause):
    explanation = named(of(MISTAKES[cause], WRITTEN.float().double()))
    assert (explanation.cause, explanation.is_cause) == (cause, True)


def test_a_static_scale_is_fitted_and_noise_has_no_cause(of):
    explanation = named(of((WRITTEN / 0.02).round().clamp(-127, 127) * 0.02))
    assert (explanation.cause, explanation.num_fitted) == (f"{LOWER}: int8", 1)
    noise = 1 + 0.05 * random(*WRITTEN.shape, seed=7)
    explanation = named(of((WRITTEN * noise).bfloat16().double(), WRITTEN, torch.bfloat16))
    assert (explanation.cause, explanation.is_cause) == ("the slot holds what no recorded row has", False)


# In a recording of the reference engine.

TAP = "model.layers.1.k_cache"


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "float16"), (torch.float8_e4m3fn, "float8_e4m3fn")])
def test_an_overflow_of_the_cache(bench, dtype, name):
    written = bench.tap("model.layers.1.k_rope")
    limit = torch.finfo(dtype).max
    written[:, 3] = 2 * limit
    read = bench.tap(TAP)
    read[:, 3] = torch.inf
    explanation = bench.explain(TAP, read, code=Code.CACHE_DIFFERS, **{"model.layers.1.k_rope": written})
    assert explanation.cause == f"overflow of {name}"
    assert explanation.is_cause
    read[:, 4] = torch.inf  # which nothing predicts
    read[:, 5] = torch.nan
    explanation = bench.explain(TAP, read, code=Code.CACHE_DIFFERS, **{"model.layers.1.k_rope": written})
    assert not explanation.is_cause
