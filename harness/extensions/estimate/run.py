"""Estimates what a model needs, and how fast a GPU of some data sheet could run it at best."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.estimate.meta_model import MetaModel, read_config
from harness.extensions.estimate.report import (
    CachePart,
    Estimate,
    GpuEstimate,
    MeasuredPhase,
    MeasuredProfile,
    ModelSize,
    OperationSize,
    PartSize,
)
from harness.profiling.formulas import operation_costs
from harness.profiling.gate.baseline import from_profile
from harness.profiling.gpus import Gpu, find_gpu
from harness.results.profile import StepShape

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_PARTS = {
    "experts": r"(^|\.)experts\.",
    "embedding": r"embed|wte|word_embeddings",
    "head": r"lm_head|embed_out",
    "states": r"mamba|mixer|linear_attn|ssm|recurrent|conv",
    "attention": r"attn|attention",
    "norms": r"norm|(^|\.)ln",
    "mlp": r"mlp|feed_forward|ffn|shared_expert|block_sparse_moe|moe",
}
"""Parts of a model by the paths of their weights; the first that fits."""


def estimate(
    model: str,
    *,
    dtype: str,
    cache_dtype: str | None = None,
    gpus: Sequence[str],
    num_requests: int,
    context: int,
    block_size: int = 16,
    profile: Path | None = None,
) -> Estimate:
    """Estimate a model.

    Args:
        model: folder, config.json, embedded checkpoint, or model of the hub.
        dtype: of the weights and of the products: a key of `ITEMSIZES`.
        cache_dtype: of keys and values; None: that of the weights, bfloat16 for float8.
        gpus: names.
        num_requests: that decode together.
        context: tokens of each.
        block_size: tokens of a block of the cache.
        profile: folder of a profile, to be put beside what the GPUs could do with its steps.

    Raises:
        HarnessError: MODEL_NOT_SIZED; BAD_PROFILE; BAD_OPTION: a GPU is not in the table, or has no unit for the dtype.
    """
    chosen_gpus = [find_gpu(name) for name in gpus]
    cache_dtype = cache_dtype or ("bfloat16" if dtype == "float8" else dtype)
    meta = MetaModel(read_config(model), model)
    size = _size(meta, model, dtype, cache_dtype, context, block_size)
    return Estimate(
        size=size,
        num_requests=num_requests,
        gpus=tuple(_on(gpu, meta, size, num_requests) for gpu in chosen_gpus),
        measured=None if profile is None else _measured(profile, chosen_gpus, meta, size),
    )


def _measured(profile: Path, gpus: Sequence[Gpu], meta: MetaModel, size: ModelSize) -> MeasuredProfile:
    """Return the profile's times, and for each GPU the sum of the best times of the same steps."""
    names, phases = from_profile(profile, _times)
    return MeasuredProfile(**names, phases=tuple(_phase(*item, gpus, meta, size) for item in phases))


def _times(document: Mapping[str, Any]) -> tuple[dict[str, str], list[tuple[str, float, list[StepShape]]]]:
    """Return what was profiled, and name, milliseconds and steps of each phase."""
    names = {name: str(document[name]) for name in ("engine", "model", "dtype", "device")}
    phases = document["phases"]
    return names, [
        (phase["name"], float(phase["wall_ms"]), [_shape(step) for step in phase["steps"]]) for phase in phases
    ]


def _shape(step: Mapping[str, Any]) -> StepShape:
    lengths = {name: tuple(map(int, step[name])) for name in ("query_lens", "context_lens")}
    if not all(1 <= rows <= context for rows, context in zip(*lengths.values(), strict=True)):
        raise ValueError("rows are no part of their contexts")
    return StepShape(phase=str(step["phase"]), num_sampled=int(step["num_sampled"]), **lengths)


def _phase(
    name: str, wall_ms: float, steps: list[StepShape], gpus: Sequence[Gpu], meta: MetaModel, size: ModelSize
) -> MeasuredPhase:
    needs = [_needs(step, meta, size) for step in steps]
    best = tuple(
        sum(max(flops / _rate(gpu, size.dtype), read / gpu.bytes_per_s) for flops, read in needs) for gpu in gpus
    )
    return MeasuredPhase(name=name, num_steps=len(steps), measured_s=wall_ms / 1000, best_s=best)


def _needs(step: StepShape, meta: MetaModel, size: ModelSize) -> tuple[int, int]:
    """Return the FLOPs of a step, and the bytes of weights and caches that it reads."""
    flops = step.num_sampled * meta.head_flops
    for rows, context in zip(step.query_lens, step.context_lens, strict=True):
        if rows == 1:
            flops += meta.decode_flops(context) - meta.head_flops
        else:
            before = meta.prefill_flops(context - rows) if context > rows else meta.head_flops
            flops += meta.prefill_flops(context) - before
    cached = sum(meta.cache_bytes(context, ITEMSIZES[size.cache_dtype]) for context in step.context_lens)
    return flops, _bytes_read(meta, size, step.num_rows) + cached


def _cache_parts(meta: MetaModel, context: int, itemsize: int) -> tuple[CachePart, ...]:
    """Return what is kept of a request, by how it grows: its sizes at one token, at the context, and one more tell."""
    sizes = [meta.cache_sizes(item, itemsize) for item in (1, context, context + 1)]
    bytes_by_kind: dict[str, list[int]] = {"every token": [], "window": [], "state": []}
    for first, now, later in zip(*sizes, strict=True):
        bytes_by_kind["every token" if later > now else "window" if now > first else "state"].append(now)
    return tuple(
        CachePart(name=name, num_tensors=len(num_bytes_of_tensors), num_bytes=sum(num_bytes_of_tensors))
        for name, num_bytes_of_tensors in bytes_by_kind.items()
        if num_bytes_of_tensors
    )


def _size(meta: MetaModel, model: str, dtype: str, cache_dtype: str, context: int, block_size: int) -> ModelSize:
    counts = Counter[str]()
    for path, parameter in meta.parameters():
        counts[_part(path)] += parameter.numel()
    total, itemsize, cached = sum(counts.values()), ITEMSIZES[dtype], ITEMSIZES[cache_dtype]
    idle = counts["experts"] * (meta.num_experts - meta.num_chosen) // max(1, meta.num_experts)
    cache_bytes = meta.cache_bytes(context, cached)
    prefill_flops, decode_flops = meta.prefill_flops(context), meta.decode_flops(context)
    # A tied embedding is multiplied with as the head.
    embedding = 0 if meta.is_tied else meta.embedding().numel()
    return ModelSize(
        model=model,
        model_type=meta.model_type,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_parameters=total,
        num_active=total - idle - embedding,
        weights_bytes=total * itemsize,
        parts=tuple(_part_size(name, count, itemsize) for name, count in counts.most_common()),
        num_experts=meta.num_experts,
        num_chosen=meta.num_chosen,
        context=context,
        cache_bytes=cache_bytes,
        cache_bytes_per_token=meta.cache_bytes(context + 1, cached) - cache_bytes,
        cache_parts=_cache_parts(meta, context, cached),
        block_size=block_size,
        num_blocks=-(-context // block_size),
        prefill_flops=prefill_flops,
        decode_flops=decode_flops,
        operations=_operations(meta, context, cached=cached, itemsize=itemsize, totals=(prefill_flops, decode_flops)),
    )


def _operations(
    meta: MetaModel, context: int, *, cached: int, itemsize: int, totals: tuple[int, int]
) -> tuple[OperationSize, ...]:
    """Return the cost of each operation by formula, if the products add up to what torch counted; else nothing."""
    activations = max(itemsize, ITEMSIZES["bfloat16"])
    shape = meta.shape(itemsize=activations, weight_itemsize=float(itemsize), kv_itemsize=float(cached))
    if shape is None:
        return ()
    steps = [
        StepShape(phase=phase, query_lens=(rows,), context_lens=(context,), num_sampled=1)
        for phase, rows in (("prefill", context), ("decode", 1))
    ]
    prefill, decode = (operation_costs(shape, [step]) for step in steps)
    if tuple(sum(cost.flops for cost in costs.values()) for costs in (prefill, decode)) != totals:
        return ()
    return tuple(
        OperationSize(
            name=name,
            prefill_flops=prefill[name].flops + prefill[name].elementwise_flops,
            prefill_bytes=prefill[name].bytes_moved,
            decode_flops=cost.flops + cost.elementwise_flops,
            decode_bytes=cost.bytes_moved,
        )
        for name, cost in decode.items()
    )


def _part_size(name: str, count: int, itemsize: int) -> PartSize:
    return PartSize(name=name, num_parameters=count, num_bytes=count * itemsize)


def _part(path: str) -> str:
    return next((name for name, pattern in _PARTS.items() if re.search(pattern, path)), "other")


def _on(gpu: Gpu, meta: MetaModel, size: ModelSize, num_requests: int) -> GpuEstimate:
    """Return the roofline's times: what is the longer, to read the bytes or to do the arithmetic."""
    rate = _rate(gpu, size.dtype)
    prefill = size.prefill_flops / rate, (_bytes_read(meta, size, size.context) + size.cache_bytes) / gpu.bytes_per_s
    read = _bytes_read(meta, size, num_requests) + num_requests * size.cache_bytes
    decode = num_requests * size.decode_flops / rate, read / gpu.bytes_per_s
    left = gpu.memory_bytes - size.weights_bytes
    return GpuEstimate(
        gpu=gpu.name,
        source=gpu.source,
        memory_bytes=gpu.memory_bytes,
        needed_bytes=size.weights_bytes + num_requests * size.cache_bytes,
        most_requests=max(0, left // max(1, size.cache_bytes)),
        prefill_s=max(prefill),
        prefill_bound=_bound(*prefill),
        decode_step_s=max(decode),
        decode_bound=_bound(*decode),
    )


def _rate(gpu: Gpu, dtype: str) -> float:
    if dtype not in gpu.flops_per_s:
        what, known = f"the {gpu.name} has no unit for products in {dtype}", ", ".join(gpu.flops_per_s)
        raise HarnessError(Code.BAD_OPTION, what, where="--dtype", expected=known, actual=dtype)
    return gpu.flops_per_s[dtype]


def _bytes_read(meta: MetaModel, size: ModelSize, num_rows: int) -> int:
    """Return the bytes of weights that a step of so many rows reads: of experts those that even routing chooses."""
    experts = next((part.num_bytes for part in size.parts if part.name == "experts"), 0)
    unchosen = (1 - size.num_chosen / max(1, size.num_experts)) ** num_rows if experts else 0.0
    embedding = 0 if meta.is_tied else meta.embedding().numel() * ITEMSIZES[size.dtype]
    return size.weights_bytes - embedding - round(experts * unchosen)


def _bound(compute_s: float, memory_s: float) -> str:
    return "compute" if compute_s > memory_s else "memory"
