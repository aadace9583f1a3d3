"""Times of single kernels on a GPU: the roofs, products of few rows, attention under several tilings, fused operations.

    python tests/benchmarks/gpu_kernels.py [roofs] [products] [row_products] [decode] [prefill] [fused]

Calls are recorded as one CUDA graph over inputs that together exceed the L2 cache, so that neither launches nor the
cache are timed; a figure is the median of replays, in microseconds a call.
"""

from __future__ import annotations

import random
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from tabulate import tabulate
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from reference_engine.fast.kernels import paged_decode as decoding
from reference_engine.fast.kernels import row_product
from reference_engine.fast.kernels.add_norm import add_norm
from reference_engine.fast.kernels.norm_rotate import norm_rotate
from reference_engine.fast.kernels.paged_prefill import cut_into_tiles, paged_prefill
from reference_engine.fast.kernels.silu_mul import silu_mul
from reference_engine.fast.kernels.store_kv import store_kv
from reference_engine.fast.kernels.tiling import Tiling, find_tiling
from reference_engine.layers import RMSNorm
from reference_engine.numerics import step_numerics
from reference_engine.rotary import apply_rotary

DEVICE, DTYPE = "cuda", torch.bfloat16
L2_BYTES = 200 << 20
"""More than any L2 cache holds."""
Call = Callable[[], object]


def microseconds(calls: list[Call], num_replays: int = 20) -> float:
    """Record all calls as one graph, and return the median time of one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return statistics.median(_replayed(graph) for _ in range(num_replays)) / len(calls)


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def show(header: str, rows: list[list[object]]) -> None:
    print(tabulate(rows, header.split(", "), floatfmt=".4g"), "\n", flush=True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def roofs() -> None:
    source, (left, right) = torch.randn(1 << 29, device=DEVICE), (randn(8192, 8192), randn(8192, 8192))
    target = torch.empty_like(source)
    # A kernel: a copy in a graph is left to the copy engine, which is slower than what kernels reach.
    copy_us = microseconds([lambda: torch.add(source, 1.0, out=target)])
    matmul_us = microseconds([lambda: left @ right])
    show("copy TB/s, matmul TFLOP/s", [[2 * source.nbytes / copy_us / 1e6, 2 * 8192**3 / matmul_us / 1e6]])


WEIGHTS = {
    "8B qkv": (6144, 4096), "8B o": (4096, 4096), "8B gate_up": (24576, 4096), "8B down": (4096, 12288),
    "8B head": (151936, 4096), "0.6B qkv": (4096, 1024), "0.6B gate_up": (6144, 1024), "0.6B head": (151936, 1024),
}  # fmt: skip


def products() -> None:
    """How near to the bandwidth products of few rows come: what decoding is made of."""
    rows: list[list[object]] = []
    for name, (num_out, num_in) in WEIGHTS.items():
        weights = [randn(num_out, num_in) for _ in range(max(2, 4 * L2_BYTES // (2 * num_out * num_in)))]
        row: list[object] = [name]
        for num_rows in (1, 2, 4, 8, 16, 64, 256):
            x = randn(num_rows, num_in)
            us = microseconds([lambda weight=weight, x=x: linear(x, weight) for weight in weights])
            row += [us, weights[0].nbytes / us / 1e6]
        rows.append(row)
    show("weight, 1 us, TB/s, 2 us, TB/s, 4 us, TB/s, 8 us, TB/s, 16 us, TB/s, 64 us, TB/s, 256 us, TB/s", rows)


def row_products() -> None:
    """The product of one row by our kernel, under shapes of its programs; best first, with the one in use."""
    used = row_product.OUTPUTS, row_product.INPUTS, row_product.NUM_WARPS
    variants = {used, *product((1, 2, 4, 8), (512, 1024, 2048), (4,)), (1, 1024, 2), (2, 2048, 8), (4, 1024, 8)}
    for name, (num_out, num_in) in WEIGHTS.items():
        weights = [randn(num_out, num_in) for _ in range(max(2, 4 * L2_BYTES // (2 * num_out * num_in)))]
        x = randn(1, num_in)
        torch_us = microseconds([partial(linear, x, weight) for weight in weights])
        timed = sorted((_row_product_us(x, weights, variant), variant) for variant in variants)
        print(name, f"torch {torch_us:.4g} us, {weights[0].nbytes / torch_us / 1e6:.4g} TB/s")
        rows = [[us, weights[0].nbytes / us / 1e6, *shape, "in use" if shape == used else ""] for us, shape in timed]
        show("us, TB/s, outputs, inputs, warps, ", rows[:5] + [row for row in rows[5:] if row[-1]])


def _row_product_us(x: torch.Tensor, weights: list[torch.Tensor], variant: tuple[int, int, int]) -> float:
    before = row_product.OUTPUTS, row_product.INPUTS, row_product.NUM_WARPS
    row_product.OUTPUTS, row_product.INPUTS, row_product.NUM_WARPS = variant
    try:
        torch.testing.assert_close(
            row_product.row_product(x, weights[0], None), linear(x, weights[0]), rtol=0.02, atol=1
        )
        return microseconds([partial(row_product.row_product, x, weight, None) for weight in weights])
    finally:
        row_product.OUTPUTS, row_product.INPUTS, row_product.NUM_WARPS = before


class Decode:
    """One row a request over a cache of shuffled blocks, in as many layers as exceed the L2 cache."""

    def __init__(self, context_lens: list[int], num_heads: int, num_kv_heads: int = 8, block_size: int = 16) -> None:
        widths = [-(-context_len // block_size) for context_len in context_lens]
        blocks = iter(random.Random(0).sample(range(1, 1 + sum(widths)), sum(widths)))
        tables = torch.zeros(len(widths), 4096 // block_size, dtype=torch.int64)  # as wide as under recorded steps
        for row, width in zip(tables, widths, strict=True):
            row[:width] = torch.tensor([next(blocks) for _ in range(width)])
        self.tables, self.lens = tables.to(DEVICE), torch.tensor(context_lens, device=DEVICE)
        self.num_bytes = 2 * sum(context_lens) * num_kv_heads * 128 * DTYPE.itemsize
        shape = (2, 1 + sum(widths), block_size, num_kv_heads, 128)
        self.caches = [randn(*shape) for _ in range(max(2, 2 * L2_BYTES // self.num_bytes))]
        self.q = randn(len(context_lens), num_heads, 128)
        self.out = torch.empty_like(self.q)

    def calls(self, tiling: Tiling, min_split_keys: int) -> list[Call]:
        return [
            lambda cache=cache: decoding.paged_decode(
                self.q, *cache, self.tables, self.lens, self.out, window=None, tiling=tiling,
                min_split_keys=min_split_keys,
            )
            for cache in self.caches
        ]  # fmt: skip


def decode() -> None:
    """Decode's attention under tilings, stages, warps and lengths of a split; best first, with the one in use."""
    lens = [random.Random(seed).randint(100, 1500) for seed in range(256)]
    used = find_tiling(128, DTYPE).keys, decoding.NUM_STAGES, decoding.NUM_WARPS, decoding.MIN_SPLIT_KEYS
    variants = {used, *product((32, 64, 128), (2, 3, 5), (4, 8), (256,)), (64, 7, 4, 256), (64, 5, 4, 128)}
    for name, case in {
        "256 requests, 16/8 heads": Decode(lens, 16),
        "16 requests, 16/8 heads": Decode([160] * 16, 16),
        "1 request of 160, 32/8 heads": Decode([160], 32),
        "1 request of 4000, 32/8 heads": Decode([4000], 32),
        "256 requests, blocks of 256": Decode(lens, 16, block_size=256),
    }.items():
        rows = sorted(_timed_variant(case, variant) for variant in variants)
        print(name)
        show(
            "us, TB/s, keys, stages, warps, split, ",
            [[*row, "in use" if tuple(row[2:]) == used else ""] for row in rows],
        )


def _timed_variant(case: Decode, variant: tuple[int, int, int, int]) -> list[float]:
    keys, stages, warps, min_split_keys = variant
    before = decoding.NUM_STAGES, decoding.NUM_WARPS
    decoding.NUM_STAGES, decoding.NUM_WARPS = stages, warps
    try:
        tiling = Tiling(rows=128, keys=keys, padded_head_dim=128, num_warps=8)
        us = microseconds(case.calls(tiling, min_split_keys), num_replays=9)
    finally:
        decoding.NUM_STAGES, decoding.NUM_WARPS = before
    return [us, case.num_bytes / us / 1e6, *variant]


def prefill() -> None:
    """Prefill's attention beside torch's own kernel."""
    rows = [row for shape in ((16, 2048), (32, 2048), (16, 512)) for row in _prefill_rows(*shape)]
    show("heads and rows, kernel, us, TFLOP/s", rows)


def _prefill_rows(num_heads: int, length: int) -> Iterator[list[object]]:
    case, q = Decode([length], num_heads), randn(length, num_heads, 128)
    out, flops, name = torch.empty_like(q), 2 * length * (length + 1) * num_heads * 128, f"{num_heads}/8, {length} rows"

    def calls(tiling: Tiling) -> list[Call]:
        tiles = cut_into_tiles([length], [length], tiling.rows)
        tiles_M4, tables = torch.tensor(tiles, dtype=torch.int32, device=DEVICE), case.tables
        return [
            lambda cache=cache: paged_prefill(q, *cache, tables, tiles_M4, out, window=None, tiling=tiling)
            for cache in case.caches[:8]
        ]

    for num_rows, keys, warps in ((128, 64, 8), (64, 64, 4), (128, 32, 8)):
        us = microseconds(calls(Tiling(rows=num_rows, keys=keys, padded_head_dim=128, num_warps=warps)))
        yield [name, f"{num_rows} x {keys}, {warps} warps", us, flops / us / 1e6]
    heads, kv = q.transpose(0, 1)[None], randn(1, 8, length, 128)
    with step_numerics():
        us = microseconds([lambda: scaled_dot_product_attention(heads, kv, kv, is_causal=True, enable_gqa=True)])
    yield [name, "torch, FlashAttention", us, flops / us / 1e6]


def fused() -> None:
    """The small operations of a layer of 8B, fused and by torch."""
    rows: list[list[object]] = []
    for num_rows in (1, 16, 256, 2048):
        row: list[object] = [num_rows]
        for kernel, plain in _small_operations(num_rows):
            row += [microseconds([kernel] * 20), microseconds([plain] * 20)]
        rows.append(row)
    show("rows, add_norm us, torch, norm_rotate us, torch, silu_mul us, torch, store_kv us, torch", rows)


def _small_operations(num_rows: int) -> Iterator[tuple[Call, Call]]:
    x, delta, weight = randn(num_rows, 4096), randn(num_rows, 4096), randn(4096)
    yield lambda: add_norm(x, delta, weight, 1e-6), lambda: RMSNorm(weight, 1e-6)(x + delta)
    qkv, head_weight = randn(num_rows, 6144), randn(128)
    cos, sin = (randn(num_rows, 1, 64).repeat(1, 1, 2) for _ in range(2))
    q, k = qkv[:, :4096].view(num_rows, 32, 128), qkv[:, 4096:5120].view(num_rows, 8, 128)
    norm = RMSNorm(head_weight, 1e-6)
    yield (
        lambda: norm_rotate(qkv, cos, sin, head_weight, head_weight, 1e-6, 32, 8),
        lambda: (apply_rotary(norm(q), cos, sin), apply_rotary(norm(k), cos, sin)),
    )
    gate_up = randn(num_rows, 24576)
    yield lambda: silu_mul(gate_up), lambda: silu(gate_up[:, :12288]) * gate_up[:, 12288:]
    (k_cache, v_cache), slots = randn(2, 300, 16, 8, 128), torch.arange(num_rows, device=DEVICE)
    yield (
        lambda: store_kv(k, k, slots, k_cache, v_cache),
        lambda: [cache.flatten(0, 1).index_copy_(0, slots, k) for cache in (k_cache, v_cache)],
    )


PARTS = {
    "roofs": roofs, "products": products, "row_products": row_products,
    "decode": decode, "prefill": prefill, "fused": fused,
}  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    for part in sys.argv[1:] or PARTS:
        try:
            PARTS[part]()
        except Exception:  # the next part may still say something
            traceback.print_exc(file=sys.stdout)
