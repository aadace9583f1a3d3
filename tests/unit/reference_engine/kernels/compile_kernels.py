"""Compile for a GPU, without one, what the wrappers launch; print shared memory and whether matrix units are used.

A program of its own: in the test's process the kernels are interpreted, and the interpreter takes what no compiler does.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from reference_engine.kernels.paged_decode import paged_decode
from reference_engine.kernels.paged_prefill import cut_into_tiles, paged_prefill
from reference_engine.kernels.store_kv import store_kv
from reference_engine.kernels.tiling import find_tiling

COMPILED: list[dict[str, object]] = []


def compile_only(kernel: JITFunction, grid: object) -> object:
    def launch(*args: object, **kwargs: object) -> None:
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        ptx = compiled.asm["ptx"]
        COMPILED.append(
            {
                "name": compiled.metadata.name,
                "shared_bytes": compiled.metadata.shared,
                "has_matrix_units": "wgmma" in ptx or "mma.sync" in ptx,
            }
        )

    return launch


def main(capability: int, dtype: torch.dtype, head_dim: int) -> None:
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )
    JITFunction.__getitem__ = lambda self, grid: compile_only(self, grid)
    q, kv = torch.zeros(3, 8, head_dim, dtype=dtype), torch.zeros(3, 2, head_dim, dtype=dtype)
    caches = [torch.zeros(4, 16, 2, head_dim, dtype=dtype) for _ in "kv"]
    narrow, wide = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 40, dtype=torch.int64)
    lens, tiling = torch.ones(3, dtype=torch.int64), find_tiling(head_dim, dtype)
    tiles = torch.tensor(cut_into_tiles([3], [3], tiling.rows), dtype=torch.int32)
    store_kv(kv, kv, lens, *caches)
    for window in (None, 600):
        for tables in (narrow, wide):
            paged_decode(q, *caches, tables, lens, torch.empty_like(q), window=window, tiling=tiling)
        paged_prefill(q, *caches, narrow, tiles, torch.empty_like(q), window=window, tiling=tiling)
    print(json.dumps(COMPILED))


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]))
