"""The C++ kernels against the torch operations that they stand for, and attention against its definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from reference_engine.fast.cpp_operators import find_compiler, load_operators
from reference_engine.fast.row_way import WAYS
from reference_engine.layers import RMSNorm
from reference_engine.rotary import apply_rotary

from .test_fused_kernels import DTYPES, EPS, assert_same
from .workload import TOLERANCE, Workload, relative_l2

pytestmark = pytest.mark.skipif(not find_compiler(), reason="no C++ compiler")
CPU = torch.device("cpu")
ROWS = [1, 3, 100]
"""The last is enough to be shared among threads."""
LENS = (1, 15, 16, 17, 33, 300)


@pytest.fixture(scope="module")
def operators() -> SimpleNamespace:
    return load_operators()


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 48, 1000])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_add_norm(operators: Any, dtype: torch.dtype, rows: int, width: int, scale: float) -> None:
    x, delta, weight = scale * random(dtype, rows, width), scale * random(dtype, width, rows).T, random(dtype, width)
    delta = delta.contiguous()
    total, normed = operators.add_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    assert_same(normed, RMSNorm(weight, EPS)(x + delta))
    assert_same(operators.rms_norm(x, weight, EPS), RMSNorm(weight, EPS)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_and_one_with_a_nan(operators: Any, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 48, dtype=dtype)
    x[1, 7] = torch.nan
    normed = operators.rms_norm(x, torch.ones(48, dtype=dtype), EPS)
    assert not normed[0].any()
    assert normed[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 12), (1, 1, 64), (16, 8, 128), (7, 7, 80)])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("rows", [1, 30])
def test_norm_rotate(
    operators: Any, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, rows: int
) -> None:
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    qkv = random(dtype, rows, sum(sizes))
    angles = random(torch.float32, rows, 1, head_dim // 2).repeat(1, 1, 2) * 10
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    q, k, _ = (part.view(rows, -1, head_dim) for part in qkv.split(sizes, dim=-1))
    weights = (random(dtype, head_dim), 1 + random(dtype, head_dim)) if has_norm else (None, None)
    if has_norm:
        q, k = RMSNorm(weights[0], EPS)(q), RMSNorm(weights[1], EPS)(k)
    rotated, normed = operators.norm_rotate(
        qkv, *rotation, *weights, EPS, num_heads, num_kv_heads, keeps_normed=has_norm
    )
    assert_same(rotated, torch.cat([apply_rotary(q, *rotation), apply_rotary(k, *rotation)], dim=1))
    assert normed.numel() == (rotated.numel() if has_norm else 0)
    if has_norm:
        assert_same(normed, torch.cat([q, k], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [3, 80, 1500])
def test_silu_mul(operators: Any, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = 4 * random(dtype, rows, 2 * width)
    gate_up[0, 0], gate_up[-1, -1] = -200, 200
    gate, up = gate_up.chunk(2, dim=-1)
    assert_same(operators.silu_mul(gate_up), silu(gate) * up)


@pytest.mark.parametrize("gate", [0.0, -0.0, 1e-30, -1e-30, 30, -30, -79, -81, 3e38, -3e38, torch.inf])
def test_silu_of_single_numbers(operators: Any, gate: float) -> None:
    actual = operators.silu_mul(torch.tensor([[gate, 1.0]]))
    expected = silu(torch.tensor([[gate]], dtype=torch.float64))
    torch.testing.assert_close(actual.double(), expected, rtol=5e-7, atol=1e-30)
    assert operators.silu_mul(torch.tensor([[torch.nan, 1.0]])).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 31), (5, 32), (61, 100), (300, 1000)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(operators: Any, dtype: torch.dtype, outputs: int, inputs: int, has_bias: bool) -> None:
    weight, bias = random(dtype, outputs, inputs), random(dtype, outputs) if has_bias else None
    for rows in (*range(1, 34), 50, 97):
        x = random(dtype, rows, inputs)
        expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
        actual = operators.linear(x, weight, bias)
        assert (actual.dtype, actual.shape) == (dtype, (rows, outputs))
        assert relative_l2(actual, expected) < TOLERANCE[dtype], rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (7, 40), (101, 96), (50, 33)])
def test_a_row_is_the_same_bits_in_every_way(operators: Any, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x, weight = torch.randn(1, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    expected = operators.linear(x, weight, None)
    for way in WAYS:
        actual = operators.linear(x, weight, None, row_outputs=way.row_outputs, asks_ahead=way.asks_ahead)
        assert torch.equal(actual, expected), way
    assert torch.equal(operators.linear(x.expand(3, -1).contiguous(), weight, None)[:1], expected), "nor beside others"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_depends_on_its_own_row_alone(operators: Any, dtype: torch.dtype) -> None:
    x, weight = random(dtype, 40, 1000), random(dtype, 301, 1000)
    together = operators.linear(x, weight, None)
    for rows in (1, 2, 7, 33):
        assert torch.equal(operators.linear(x[:rows], weight, None), together[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_numbers_spoils_no_other(operators: Any, dtype: torch.dtype) -> None:
    x, weight = random(dtype, 5, 35), random(dtype, 9, 35)
    expected = operators.linear(x, weight, None)
    x[1], weight[4] = torch.nan, torch.inf
    actual = operators.linear(x, weight, None)
    assert not actual[1].isfinite().any()
    assert not actual[:, 4].isfinite().any()
    rows, outputs = [0, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(actual[rows][:, outputs], expected[rows][:, outputs])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_land_in_their_slots_and_nowhere_else(operators: Any, dtype: torch.dtype) -> None:
    caches = [random(dtype, 5, 4, 2, 12) for _ in "kv"]
    expected = [cache.clone().flatten(0, 1) for cache in caches]
    qkv = random(dtype, 4, 10, 12)  # as a fused projection leaves them: views of wider rows
    rows = qkv[:, 2:4], qkv[:, 4:6]
    slots = torch.tensor([7, -1, 19, 0])
    operators.store_kv(*rows, slots, *caches)
    for written, cache, untouched in zip(rows, caches, expected, strict=True):
        for row in (0, 2, 3):
            untouched[slots[row]] = written[row]
        assert torch.equal(cache.flatten(0, 1), untouched)


def decode(operators: Any, workload: Workload, q: torch.Tensor, window: int | None = None) -> torch.Tensor:
    out = workload.output(q)
    lens = torch.tensor(workload.context_lens)
    operators.paged_decode(q, *workload.caches, workload.tables, lens, out, window=window)
    return out


@pytest.mark.parametrize(
    "shape",
    [
        {},
        *({"group": group} for group in (1, 3, 4)),
        *({"head_dim": head_dim} for head_dim in (12, 64, 80)),
        *({"block_size": block_size} for block_size in (1, 6, 32)),
        *({"dtype": dtype} for dtype in (torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 17, 40])
def test_each_row_sees_its_past_as_far_as_its_window(operators: Any, shape: dict[str, Any], window: int | None) -> None:
    workload = Workload(CPU, context_lens=LENS, **shape)
    ones = (1,) * len(LENS)
    q = workload.queries(ones)
    actual = decode(operators, workload, q, window)
    assert relative_l2(actual, workload.expected(q, ones, window)) < TOLERANCE[workload.dtype]
    for request, context_len in enumerate(LENS):  # what is outside the window is not read
        for cache in workload.caches:
            cache.flatten(0, 1)[workload.slots(request)[: max(0, context_len - (window or context_len))]] = torch.nan
    assert torch.equal(decode(operators, workload, q, window), actual)


@pytest.mark.parametrize("window", [None, 20])
def test_a_row_is_the_same_in_every_batch_bit_for_bit(operators: Any, window: int | None) -> None:
    workload = Workload(CPU, context_lens=LENS)
    q = workload.queries((1,) * len(LENS))
    batched = decode(operators, workload, q, window)
    for request in range(len(LENS)):
        own_q = q[request : request + 1]
        alone = workload.alone(
            request, lambda request_alone, own_q=own_q: decode(operators, request_alone, own_q, window)
        )
        assert torch.equal(alone, batched[request : request + 1])


def test_a_request_without_keys_gets_zeros(operators: Any) -> None:
    workload = Workload(CPU, context_lens=(0, 33))
    actual = decode(operators, workload, workload.queries((1, 1)))
    assert not actual[0].any()
    assert actual[1].isfinite().all()


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_a_nan_in_one_s_own_past_shows(operators: Any, tensor: str) -> None:
    workload = Workload(CPU, context_lens=(40, 40))
    getattr(workload, tensor)[0][20] = torch.nan
    workload.write(0)
    actual = decode(operators, workload, workload.queries((1, 1)))
    assert actual[0].isnan().all()
    assert not actual[1].isnan().any()


def test_large_scores_do_not_overflow(operators: Any) -> None:
    workload = Workload(CPU, context_lens=LENS)
    ones = (1,) * len(LENS)
    q = workload.queries(ones) * 1000
    assert relative_l2(decode(operators, workload, q), workload.expected(q, ones)) < 1e-4
