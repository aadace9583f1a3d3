"""A phase and its operations under the machine's two roofs (Williams et al. 2009)."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch

from harness.engines.stepping import ROTARY
from harness.formats.taps import FINAL_NORM
from harness.profiling.formulas import Cost
from harness.profiling.timing import synchronize
from harness.results.profile import BoundBy, Ceilings, RooflinePoint

_REPEATS = 10


def measure_ceilings(
    dtype: torch.dtype, device: str, *, num_bytes: int | None = None, matrix_size: int | None = None
) -> Ceilings:
    """Measure copy bandwidth and the rate of a square matrix product: the best of a few runs of each.

    `num_bytes` is the size of the copied tensor; None: larger than the caches of a CPU (128 MiB) or a GPU (1 GiB). The
    matrices of the product have `matrix_size` rows and columns; None: 1024 on a CPU, 8192 on a GPU. There are as many
    threads as torch uses now.
    """
    is_cuda = torch.device(device).type == "cuda"
    num_bytes = num_bytes or (1 << 30 if is_cuda else 1 << 27)
    size = matrix_size or (8192 if is_cuda else 1024)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copy_s = best_seconds(lambda: target.copy_(source), device)
    product_s = min(best_seconds(product, device) for product in _products(size, dtype, device))
    return Ceilings(copy_bytes_per_s=2 * num_bytes / copy_s, matmul_flops_per_s=2 * size**3 / product_s)


def best_of(first: Ceilings, second: Ceilings) -> Ceilings:
    """Return the higher roofs of two measurements: a busy machine measures lower ones."""
    return Ceilings(
        copy_bytes_per_s=max(first.copy_bytes_per_s, second.copy_bytes_per_s),
        matmul_flops_per_s=max(first.matmul_flops_per_s, second.matmul_flops_per_s),
    )


def _products(size: int, dtype: torch.dtype, device: str) -> Iterator[Callable[[], object]]:
    """Yield the ways to compute a product: on a CPU the weights may be in oneDNN's layout, which is faster."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    yield lambda: torch.mm(left, right, out=out)
    if _has_packed_product(dtype, device):
        packed = torch.ops.mkldnn._reorder_linear_weight(right, size)
        yield lambda: torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")


def _has_packed_product(dtype: torch.dtype, device: str) -> bool:
    if torch.device(device).type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def best_seconds(work: Callable[[], object], device: str) -> float:
    """Return the shortest time of a few calls, after one that warms up."""
    work()
    times = []
    for _ in range(_REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)


OVERHEAD_SHARE = 0.1
"""Below this share of the lower roof, the roof is not what limits."""
_COMPUTED_WITH = {
    "self_attn.k_proj": "self_attn.q_proj", "self_attn.v_proj": "self_attn.q_proj", "self_attn.k_norm":
    "self_attn.q_norm", "k_rope": "q_rope", "v_cache": "k_cache", "k_cache": "attention", "mlp.up_proj":
    "mlp.gate_proj", ROTARY: "input_layernorm", "q_rope": "self_attn.q_norm", "post_attention_layernorm":
    "attn_residual", "input_layernorm": "output", FINAL_NORM: "output",
}  # fmt: skip
"""The operation that stands for this one in an engine that fuses several."""


def bound_by(flops: int, bytes_moved: int, time_s: float, ceilings: Ceilings) -> BoundBy:
    """Return what limits work of this duration."""
    compute_s, memory_s = flops / ceilings.matmul_flops_per_s, bytes_moved / ceilings.copy_bytes_per_s
    if max(compute_s, memory_s) < OVERHEAD_SHARE * time_s:
        return BoundBy.OVERHEAD
    return BoundBy.COMPUTE if compute_s > memory_s else BoundBy.MEMORY


def fold(costs: Mapping[str, Cost], names: Collection[str]) -> dict[str, Cost]:
    """Add up the costs of operations that an engine fuses, under the names that it shows."""
    folded: dict[str, Cost] = {}
    for site, cost in costs.items():
        name = site
        while name not in names and name in _COMPUTED_WITH:
            name = _COMPUTED_WITH[name]
        folded[name] = folded[name] + cost if name in folded else replace(cost, site=name)
    return folded


def point(name: str, cost: Cost, time_us: float, ceilings: Ceilings) -> RooflinePoint:
    """Place work under the roofs."""
    return RooflinePoint(
        name=name,
        flops=cost.flops,
        bytes_moved=cost.bytes_moved,
        time_us=time_us,
        intensity=cost.flops / cost.bytes_moved if cost.bytes_moved else 0.0,
        bound_by=bound_by(cost.flops, cost.bytes_moved, time_us / 1e6, ceilings),
    )
