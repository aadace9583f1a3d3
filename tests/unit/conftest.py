"""Fixtures of models; those of extensions have them too."""

from .families import fused, tiny, tiny_folder

__all__ = ["fused", "tiny", "tiny_folder"]
