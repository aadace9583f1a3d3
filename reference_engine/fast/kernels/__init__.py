"""Triton kernels: the KV store, paged prefill and paged decode, and the small operations of a layer, fused.

Nothing here is imported until the `triton` backend is opened: Triton is an optional dependency. The kernels are tested
on the CPU through Triton's interpreter (`TRITON_INTERPRET=1`); their speed on a GPU stands in
reports/h200/engine.md.
"""

from __future__ import annotations
