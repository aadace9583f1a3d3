"""The interface of an attention backend, and how one is found by name.

Shapes: T tokens, C context tokens, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from reference_engine.attention.contiguous import ContiguousAttention
from reference_engine.attention.limits import Limits
from reference_engine.attention.paged import PagedAttention
from reference_engine.attention.recompute import RecomputeAttention
from reference_engine.batch import Batch
from reference_engine.errors import ConfigError
from reference_engine.kv_cache import CacheSpec, KVCache

__all__ = ["BACKENDS", "AttentionBackend", "BackendClass", "find_backend"]


class AttentionBackend(Protocol):
    """Lets each token see the earlier ones of its request."""

    has_blocks: bool
    """Whether slots and block tables mean something to an observer."""
    block_size: int
    """Tokens in a block of the pool that the engine keeps for this backend."""
    num_blocks: int
    """Blocks of that pool, the null block included."""

    @property
    def cache(self) -> KVCache | None:
        """The cache that keeps K and V between steps. Without one, every step gets all rows of its requests."""

    def plan(self, batch: Batch) -> Any:
        """Prepare what all layers of a step share; it comes back as `batch.plan`."""

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Store K and V, and return the context [T, N, H] of softmax(q k / sqrt(H)) v over each row's own past.

        Where `CacheSpec.value_dim` is given, V is the first part of K, and so wide is the context.
        """

    def read_back(self, layer: int, block_table: Sequence[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stored K and V, each [C, K, H], of a request's first `num_tokens` positions."""


class BackendClass(Protocol):
    """Opens a backend; knows its limits before."""

    @property
    def limits(self) -> Limits | None:
        """The limits of what it can serve; None: it serves everything."""

    @property
    def has_blocks(self) -> bool:
        """See `AttentionBackend.has_blocks`."""

    def __call__(self, spec: CacheSpec, /) -> AttentionBackend:
        """Allocate the cache."""


BACKENDS: Mapping[str, BackendClass] = {
    "paged": PagedAttention,
    "contiguous": ContiguousAttention,
    "recompute": RecomputeAttention,
}


def find_backend(name: str, spec: CacheSpec, backends: Mapping[str, BackendClass] | None = None) -> BackendClass:
    """Return the backend of this name, to be called with `spec`; nothing is allocated yet. None: of `BACKENDS`.

    Raises:
        ConfigError: there is none, or it cannot serve `spec`; the message lists those that can.
    """
    backends = BACKENDS if backends is None else backends
    fitting = ", ".join(own for own, backend in backends.items() if not _refusals(backend, spec))
    if name not in backends:
        raise ConfigError(
            "unknown attention backend",
            where="EngineConfig.attention_backend",
            expected=f"one of {fitting}",
            actual=name,
        )
    refusals = _refusals(backends[name], spec)
    if refusals:
        raise ConfigError(
            f"the attention backend {name} does not serve this",
            where="EngineConfig.attention_backend",
            expected="; ".join(expected for expected, _ in refusals),
            actual="; ".join(actual for _, actual in refusals),
            hint=f"Backends that do: {fitting or 'none'}.",
        )
    return backends[name]


def _refusals(backend: BackendClass, spec: CacheSpec) -> list[tuple[str, str]]:
    return [] if backend.limits is None else backend.limits.refusals(spec)
