"""Metrics against plain definitions of their own, in numpy's float64, over every kind of value a tensor can hold."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.metrics import (
    RowMetrics,
    largest_rounding,
    logit_metrics,
    max_ulp_distance,
    rounding_unit,
    row_metrics,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MEASURED_UNITS = {torch.float32: 2.54e-8, torch.bfloat16: 1.67e-3, torch.float16: 2.08e-4}
"""Measured by others than us (shared/facts.md)."""
INF, NAN = math.inf, math.nan


def dtype_ids(dtype):
    return str(dtype).removeprefix("torch.")


@st.composite
def pairs(draw):
    """Two [rows, columns] tensors of one dtype and of magnitudes from subnormal to huge."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 6)))
    info = torch.finfo(dtype)
    odd = [0.0, -0.0, info.tiny, -info.tiny, info.tiny * info.eps, info.max, info.min]
    values = st.one_of(
        st.floats(-8, 8),
        st.floats(-1, 1).map(lambda x: x * info.tiny),
        st.sampled_from([*odd, INF, -INF, NAN]),
    )
    count = shape[0] * shape[1]
    tensors = [
        torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float64).view(shape).to(dtype)
        for _ in range(2)
    ]
    if draw(st.booleans()):  # rows that are equal, or nearly
        tensors[1][0] = tensors[0][0]
    return tensors


def as_numpy(tensor):
    return tensor.to(torch.float64).numpy()


def same(actual, expected):
    """Equal figures: NaN and infinities in the same places, the rest within the rounding of float64 sums."""
    np.testing.assert_allclose(as_numpy(actual), np.asarray(expected, dtype=np.float64), rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=100)
@given(pairs())
def test_every_figure_is_its_definition(pair):
    actual, expected = pair
    m = row_metrics(actual, expected)
    a, e = as_numpy(actual), as_numpy(expected)
    with np.errstate(all="ignore"):
        error = a - e
        norm = lambda x: np.sqrt((x * x).sum(axis=1))  # noqa: E731
        same(m.max_abs, np.abs(error).max(axis=1))
        same(m.error_norm, norm(error))
        same(m.expected_norm, norm(e))
        same(m.actual_norm, norm(a))
        relative = np.where((norm(error) == 0) & (norm(e) == 0), 0.0, norm(error) / norm(e))
        same(m.relative_l2, relative)
        np.testing.assert_allclose(as_numpy(m.sqnr_db), -20 * np.log10(relative), rtol=1e-12, atol=1e-10)
        cosine = np.where((norm(a) * norm(e) == 0) & (norm(error) == 0), 1.0, (a * e).sum(axis=1) / (norm(a) * norm(e)))
        np.testing.assert_allclose(as_numpy(m.cosine), cosine, rtol=1e-11, atol=1e-13)
    assert m.num_nan == int(np.isnan(a).sum())
    assert m.num_inf == int(np.isinf(a).sum())


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_the_worst_index_is_of_the_largest_error(pair):
    actual, expected = pair
    m = row_metrics(actual, expected)
    with np.errstate(invalid="ignore"):
        errors = np.abs(as_numpy(actual) - as_numpy(expected))
    for row, index in enumerate(m.worst_index.tolist()):
        at = errors[row, index]
        assert np.isnan(at) if np.isnan(errors[row]).any() else at == errors[row].max()


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_nan_equals_nothing_not_even_a_nan(pair):
    actual = pair[0]
    has_nan = actual.isnan().any(dim=1)
    m = row_metrics(actual, actual)
    finite = torch.isfinite(actual).all(dim=1)
    for figure in (m.max_abs, m.error_norm, m.relative_l2, m.cosine, m.max_ulp):
        assert figure[has_nan].isnan().all()
    assert (m.relative_l2[finite] == 0).all()
    assert (m.sqnr_db[finite] == INF).all()
    assert (m.max_ulp[finite] == 0).all()


def test_trailing_dimensions_are_one_row():
    actual, expected = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    flat = row_metrics(actual.flatten(1), expected.flatten(1))
    assert torch.equal(row_metrics(actual, expected).relative_l2, flat.relative_l2)
    assert int(row_metrics(actual, expected).worst_index[0]) == int(flat.worst_index[0])


def test_blocks_of_rows_make_no_difference():
    """65,536 elements are handled at a time: rows behind the first block count as well, and in their order."""
    actual, expected = torch.randn(300, 700), torch.randn(300, 700)
    actual[250, 3], actual[299, 650] = NAN, INF
    whole = row_metrics(actual, expected)
    rows = RowMetrics.concat([row_metrics(actual[at : at + 1], expected[at : at + 1]) for at in range(300)])
    for name in ("max_abs", "worst_index", "error_norm", "expected_norm", "actual_norm", "dot", "max_ulp"):
        torch.testing.assert_close(getattr(whole, name), getattr(rows, name), rtol=1e-13, atol=0, equal_nan=True)
    assert (whole.num_nan, whole.num_inf) == (rows.num_nan, rows.num_inf) == (1, 1)
    assert whole.relative_l2.isnan().nonzero().flatten().tolist() == [250]


def test_rows_wider_than_a_block():
    actual = torch.zeros(2, (1 << 16) + 1)
    expected = actual.clone()
    expected[1, -1] = 3.0
    m = row_metrics(actual, expected)
    assert m.max_abs.tolist() == [0, 3]
    assert int(m.worst_index[1]) == 1 << 16


def test_other_strides_and_dtypes_of_the_two_sides():
    wide = torch.randn(5, 8, dtype=torch.float64)
    m = row_metrics(wide.to(torch.bfloat16).T, wide.T)
    expected = (wide.T.to(torch.bfloat16).double() - wide.T).norm(dim=1) / wide.T.norm(dim=1)
    torch.testing.assert_close(m.relative_l2, expected)
    assert (m.max_ulp == 0).all(), "the expected side is rounded before values are counted between the two"


def test_shapes_must_be_the_same():
    with pytest.raises(ValueError, match=r"actual \(2, 3\), expected \(2, 1\)"):
        row_metrics(torch.zeros(2, 3), torch.zeros(2, 1))


def test_zeros():
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    equal = row_metrics(zero, -zero)
    assert (float(equal.relative_l2), float(equal.cosine), float(equal.sqnr_db)) == (0, 1, INF)
    off = row_metrics(one, zero)
    assert (float(off.relative_l2), float(off.sqnr_db)) == (INF, -INF)
    assert off.cosine.isnan().all()
    lost = row_metrics(zero, one)
    assert (float(lost.relative_l2), float(lost.sqnr_db)) == (1, 0)


def test_rows_without_elements_are_equal():
    m = row_metrics(torch.empty(3, 0), torch.empty(3, 0))
    assert m.relative_l2.tolist() == [0, 0, 0]
    assert m.cosine.tolist() == [1, 1, 1]
    assert m.worst_index.tolist() == [0, 0, 0]


@pytest.mark.xfail(strict=True, raises=RuntimeError, reason="reshape(0, -1) is ambiguous")
@pytest.mark.parametrize("shape", [(0, 5), (0, 2, 3), (0, 0), (0,)])
def test_no_rows(shape):
    m = row_metrics(torch.empty(shape), torch.empty(shape))
    assert m.relative_l2.shape == m.max_ulp.shape == m.worst_index.shape == (0,)
    assert (m.num_nan, m.num_inf) == (0, 0)


def float32_bits(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1),
        (torch.float32, 1.0, 1.0 - 2**-24, 1),
        (torch.float32, 1.0, 2.0, 2**23),
        (torch.float32, 0.0, -0.0, 0),
        (torch.float32, 0.0, float32_bits(1), 1),
        (torch.float32, -0.0, float32_bits(1), 1),
        (torch.float32, float32_bits(1), -float32_bits(1), 2),
        (torch.float32, float32_bits(0x7F7FFFFF), INF, 1),
        (torch.float32, float32_bits(0x7F7FFFFF), -float32_bits(0x7F7FFFFF), 2 * 0x7F7FFFFF),
        (torch.float32, -INF, INF, 2 * 0x7F800000),
        (torch.float32, -1.0, -1.0 - 2**-23, 1),
        (torch.bfloat16, 1.0, 1.0 + 2**-7, 1),
        (torch.bfloat16, -1.0, 1.0, 2 * 0x3F80),
        (torch.bfloat16, 2.0, 2.0 - 2**-7, 1),
        (torch.float16, 1.0, 1.0 + 2**-10, 1),
        (torch.float16, 2**-24, -(2**-24), 2),
        (torch.float16, 65504.0, INF, 1),
        (torch.float16, -65504.0, 65504.0, 2 * 0x7BFF),
    ],
)
def test_ulp_distance_of_neighbours(dtype, a, b, distance):
    a, b = torch.tensor([[a]], dtype=dtype), torch.tensor([[b]], dtype=dtype)
    assert max_ulp_distance(a, b).tolist() == max_ulp_distance(b, a).tolist() == [distance]


@settings(deadline=None, max_examples=40)
@given(dtype=st.sampled_from([torch.bfloat16, torch.float16]), at=st.integers(0, 0x7F7F), steps=st.integers(0, 40))
@example(dtype=torch.float16, at=0x7BFF, steps=1)
def test_ulp_distance_counts_values(dtype, at, steps):
    """Walk `steps` values up with nextafter, which knows nothing of bits."""
    largest = torch.finfo(dtype).max
    start = min(float(torch.tensor([at], dtype=torch.int16).view(dtype)), largest)
    start = torch.tensor(0.0 if math.isnan(start) else start, dtype=dtype)
    value = start
    for _ in range(steps):
        value = torch.nextafter(value, torch.tensor(-INF, dtype=dtype))
    assert max_ulp_distance(value.view(1, 1), start.view(1, 1)).tolist() == [steps]


def test_ulp_distance_of_nan_is_nan_in_its_row_only():
    actual = torch.tensor([[1.0, NAN], [INF, -INF], [1.0, 2.0]])
    expected = torch.tensor([[1.0, 2.0], [INF, -INF], [NAN, 2.0]])
    distance = max_ulp_distance(actual, expected).tolist()
    assert math.isnan(distance[0])
    assert distance[1] == 0
    assert math.isnan(distance[2])


def test_ulp_distance_of_float64_is_unknown():
    assert max_ulp_distance(torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_ids)
def test_rounding_unit_is_that_of_an_independent_sample(dtype):
    assert rounding_unit(dtype) == pytest.approx(MEASURED_UNITS[dtype], rel=0.01)
    x = np.random.default_rng(7).standard_normal(1 << 18)
    rounded = torch.from_numpy(x).to(dtype).double().numpy()
    assert rounding_unit(dtype) == pytest.approx(np.linalg.norm(rounded - x) / np.linalg.norm(x), rel=0.01)


def test_rounding_unit_of_float64_by_float32():
    assert rounding_unit(torch.float64) == rounding_unit(torch.float32) * 2**-29


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_ids)
def test_no_rounding_is_larger_than_the_largest(dtype):
    x = torch.linspace(1, 2, 200_001, dtype=torch.float64)
    worst = float(((x.to(dtype).double() - x).abs() / x).max()) / rounding_unit(dtype)
    assert worst <= largest_rounding(dtype)
    assert worst == pytest.approx(largest_rounding(dtype), rel=0.02)


def test_measuring_leaves_the_global_generator_alone():
    rounding_unit.cache_clear()
    before = torch.get_rng_state()
    rounding_unit(torch.float16)
    assert torch.equal(torch.get_rng_state(), before)


def log_softmax(x):
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 130), vocab=st.integers(2, 40), seed=st.integers(0, 99), scale=st.sampled_from([0.1, 5, 80]))
def test_logit_metrics_are_their_definitions(rows, vocab, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randn(rows, vocab, generator=generator) * scale
    actual = expected + torch.randn(rows, vocab, generator=generator) * 0.3
    agreement, divergence, margin = logit_metrics(actual, expected).numpy()
    a, e = as_numpy(actual), as_numpy(expected)
    np.testing.assert_array_equal(agreement, a.argmax(axis=1) == e.argmax(axis=1))
    best = np.sort(e, axis=1)
    np.testing.assert_allclose(margin, best[:, -1] - best[:, -2], rtol=1e-12, atol=1e-12)
    log_p, log_q = log_softmax(e), log_softmax(a)
    np.testing.assert_allclose(divergence, (np.exp(log_p) * (log_p - log_q)).sum(axis=1), rtol=1e-9, atol=1e-12)


def test_logit_metrics_tell_the_two_sides_apart():
    sharp, flat = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    one_way, other_way = logit_metrics(sharp, flat), logit_metrics(flat, sharp)
    assert float(one_way[1]) != pytest.approx(float(other_way[1]))
    assert float(one_way[2]) == 1
    assert float(other_way[2]) == 9


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="argmax of a row with a NaN is the place of the NaN")
def test_logits_that_are_nan_agree_with_nothing():
    expected = torch.tensor([[1.0, 5.0, 2.0]])
    actual = torch.tensor([[1.0, NAN, 2.0]])
    agreement, divergence, _ = logit_metrics(actual, expected)[:, 0].tolist()
    assert math.isnan(divergence)
    assert agreement == 0


def test_logits_of_no_rows_and_of_one_token():
    assert logit_metrics(torch.empty(0, 5), torch.empty(0, 5)).shape == (3, 0)
    assert logit_metrics(torch.ones(2, 1), torch.zeros(2, 1)).tolist() == [[1, 1], [0, 0], [0, 0]]
