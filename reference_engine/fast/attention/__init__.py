"""Attention backends that need what is in this room."""

from __future__ import annotations
