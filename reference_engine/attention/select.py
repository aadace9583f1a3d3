"""The attention backends by name, and what each of them can serve, known before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from reference_engine.attention.backend import AttentionBackend
from reference_engine.attention.contiguous import ContiguousAttention
from reference_engine.attention.limits import Limits
from reference_engine.attention.paged import PagedAttention
from reference_engine.attention.recompute import RecomputeAttention
from reference_engine.cache_spec import CacheSpec
from reference_engine.errors import ConfigError

__all__ = ["BACKENDS", "BackendClass", "find_backend"]


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
    fitting = ", ".join(served for served, backend in backends.items() if not _refusals(backend, spec))
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
