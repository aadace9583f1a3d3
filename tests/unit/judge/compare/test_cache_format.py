"""What a KV cache makes of keys and values, against the package gguf; and what is no rounding of them."""

import numpy as np
import pytest
import torch

from harness.base.numerics import Numerics
from harness.judge.compare.cache_format import FORMATS, CacheFormat, quantised

ROWS = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "IQ4_NL"])  # which gguf does not write
def test_blocks_are_those_of_ggml(name):
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
    kind = gguf.GGMLQuantizationType[name]
    expected = gguf.quants.dequantize(gguf.quants.quantize(ROWS.numpy(), kind), kind)
    held = quantised(ROWS, name)
    is_sure = (held.slack == 0).numpy()
    assert is_sure.mean() > 0.99
    np.testing.assert_array_equal(held.values.float().numpy()[is_sure], expected[is_sure])


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_of_zeros_stays_one(name):
    held = quantised(torch.zeros(1, 32), name)
    assert not held.values.any()
    assert not held.slack.any()


@pytest.mark.parametrize(("interleaved_heads", "rotation"), [(0, 0), (32, 0), (64, 64), (0, 128)])
def test_the_order_of_the_cache_leaves_scores_alone(interleaved_heads, rotation):
    kept = CacheFormat(name="Q8_0", interleaved_heads=interleaved_heads, rotation=rotation)
    rows = ROWS.double()
    turned = kept.turned(rows)
    assert torch.allclose(turned @ turned.T, rows @ rows.T)
    assert torch.allclose(kept.unturned(turned), rows)
    assert interleaved_heads or rotation or torch.equal(turned, rows)


def test_interleaved_pairs_are_halves_of_a_head():
    kept = CacheFormat(name="Q8_0", interleaved_heads=4)
    assert kept.turned(torch.tensor([[0.0, 1, 10, 11, 2, 3, 12, 13]])).tolist() == [[0, 10, 1, 11, 2, 12, 3, 13]]


@pytest.mark.parametrize("rotation", [0, 64])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_rounding_of_what_was_written_differs(name, rotation):
    kept = CacheFormat(name=name, interleaved_heads=32, rotation=rotation)
    read = kept.unturned(kept.stored(ROWS).values).float()
    assert not kept.differs(read, ROWS).any()
    turned = kept.turned(read.double())
    step = (turned[3, :32] - turned[3, :32].roll(1)).abs()
    turned[3, 5] += step[step > 1e-6].min()
    assert kept.differs(kept.unturned(turned).float(), ROWS).tolist() == [row == 3 for row in range(40)]
    another = CacheFormat(name="Q5_0" if name != "Q5_0" else "Q4_0")
    assert kept.differs(another.stored(ROWS).values.float(), ROWS).all()
    assert kept.differs(ROWS, ROWS).all()


def test_where_two_formulas_in_float32_differ_there_is_room_for_either():
    largest = torch.rand(2000, 1, generator=torch.Generator().manual_seed(0)) + 1
    near_ties = largest * (torch.arange(96, 127) + 0.5) / 127
    rows = torch.cat((largest, near_ties), dim=1)
    faults = pytest.importorskip(
        "harness.extensions.faults.reference.conventions", reason="the catalogue is an extension"
    )
    integers, scale = faults.quantised(rows)
    held = quantised(rows, "Q8_0")
    error = (held.values - (integers.double() * scale).flatten(-2)).abs()
    assert (error > 0).sum() > 1000
    assert (error <= held.slack).all()
    away_from_ties = largest * (torch.arange(96, 127) + 0.4999) / 127
    assert not quantised(torch.cat((largest, away_from_ties), dim=1), "Q8_0").slack.any()


def test_a_value_on_a_tie_may_be_rounded_either_way():
    row = torch.linspace(-1, 1, 32)[None].clone()
    row[0, 0], row[0, 5] = 127.0, 2.5
    kept = CacheFormat(name="Q8_0")
    for value in (2.0, 3.0):
        read = kept.stored(row).values
        read[0, 5] = value
        assert not kept.differs(read, row).any()
    read[0, 6] += 1
    assert kept.differs(read, row).all()


def test_what_is_declared():
    numerics = Numerics(cache="Q8_0", cache_values="float16", cache_rotations=(64, 0), interleaved_heads=64)
    keys, values = (CacheFormat.declared(numerics, part) for part in ("k", "v"))
    assert keys == CacheFormat(name="Q8_0", interleaved_heads=64, rotation=64)
    assert values == CacheFormat(name="float16")
    assert values.dtype is torch.float16
    assert CacheFormat.declared(Numerics(cache="Q4_0"), "v") == CacheFormat(name="Q4_0")
    assert CacheFormat.declared(Numerics(), "k") is None
    assert not CacheFormat(name="Q9").is_known


# Order and basis by hand.


def by_sign(size):
    """Sylvester's matrix: an element is negative where row and column share an odd number of bits."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_heads_turn_by_a_hadamard_matrix_part_by_part(size):
    x, kept = ROWS[:3, :64].double(), CacheFormat(name="float32", rotation=size)
    expected = torch.cat([part @ by_sign(size) for part in x.split(size, dim=1)], dim=1)
    torch.testing.assert_close(kept.turned(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(kept.unturned(expected), x, rtol=0, atol=1e-12)
    assert kept.turned(x.float()).dtype is torch.float64


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_heads_are_interleaved_one_by_one(size):
    x, kept = ROWS[:2, :16].view(2, 1, 16), CacheFormat(name="float32", interleaved_heads=size)
    expected = torch.zeros_like(x)
    for head in range(0, 16, size):
        for pair in range(size // 2):
            expected[..., head + 2 * pair] = x[..., head + pair]
            expected[..., head + 2 * pair + 1] = x[..., head + size // 2 + pair]
    assert torch.equal(kept.turned(x), expected)
    assert torch.equal(kept.unturned(expected), x)


def test_interleaved_heads_are_turned_and_back():
    x, kept = ROWS[:2].double(), CacheFormat(name="float32", interleaved_heads=32, rotation=16)
    plain = CacheFormat(name="float32", interleaved_heads=32).turned(x)
    torch.testing.assert_close(kept.turned(x), CacheFormat(name="float32", rotation=16).turned(plain))
    torch.testing.assert_close(kept.unturned(kept.turned(x)), x)


@pytest.mark.parametrize(("name", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
def test_a_dtype_keeps_what_it_rounds_to(name, dtype):
    held = CacheFormat(name=name).stored(ROWS)
    assert torch.equal(held.values, ROWS.to(dtype).double())
    assert not held.slack.any()
    assert held.slack.shape == ROWS.shape
    turned = CacheFormat(name=name, interleaved_heads=64)
    assert torch.equal(turned.stored(ROWS).values, turned.turned(ROWS).to(dtype).double())


@pytest.mark.parametrize("rotation", [0, 32])
def test_values_that_were_turned_are_no_longer_the_engines_own_bits(rotation):
    """Ties of them are wider, and so is their room."""
    kept = CacheFormat(name="Q4_1", rotation=rotation)
    held, expected = kept.stored(ROWS), quantised(kept.turned(ROWS), "Q4_1", is_exact=not rotation)
    assert torch.equal(held.values, expected.values)
    assert torch.equal(held.slack, expected.slack)
    as_if_unturned = quantised(kept.turned(ROWS), "Q4_1", is_exact=bool(rotation))
    assert not torch.equal(held.slack, as_if_unturned.slack)


@pytest.mark.parametrize(
    ("name", "dtype", "is_known"),
    [("float16", torch.float16, True), ("Q8_0", None, True), ("int8", None, False), ("Tensor", None, False),
     ("Q9", None, False), ("float64", torch.float64, True)],
)  # fmt: skip
def test_what_a_format_is(name, dtype, is_known):
    assert (CacheFormat(name=name).dtype, CacheFormat(name=name).is_known) == (dtype, is_known)


def test_values_have_a_rotation_of_their_own_and_no_order():
    numerics = Numerics(cache="Q8_0", cache_rotations=(64, 32), interleaved_heads=16)
    assert CacheFormat.declared(numerics, "k") == CacheFormat(name="Q8_0", interleaved_heads=16, rotation=64)
    assert CacheFormat.declared(numerics, "v") == CacheFormat(name="Q8_0", rotation=32)
    only = Numerics(cache_values="Q4_0")
    assert CacheFormat.declared(only, "k") is None
    assert CacheFormat.declared(only, "v") == CacheFormat(name="Q4_0")


@pytest.mark.parametrize("rotation", [0, 32])
def test_how_far_off_a_value_may_be_read(rotation):
    """Not at all; where the basis is undone in float32, by a millionth of the largest of its row."""
    kept = CacheFormat(name="float32", rotation=rotation)
    x = ROWS[:4, :32].double().float()
    held = kept.stored(x).values
    largest = held.abs().amax(dim=1)
    for share, differs in ((0.0, False), (0.9e-6, not rotation), (1.1e-6, True)):
        off = held.clone()
        off[1, 7] += share * largest[1]
        off[3, 0] -= share * largest[3]
        actual = kept.differs(kept.unturned(off), x)
        assert actual.tolist() == [False, differs, False, differs]


def test_what_is_not_a_number_differs():
    read = ROWS[:2].clone()
    read[1, 3] = torch.nan
    assert CacheFormat(name="float32").differs(read, ROWS[:2]).tolist() == [False, True]


def test_a_value_on_a_tie_may_differ_by_its_step_and_no_more():
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 5] = 127.0, 2.5
    kept = CacheFormat(name="Q8_0")
    read = kept.stored(row).values
    for more, differs in ((1 + 0.9e-6, False), (1 + 1.2e-6, True)):
        off = read.clone()
        off[0, 5] += more
        assert kept.differs(off, row).tolist() == [differs]


def scaled(part="k", heads=2, **numerics):
    form = CacheFormat.declared(Numerics(**numerics), part, "model.layers.0.", heads)
    assert form is not None
    return form


HEADS = torch.randn(30, 2, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", [(0.02,), (0.02, 0.07)])
def test_still_scales_are_of_a_layer_or_of_its_heads(name, scales):
    form = scaled(cache=name, cache_scales={"model.layers.0.k_cache": scales})
    top = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344}[name]
    quotient = (HEADS.double() / torch.tensor(scales, dtype=torch.float64)[:, None]).clamp(-top - ("int" in name), top)
    nearest = quotient.round() if "int" in name else quotient.float().to(getattr(torch, name)).double()
    held = form.stored(HEADS)
    is_sure = held.slack == 0
    assert is_sure.double().mean() > 0.99
    expected = nearest * torch.tensor(scales, dtype=torch.float64)[:, None]
    torch.testing.assert_close(held.values[is_sure], expected[is_sure], rtol=1e-12, atol=0)
    assert torch.equal(form.stored(HEADS.flatten(1)).values, held.values.flatten(1))
    assert not form.differs(held.values.float().flatten(1), HEADS.flatten(1)).any()
    assert form.differs((held.values * 1.01).float().flatten(1), HEADS.flatten(1)).all()
    unscaled = scaled("v", cache=name, cache_scales={"model.layers.0.k_cache": scales})
    assert not unscaled.has_scale


@pytest.mark.parametrize(("share", "dims"), [("token", (1, 2)), ("head", (2,))])
def test_scales_that_follow_the_largest_number(share, dims):
    form = scaled(cache="int8", cache_scale_of=share)
    scale = HEADS.double().abs().amax(dim=dims, keepdim=True) / 127
    held = form.stored(HEADS)
    torch.testing.assert_close(held.values, (HEADS / scale).round() * scale, rtol=1e-6, atol=0)
    assert torch.equal(form.num_clipped(HEADS), torch.zeros(2, dtype=torch.int64))
    # [B, K, S, H], as attention has keys, is the same content in another order.
    by_head = form.stored(HEADS.transpose(0, 1)[None]).values[0].transpose(0, 1)
    assert torch.equal(by_head, held.values)


def test_clipped_numbers_are_counted_by_head():
    form = scaled(cache="int8", cache_scales={"model.layers.0.k_cache": (0.01,)})
    is_clipped = ((HEADS / 0.01) > 127.5) | ((HEADS / 0.01) < -128.5)
    assert form.num_clipped(HEADS).tolist() == is_clipped.sum(dim=(0, 2)).tolist()
    assert form.num_clipped(HEADS).sum() > 0
    float8 = scaled(cache="float8_e4m3fn", cache_scale_of=None, cache_scales={"model.layers.0.k_cache": (1.0, 2.0)})
    # 464 lies halfway between 448 and the 480 that the format would have next.
    assert float8.num_clipped(torch.tensor([[[463.0, -463.0], [463.0 * 2, -465.0 * 2]]])).tolist() == [0, 1]


LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def in_four_bits(blocks, scale):
    """Return the nearest of the 15 numbers times a scale of each block, by trying all of them."""
    signed = torch.cat((LEVELS, -LEVELS))
    distance = (blocks[..., None] / scale[..., None] - signed).abs()
    return signed[distance.argmin(dim=-1)] * scale


@pytest.mark.parametrize("still", [None, 0.003])
def test_four_bits_in_blocks_of_sixteen(still):
    blocks = HEADS.double().unflatten(-1, (2, 16))
    sixth = blocks.abs().amax(dim=-1, keepdim=True) / 6
    if still is None:
        form, scale = scaled(cache="mxfp4"), 2.0 ** torch.log2(sixth).ceil()
    else:
        form = scaled(cache="nvfp4", cache_scales={"model.layers.0.k_cache": (still,)})
        scale = (sixth / still).float().to(torch.float8_e4m3fn).double() * still
    held = form.stored(HEADS)
    is_sure = held.slack == 0
    assert is_sure.double().mean() > 0.99
    torch.testing.assert_close(
        held.values[is_sure], in_four_bits(blocks, scale).flatten(-2)[is_sure], rtol=1e-12, atol=0
    )
    assert torch.equal(form.stored(HEADS.flatten(1)).values, held.values.flatten(1))
    assert torch.equal(form.stored(HEADS.transpose(0, 1)[None]).values[0].transpose(0, 1), held.values)
    assert not form.differs(held.values.bfloat16().flatten(1), HEADS.flatten(1)).any()
    assert form.differs((held.values * 1.05).float().flatten(1), HEADS.flatten(1)).all()


def test_a_block_near_two_scales_may_have_either():
    form, x = scaled(heads=1, cache="mxfp4"), torch.full((1, 1, 16), 0.7, dtype=torch.float64)
    x[0, 0, 0] = 6.0  # a sixth of it is 1, and a little more than 1 is rounded up to 2
    held = form.stored(x)
    assert held.values[0, 0, 1] == 0.5
    assert held.slack[0, 0, 1] == 0.5, "or 1, as the next power of two has it"


def test_what_lies_beyond_the_largest_block_is_clipped():
    form = scaled(heads=1, cache="nvfp4", cache_scales={"model.layers.0.k_cache": (0.001,)})
    x = torch.full((1, 1, 16), 0.1)
    x[0, 0, :3] = torch.tensor([448 * 0.001 * 6, 448 * 0.001 * 6.9, 448 * 0.001 * 7.1])
    assert form.num_clipped(x).tolist() == [1]


@pytest.mark.parametrize(
    "numerics",
    [
        {"cache": "mxfp4", "cache_scales": {"model.layers.0.k_cache": (0.1,)}},
        {"cache": "nvfp4", "cache_scale_of": "token"},
    ],
)
def test_blocks_have_no_scales_but_their_own(numerics):
    assert not scaled(**numerics).is_known


@pytest.mark.parametrize("kept", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_with_a_scale_is_rounded_to_the_steps_of_the_dtype(kept, dtype):
    """Below 6.1e-5 those of float16 are all alike, and a share of the number is less than one of them."""
    x = (0.02 * torch.randn(300, 1, 32, generator=torch.Generator().manual_seed(3))).to(dtype)
    for scale in (0.0013, 0.0117, 0.31):
        form = scaled(heads=1, cache=kept, cache_scales={"model.layers.0.k_cache": (scale,)})
        stored = (x.float() / scale).to(getattr(torch, kept))
        read = (stored.float() * scale).to(dtype)
        assert not form.differs(read.flatten(1), x.flatten(1)).any()
        wrong = read.clone()
        wrong[:, 0, 0] += 0.25 * x.abs().amax().to(dtype)
        assert form.differs(wrong.flatten(1), x.flatten(1)).all()
