"""Attention backends: one file each, behind one small Protocol, chosen by name."""

from __future__ import annotations
