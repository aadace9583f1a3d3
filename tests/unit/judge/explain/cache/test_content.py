"""Content of the cache that is not what was written, and no other row's."""

from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code
from harness.judge.explain.cache.content import single_bits

TAP = "model.layers.1.k_cache"


def explain(bench, tensor):
    return bench.explain(TAP, tensor, code=Code.CACHE_DIFFERS)


def int8(x, dim):
    scale = x.abs().amax(dim=dim, keepdim=True) / 127
    return (x / scale).round() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats(bench, dtype):
    bench = bench(dtype=dtype)
    right = bench.tap(TAP)
    heads = right.unflatten(1, (-1, bench.head_dim))
    wrong = {
        "the cache is in a lower dtype: float8_e4m3fn": (right / 0.03).to(torch.float8_e4m3fn).double() * 0.03,
        "the cache is in a lower dtype: int8": int8(heads, 2).flatten(1),
        "what comes back is that with a gain of 0.5": right * 0.5,
        "the heads come back in another order: [1, 0]": heads.flip(1).flatten(1),
        "heads and elements of a row are exchanged: it is written as [heads, elements] and read as the reverse": (
            heads.transpose(1, 2).flatten(1)
        ),
    }
    for cause, tensor in wrong.items():
        found = explain(bench, tensor)
        assert found.cause == cause
        assert found.is_cause
    static = (right / 0.02).round().clamp(-127, 127) * 0.02
    found = explain(bench, static)
    assert found.cause == "the cache is in a lower dtype: int8"
    assert found.num_fitted == 1


def test_cut_off(bench):
    bench = bench()
    bits = bench.tap(TAP).float().view(torch.int32) & -(1 << 16)
    found = explain(bench, bits.view(torch.float32).double())
    assert found.cause == "what is cached is cut off to bfloat16 instead of rounded"


def test_gains_of_heads(bench):
    bench = bench()
    heads = bench.tap(TAP).unflatten(1, (-1, bench.head_dim))
    found = explain(bench, (heads * torch.tensor([0.25, 3.0])[:, None]).flatten(1))
    assert found.cause == "each head comes back with a gain of its own"
    assert found.detail == "by head: 0.25, 3"


def test_one_bit(bench):
    bench = bench(dtype=torch.bfloat16)
    wrong = bench.tap(TAP)
    wrong[:, 5] = (wrong[:, 5].bfloat16().view(torch.int16) ^ (1 << 3)).view(torch.bfloat16).double()
    found = explain(bench, wrong)
    assert found.cause == "one bit is flipped: bit 3 of the mantissa"
    assert found.detail == "element 5 of KV head 0, in every wrong row"


@pytest.mark.parametrize(("bit", "name"), [
    (0, "bit 0 of the mantissa"), (6, "bit 6 of the mantissa"), (7, "bit 0 of the exponent"),
    (9, "bit 2 of the exponent"), (15, "the sign"),
])  # fmt: skip
def test_a_flipped_bit_is_named_by_what_it_is_in_the_number(bench, bit, name):
    bench = bench(dtype=torch.bfloat16)
    wrong = bench.tap(TAP).bfloat16().view(torch.int16)
    wrong[:, 5] = wrong[:, 5] ^ (1 << bit if bit < 15 else -(1 << 15))
    found = explain(bench, wrong.view(torch.bfloat16).double())
    assert found.cause == f"one bit is flipped: {name}"


def flipped(*places, bit=4):
    """The hypotheses on bits of three rows of zeros and ones, where one bit differs at some places."""
    written = torch.ones(3, 8).bfloat16().view(torch.int16)
    actual = written.clone()
    for row, element in places:
        actual[row, element] ^= 1 << bit
    actual, written = (x.view(torch.bfloat16).double() for x in (actual, written))
    hf = SimpleNamespace(head_dim=4)
    return list(
        single_bits(SimpleNamespace(dtype=torch.bfloat16, actual=actual, expected=written, hf=hf, rows=range(3)))
    )


def test_bits_of_one_element_and_of_several():
    (one,) = flipped((0, 6), (1, 6), (2, 6))
    assert (one.detail, one.freedom) == ("element 2 of KV head 1, in every wrong row", 1)
    (several,) = flipped((0, 6), (1, 5))
    assert (several.detail, several.freedom) == ("in 2 elements of 3 rows", 4)
    assert flipped() == []


def test_noise_has_no_cause(bench):
    bench = bench(dtype=torch.bfloat16)
    right = bench.tap(TAP)
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = explain(bench, (right * (1 + 0.05 * noise)).bfloat16().double())
    assert not found.is_cause
    assert found.cause == "the slot holds what no recorded row has"


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "float16"), (torch.float8_e4m3fn, "float8_e4m3fn")])
def test_an_overflow_of_the_cache(bench, dtype, name):
    bench = bench()
    written = bench.tap("model.layers.1.k_rope")
    limit = torch.finfo(dtype).max
    written[:, 3] = 2 * limit
    read = bench.tap(TAP)
    read[:, 3] = torch.inf
    found = bench.explain(TAP, read, code=Code.CACHE_DIFFERS, **{"model.layers.1.k_rope": written})
    assert found.cause == f"overflow of {name}"
    assert found.is_cause
    read[:, 4] = torch.inf  # which nothing predicts
    read[:, 5] = torch.nan
    found = bench.explain(TAP, read, code=Code.CACHE_DIFFERS, **{"model.layers.1.k_rope": written})
    assert not found.is_cause


def test_single_zeros_may_have_been_written_over(bench):
    bench = bench()
    wrong = bench.tap(TAP)
    wrong[5] = 0
    assert explain(bench, wrong).cause == "zeros come back: never written, or written over with zeros"
