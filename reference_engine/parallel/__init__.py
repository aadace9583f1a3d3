"""One model over several processes."""

from __future__ import annotations
