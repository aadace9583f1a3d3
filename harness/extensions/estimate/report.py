"""What a model needs, for a terminal and for Markdown."""

from harness.errors import printable
from harness.extensions.estimate.result import Estimate, GpuEstimate, MeasuredProfile, ModelSize
from harness.report.terminal import fitted_table

_GPU_HEADER = (
    "GPU", "GB", "needed", "requests that fit", "prefill ms", "bound by", "decode ms", "bound by", "tokens/s",
)  # fmt: skip


def estimate_text(result: Estimate, *, tablefmt: str = "simple") -> str:
    """Return the sizes, the weights by part, and a row for each GPU."""
    size = result.size
    parts = [[part.name, f"{part.num_parameters:,}", _gb(part.num_bytes)] for part in size.parts]
    blocks = [
        "\n".join(_sizes(size)),
        fitted_table(parts, ["weights of", "parameters", "GB"], tablefmt=tablefmt),
    ]
    if size.cache_parts:
        kept = [[part.name, f"{part.num_tensors:,}", _mb(part.num_bytes)] for part in size.cache_parts]
        blocks.append(fitted_table(kept, ["cache of", "tensors", "MB"], tablefmt=tablefmt))
    if result.gpus:
        rows = [_row(gpu, result.num_requests) for gpu in result.gpus]
        requests = "1 request" if result.num_requests == 1 else f"{result.num_requests} requests"
        blocks += [
            f"{requests} of {size.context:,} tokens; a prefill is of one prompt, a decode step of all:",
            fitted_table(rows, _GPU_HEADER, tablefmt=tablefmt),
            "No engine is faster than this. Activations, graphs and the engine's own memory come on top. Dense figures "
            f"of the {', the '.join(dict.fromkeys(gpu.source for gpu in result.gpus))}.",
        ]
    if result.measured is not None:
        blocks += _measured(result.measured, [gpu.gpu for gpu in result.gpus], tablefmt)
    return printable("\n\n".join(blocks))


def _measured(measured: MeasuredProfile, gpus: list[str], tablefmt: str) -> list[str]:
    """Return a row for each phase of a profile: its time, and the least that each GPU needs for the same steps."""
    rows = [
        [phase.name, f"{phase.num_steps:,}", *(f"{item * 1e3:,.3f}" for item in (phase.measured_s, *phase.best_s))]
        for phase in measured.phases
    ]
    header = ["phase", "steps", "measured ms", *(f"{name} ms at best" for name in gpus)]
    return [
        f"measured: {measured.engine} on {measured.device}, {measured.model} in {measured.dtype}:",
        fitted_table(rows, header, tablefmt=tablefmt),
    ]


def _sizes(size: ModelSize) -> list[str]:
    experts = f", {size.num_chosen} of {size.num_experts} experts a token" if size.num_experts else ""
    return [
        f"{size.model} ({size.model_type}), weights in {size.dtype}, cache in {size.cache_dtype}",
        f"  weights      {_gb(size.weights_bytes)} GB: {size.num_parameters:,} parameters, "
        f"{size.num_active:,} of them for each token{experts}",
        f"  cache        {_mb(size.cache_bytes)} MB for {size.context:,} tokens, "
        f"{size.cache_bytes_per_token:,.0f} bytes for one more",
        f"  blocks       {size.num_blocks:,} of {size.block_size} tokens, "
        f"{size.block_size * size.cache_bytes_per_token:,.0f} bytes each",
        f"  prefill      {size.prefill_flops / 1e9:,.3f} GFLOP for {size.context:,} tokens",
        f"  decode       {size.decode_flops / 1e9:,.3f} GFLOP for a token with that context",
    ]


def _row(gpu: GpuEstimate, num_requests: int) -> list[str]:
    return [
        gpu.gpu,
        _gb(gpu.memory_bytes),
        _gb(gpu.needed_bytes) + ("" if gpu.fits else " (does not fit)"),
        f"{gpu.most_requests:,}",
        f"{gpu.prefill_s * 1e3:,.3f}",
        gpu.prefill_bound,
        f"{gpu.decode_step_s * 1e3:,.3f}",
        gpu.decode_bound,
        f"{num_requests / gpu.decode_step_s:,.0f}",
    ]


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.3f}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.3f}"
