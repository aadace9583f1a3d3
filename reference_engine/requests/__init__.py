"""A request from its arrival to its end: what is asked for, its state, why it ends, and what comes out."""

from __future__ import annotations
