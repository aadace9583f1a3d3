"""What makes the engine fast: kernels, packed weights, huge pages, fused operations, recorded steps."""

from __future__ import annotations
