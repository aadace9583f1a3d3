"""Layers that only some families of models have; `checkpoint.families` says which."""

from __future__ import annotations
