"""The share of a model's compute whose output was judged: what a pass rests on."""

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from harness.formats.taps import Graph, Kind
from harness.oracle.model import HFModel

LEAST_JUDGED = 0.5
"""Share of the multiply-adds below which a comparison that found nothing is no pass: more of the model's work was left
out than was looked at."""


def judged_compute(hf: HFModel, judged: Collection[str], *, num_tokens: int) -> float:
    """Return the share of a model's multiply-adds whose output was judged, by itself or in what is computed from it.

    Args:
        hf: the model.
        judged: taps that were held to something.
        num_tokens: tokens that a query sees, for the products of attention.
    """
    cost = multiply_adds(hf, num_tokens)
    reached = judged_or_before(hf.graph, judged)
    whole = sum(cost.values())
    return sum(value for tap, value in cost.items() if tap in reached) / whole if whole else float(bool(reached))


def judged_or_before(graph: Graph, judged: Iterable[str]) -> set[str]:
    """Return the taps that were judged, and those that they are computed from."""
    found: set[str] = set()
    pending = [tap for tap in judged if tap in graph]
    while pending:
        tap = pending.pop()
        if tap not in found:
            found.add(tap)
            pending += graph[tap].inputs
    return found


def multiply_adds(hf: HFModel, num_tokens: int) -> Mapping[str, float]:
    """Return the multiply-adds of each operation for one token, by tap; operations of none are left out.

    Of a product they are the elements of its weights; of experts the share that a token chooses; of attention those of
    scores and context over `num_tokens` keys. The lookup of an embedding has none.
    """
    cost: dict[str, float] = {}
    by_module = {op.module: op.tap for op in hf.graph if not op.is_kept}
    lookup, share = hf.model.get_input_embeddings(), _chosen_experts(hf)
    for path, module in hf.model.named_modules():
        tap = _holder(path, by_module)
        if module is not lookup and tap is not None:
            factor = share if "experts" in path.split(".") else 1.0
            cost[tap] = cost.get(tap, 0.0) + factor * _num_weights(module)
    for op in hf.graph:
        if op.kind is Kind.ATTENTION and len(op.shape) > 0:
            width = 1
            for size in op.shape:
                width *= size
            seen = num_tokens if op.window is None else min(num_tokens, op.window)
            cost[op.tap] = cost.get(op.tap, 0.0) + 2.0 * width * seen
    return {tap: value for tap, value in cost.items() if value}


def unjudged(graph: Graph, judged: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what was judged only through what is computed from it, and what was not judged at all.

    Both are names of sites; of taps where a site was judged in other layers.
    """
    reached = judged_or_before(graph, judged)
    through = {op.tap for op in graph if op.tap in reached and op.tap not in judged}
    nothing = {op.tap for op in graph if op.tap not in reached}
    return _as_sites(graph, through), _as_sites(graph, nothing)


def _as_sites(graph: Graph, taps: Collection[str]) -> tuple[str, ...]:
    partly = {op.site for op in graph if op.tap not in taps}
    names = (op.tap if op.site in partly else op.site for op in graph if op.tap in taps)
    return tuple(dict.fromkeys(names))


def _holder(path: str, by_module: Mapping[str, str]) -> str | None:
    """Return the tap of the module itself, or of the nearest one around it that shows one."""
    while path and path not in by_module:
        path = path.rpartition(".")[0]
    return by_module.get(path)


def _num_weights(module: nn.Module) -> int:
    """Count the elements of a module's own matrices: biases and gains are added or scaled with, not multiplied out."""
    return sum(weight.numel() for weight in module.parameters(recurse=False) if weight.dim() > 1)


def _chosen_experts(hf: HFModel) -> float:
    """Return the share of the experts that computes a token; 1 where the config names no number."""
    chosen = getattr(hf.config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    there = next((number for name in names if (number := getattr(hf.config, name, None))), None)
    return min(1.0, chosen / there) if isinstance(chosen, int) and isinstance(there, int) else 1.0
