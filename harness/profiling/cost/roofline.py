"""A phase and its operations under the machine's two roofs (Williams et al. 2009)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from harness.engines.stepping import ROTARY
from harness.formats.taps import FINAL_NORM
from harness.profiling.cost.formulas import Cost
from harness.results.profile import BoundBy, Ceilings, RooflinePoint

OVERHEAD_SHARE = 0.1
"""Below this share of the lower roof it is not that roof that limits."""
_COMPUTED_WITH = {
    "self_attn.k_proj": "self_attn.q_proj", "self_attn.v_proj": "self_attn.q_proj", "self_attn.k_norm":
    "self_attn.q_norm", "k_rope": "q_rope", "v_cache": "k_cache", "k_cache": "attention", "mlp.up_proj":
    "mlp.gate_proj", ROTARY: "input_layernorm", "q_rope": "self_attn.q_norm", "post_attention_layernorm":
    "attn_residual", "input_layernorm": "output", FINAL_NORM: "output",
}  # fmt: skip
"""The operation that stands for this one in an engine that computes several in one."""


def bound_by(flops: int, bytes_moved: int, time_s: float, ceilings: Ceilings) -> BoundBy:
    """Say what limits work that takes this long."""
    compute_s, memory_s = flops / ceilings.matmul_flops_per_s, bytes_moved / ceilings.copy_bytes_per_s
    if max(compute_s, memory_s) < OVERHEAD_SHARE * time_s:
        return BoundBy.OVERHEAD
    return BoundBy.COMPUTE if compute_s > memory_s else BoundBy.MEMORY


def fold(costs: Mapping[str, Cost], names: Collection[str]) -> dict[str, Cost]:
    """Sum up the costs of operations that an engine computes in one, under the names that it shows."""
    folded: dict[str, Cost] = {}
    for site, cost in costs.items():
        name = site
        while name not in names and name in _COMPUTED_WITH:
            name = _COMPUTED_WITH[name]
        folded[name] = folded[name] + cost if name in folded else _renamed(cost, name)
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


def _renamed(cost: Cost, site: str) -> Cost:
    return Cost(site=site, flops=cost.flops, elementwise_flops=cost.elementwise_flops, bytes_moved=cost.bytes_moved)
