"""The limits of an attention backend, known before anything is loaded."""

from __future__ import annotations

from typing import Protocol

from reference_engine.cache_spec import CacheSpec

__all__ = ["CacheLimits", "Limits", "refusals_of_stored_dtype"]


def refusals_of_stored_dtype(spec: CacheSpec) -> list[tuple[str, str]]:
    """Return what is expected and found by a backend that stores K and V as they are."""
    return [] if spec.stored_dtype is None else [("kv_cache_dtype auto", str(spec.stored_dtype).removeprefix("torch."))]


class CacheLimits:
    """The limits of a backend that serves everything but a cache in another dtype."""

    __slots__ = ()

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """See `Limits.refusals`."""
        return refusals_of_stored_dtype(spec)


class Limits(Protocol):
    """What a backend serves; one without limits serves all that the engine's options can ask for."""

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """Return what is expected and what is found, of everything that the backend cannot serve."""
