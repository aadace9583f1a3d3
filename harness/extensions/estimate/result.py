"""What a model needs, from its config alone, as plain data for the reports. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """The weights of one part of a model."""

    name: str
    num_parameters: int
    num_bytes: int


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
