"""The limits of an attention backend, known before anything is loaded."""

from __future__ import annotations

from typing import Protocol

from reference_engine.kv_cache import CacheSpec

__all__ = ["Limits"]


class Limits(Protocol):
    """What a backend serves; one without limits serves all that the engine's options can ask for."""

    def refusals(self, spec: CacheSpec) -> list[tuple[str, str]]:
        """Return what is expected and what is found, of everything that the backend cannot serve."""
