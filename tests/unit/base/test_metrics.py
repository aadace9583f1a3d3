"""Metrics against plain definitions of their own, in numpy's float64, over every kind of value a tensor can hold."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.base.metrics import RowMetrics, largest_rounding, logit_metrics, rounding_unit, row_metrics

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


def ulp(value, dtype):
    """Distance of the neighbours of `dtype` at a number, from its exponent alone."""
    info = torch.finfo(dtype)
    if not math.isfinite(value):
        return value if math.isnan(value) else INF
    exponent = math.frexp(max(abs(value), info.tiny))[1]
    return math.ldexp(info.eps, exponent - 1)


@settings(deadline=None, max_examples=150)
@given(pairs())
def test_every_figure_is_its_definition(pair):
    actual, expected = pair
    m = row_metrics(actual, expected)
    a, e = as_numpy(actual), as_numpy(expected)
    finite = np.isfinite(a).all(axis=1) & np.isfinite(e).all(axis=1)
    with np.errstate(all="ignore"):
        error, norm = a - e, lambda x: np.sqrt((x * x).sum(axis=1))
        ulps = np.array([[ulp(value, actual.dtype) for value in row] for row in e.tolist()])
        figures = {
            "max_abs": np.abs(error).max(axis=1),
            "error_norm": norm(error),
            "expected_norm": norm(e),
            "relative_l2": np.where((norm(error) == 0) & (norm(e) == 0), 0.0, norm(error) / norm(e)),
            "max_ulp": (np.abs(error) / ulps).max(axis=1),
        }
        for name, definition in figures.items():
            same(getattr(m, name)[finite], definition[finite])
        decibel = -20 * np.log10(figures["relative_l2"])
        np.testing.assert_allclose(as_numpy(m.sqnr_db)[finite], decibel[finite], rtol=1e-12, atol=1e-10)
        # The cosine is told from three sums; where the actual row is next to nothing there is none to tell.
        told = finite & (norm(a) > 1e-4 * norm(e)) & (norm(e) > 0)
        cosine = (a * e).sum(axis=1) / (norm(a) * norm(e))
        np.testing.assert_allclose(as_numpy(m.cosine)[told], cosine[told], rtol=0, atol=1e-7)
    assert m.num_nan == int(np.isnan(a).sum())
    assert m.is_finite.tolist() == np.isfinite(a).all(axis=1).tolist()


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_a_row_that_is_not_finite_has_no_finite_distance(pair):
    """Nor is it at no distance, whatever the rows beside it are."""
    actual, expected = pair
    m = row_metrics(actual, expected)
    differs = ~torch.isfinite(actual).all(dim=1) & ~(actual == expected).all(dim=1)
    for figure in (m.max_abs, m.error_norm, m.max_ulp):
        assert not torch.isfinite(figure[differs]).any()


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_the_worst_index_is_of_the_largest_error(pair):
    """It is told for the worst row of all, where they are few."""
    actual, expected = pair
    m = row_metrics(actual, expected)
    with np.errstate(invalid="ignore"):
        errors = np.abs(as_numpy(actual) - as_numpy(expected))
    told = [(row, index) for row, index in enumerate(m.worst_index.tolist()) if index >= 0]
    assert told or not np.any(errors) or torch.equal(actual, expected)
    for row, index in told:
        at = errors[row, index]
        assert np.isnan(at) if np.isnan(errors).any() else at == errors.max()


@settings(deadline=None, max_examples=60)
@given(pairs())
def test_nan_equals_nothing_not_even_a_nan(pair):
    actual = pair[0]
    has_nan = actual.isnan().any(dim=1)
    m = row_metrics(actual, actual)
    finite = torch.isfinite(actual).all(dim=1)
    for figure in (m.max_abs, m.error_norm, m.relative_l2, m.cosine, m.max_ulp):
        assert figure[has_nan].isnan().all()
    assert not m.is_finite[has_nan].any()
    assert m.num_nan == int(actual.isnan().sum())
    assert (m.relative_l2[finite] == 0).all()
    assert (m.sqnr_db[finite] == INF).all()
    assert (m.max_ulp[finite] == 0).all()


def test_an_infinity_is_counted_also_where_both_sides_are_infinite():
    both = torch.tensor([[1.0, INF], [2.0, -INF]])
    assert row_metrics(both, both).num_inf == 2


def test_a_rows_figures_do_not_depend_on_the_rows_beside_it():
    both, off = torch.tensor([[1.0, INF]]), torch.tensor([[1.0, 2.0]])
    alone = row_metrics(both, both)
    beside = row_metrics(torch.cat([both, off]), torch.cat([both, off + 1]))
    torch.testing.assert_close(alone.relative_l2[0], beside.relative_l2[0], equal_nan=True)


def test_trailing_dimensions_are_one_row():
    actual, expected = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    flat = row_metrics(actual.flatten(1), expected.flatten(1))
    assert torch.equal(row_metrics(actual, expected).relative_l2, flat.relative_l2)
    assert torch.equal(row_metrics(actual, expected).worst_index, flat.worst_index)


def test_blocks_of_rows_make_no_difference():
    """65,536 elements are handled at a time: rows after the first block count as well, and in their order."""
    actual, expected = torch.randn(300, 700), torch.randn(300, 700)
    actual[250, 3], actual[299, 650] = NAN, INF
    whole = row_metrics(actual, expected)
    rows = RowMetrics.concat([row_metrics(actual[at : at + 1], expected[at : at + 1]) for at in range(300)])
    for name in ("max_abs", "error_norm", "expected_norm", "error_dot", "max_ulp", "is_finite"):
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
    assert (m.max_ulp <= 0.5).all(), "the expected side is finer: a rounding is half a unit at most"
    assert (m.max_ulp > 0.1).all()


def test_shapes_must_be_the_same():
    with pytest.raises(ValueError, match=r"actual \(2, 3\), expected \(2, 1\)"):
        row_metrics(torch.zeros(2, 3), torch.zeros(2, 1))


def test_zeros():
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    equal = row_metrics(zero, -zero)
    assert (float(equal.relative_l2), float(equal.cosine), float(equal.sqnr_db)) == (0, 1, INF)
    off = row_metrics(one, zero)
    assert (float(off.relative_l2), float(off.sqnr_db)) == (INF, -INF)
    lost = row_metrics(zero, one)
    assert (float(lost.relative_l2), float(lost.sqnr_db)) == (1, 0)


def test_rows_without_elements_are_equal():
    m = row_metrics(torch.empty(3, 0), torch.empty(3, 0))
    assert m.relative_l2.tolist() == [0, 0, 0]
    assert m.cosine.tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(0, 5), (0, 2, 3), (0, 0), (0,)])
def test_metrics_of_no_rows_are_empty(shape):
    m = row_metrics(torch.empty(shape), torch.empty(shape))
    assert m.relative_l2.shape == m.max_ulp.shape == m.worst_index.shape == (0,)
    assert (m.num_nan, m.num_inf) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "actual", "expected", "ulps"),
    [
        (torch.float32, 1.0 + 2**-23, 1.0, 1),
        (torch.float32, 1.0 - 2**-24, 1.0, 0.5),  # below a power of two the neighbours are nearer
        (torch.float32, 1.0, 1.0 - 2**-24, 1),
        (torch.float32, 2.0, 1.0, 2**23),
        (torch.float32, 1.0, 2.0, 2**22),
        (torch.float32, -0.0, 0.0, 0),
        (torch.float32, 2**-149, 0.0, 1),
        (torch.float32, -(2**-149), 2**-149, 2),
        (torch.float32, -1.0 - 2**-23, -1.0, 1),
        (torch.float32, 1.0, -1.0, 2**24),
        (torch.float32, INF, 1.0, INF),
        (torch.bfloat16, 1.0 + 2**-7, 1.0, 1),
        (torch.bfloat16, 2.0 - 2**-7, 2.0, 0.5),
        (torch.bfloat16, 2**-133, 0.0, 1),
        (torch.float16, 1.0 + 2**-10, 1.0, 1),
        (torch.float16, 2**-24, -(2**-24), 2),
        (torch.float16, 65504.0, 65472.0, 1),
        (torch.float64, 1.0 + 2**-52, 1.0, 1),
    ],
)
def test_units_in_the_last_place(dtype, actual, expected, ulps):
    pair = torch.tensor([[actual]], dtype=dtype), torch.tensor([[expected]], dtype=dtype)
    assert row_metrics(*pair).max_ulp.tolist() == [ulps]


def test_units_are_those_of_the_actual_dtype_whatever_the_expected_one():
    expected = torch.tensor([[3.0, 1.0 + 2**-9]], dtype=torch.float64)
    assert row_metrics(expected.bfloat16(), expected).max_ulp.tolist() == [0.25]


def test_units_of_nan_are_nan_in_its_row_only():
    actual = torch.tensor([[1.0, NAN], [1.0, 2.0], [1.0, 2.0]])
    expected = torch.tensor([[1.0, 2.0], [1.0, 2.0], [NAN, 2.0]])
    distance = row_metrics(actual, expected).max_ulp.tolist()
    assert math.isnan(distance[0])
    assert distance[1] == 0
    assert math.isnan(distance[2])


def test_the_expected_side_is_not_written_to():
    actual, expected = torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)
    before = actual.clone(), expected.clone()
    row_metrics(actual, expected)
    row_metrics(actual.double(), expected)
    assert torch.equal(actual, before[0])
    assert torch.equal(expected, before[1])


def test_a_row_of_zeros_has_no_direction():
    expected = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    assert row_metrics(torch.zeros(500, 64), expected).cosine.isnan().all()


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


def test_logits_that_are_nan_agree_with_nothing():
    expected = torch.tensor([[1.0, 5.0, 2.0]])
    actual = torch.tensor([[1.0, NAN, 2.0]])
    agreement, divergence, _ = logit_metrics(actual, expected)[:, 0].tolist()
    assert math.isnan(divergence)
    assert agreement == 0


def test_logits_of_no_rows_and_of_one_token():
    assert logit_metrics(torch.empty(0, 5), torch.empty(0, 5)).shape == (3, 0)
    assert logit_metrics(torch.ones(2, 1), torch.zeros(2, 1)).tolist() == [[1, 1], [0, 0], [0, 0]]
