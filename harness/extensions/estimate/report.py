"""What a model needs, from its config alone: plain data and its text. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar

from harness.errors import printable
from harness.report.terminal import fitted_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """The weights of one part of a model."""

    name: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSize:
    """One operation in all layers, by its formula (docs/profiling.md): of a prompt, and of a token behind it."""

    name: str
    prefill_flops: int
    """Of products and attention, or of pointwise work where it has none of them."""
    prefill_bytes: int
    """Read and written, if each operation is computed by itself."""
    decode_flops: int
    decode_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePart:
    """What layers of one kind keep of a request."""

    name: str
    """`every token`, `window` (no longer growing at the context) or `state` (of one size at any)."""
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a model at a context length."""

    model: str
    model_type: str
    dtype: str
    cache_dtype: str
    num_parameters: int
    num_active: int
    """Parameters that one token is multiplied with: of experts, those that are chosen; without the embedding."""
    weights_bytes: int
    parts: tuple[PartSize, ...]
    num_experts: int
    """Of one layer; 0 for a dense model."""
    num_chosen: int
    context: int
    cache_bytes: int
    """Of one request at that context: keys and values, latents, states."""
    cache_bytes_per_token: float
    """Of one token more at that context."""
    cache_parts: tuple[CachePart, ...]
    block_size: int
    num_blocks: int
    """Of one request, for what grows with every token."""
    prefill_flops: int
    """Of a prompt of that length: products and attention, a multiply-add counting as two; masked pairs left out."""
    decode_flops: int
    """Of one token at that context."""
    operations: tuple[OperationSize, ...] = ()
    """In the order of computation; empty if the formulas do not add up to the FLOPs that torch counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEstimate:
    """The model on one GPU, as far as its data sheet goes: nothing runs faster than this."""

    IN_DOCUMENT: ClassVar = ("fits",)
    gpu: str
    source: str
    """Of the GPU's figures."""
    memory_bytes: int
    needed_bytes: int
    """Weights and the caches of all requests; activations and the engine's own come on top."""
    most_requests: int
    """That fit at the context; 0 if the weights alone do not."""
    prefill_s: float
    """Of one prompt."""
    prefill_bound: str
    """`compute` or `memory`."""
    decode_step_s: float
    """Of one token for all requests."""
    decode_bound: str

    @property
    def fits(self) -> bool:
        """Whether the weights and all caches are smaller than the GPU's memory."""
        return self.needed_bytes <= self.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPhase:
    """The captured steps of a profile's phase, and the best that each GPU could do with the same steps."""

    name: str
    num_steps: int
    measured_s: float
    best_s: tuple[float, ...]
    """By GPU, in the order of `Estimate.gpus`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """A profile beside the estimate."""

    engine: str
    model: str
    dtype: str
    device: str
    phases: tuple[MeasuredPhase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One model on some GPUs."""

    kind: ClassVar = "estimate"
    IN_DOCUMENT: ClassVar = ("kind",)
    size: ModelSize
    num_requests: int
    gpus: tuple[GpuEstimate, ...]
    measured: MeasuredProfile | None = None


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
    blocks += _operations(size, tablefmt)
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
    return printable("\n\n".join(blocks), keeps_lines=True)


_FORMULAS = {
    "k_proj": "2 T D K H", "v_proj": "2 T D K H", "q_proj": "2 T D N H", "o_proj": "2 T N H D", "attention": "4 P N H",
    "gate_proj": "2 T D F", "up_proj": "2 T D F", "down_proj": "2 T F D", "lm_head": "2 R D V", "act": "2 T F",
    "norm": "4 T D + 2 T", "q_norm": "4 T N H + 2 T N", "k_norm": "4 T K H + 2 T K", "q_rope": "3.5 T N H",
    "k_rope": "3.5 T K H", "attn_residual": "T D", "output": "T D",
}  # fmt: skip
"""FLOPs of each operation in a layer, by the end of its name; K and V that are stored cost none."""


def _formula(name: str) -> str:
    last = name.rpartition(".")[2]
    return _FORMULAS.get("norm" if last.endswith("layernorm") else last, "")


def _operations(size: ModelSize, tablefmt: str) -> list[str]:
    """Return a row for each operation: its formula, and FLOPs and bytes of the prompt and of a token behind it."""
    if not size.operations:
        return ["No table by operation: the formulas know dense decoders like Llama's, and this is another."]
    rows = [
        [
            operation.name,
            _formula(operation.name),
            f"{operation.prefill_flops / 1e9:,.3f}",
            _mb(operation.prefill_bytes),
            f"{operation.decode_flops / 1e9:,.6f}",
            _mb(operation.decode_bytes),
        ]
        for operation in size.operations
    ]
    header = ["operation, all layers", "FLOPs in a layer", "prefill GFLOP", "MB", "decode GFLOP", "MB"]
    return [
        fitted_table(rows, header, num_names=2, tablefmt=tablefmt),
        "T tokens, R rows of logits, D hidden size, F MLP, V vocabulary, N heads, K KV heads, H head size, P pairs of\n"
        "a query and a key that it sees; MB if each operation reads its inputs and weights and writes its output.",
    ]


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
