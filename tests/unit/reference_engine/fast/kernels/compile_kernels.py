"""Compile for GPUs, without one, what the wrappers launch; print shared memory, matrix units and copies on their way.

A program of its own: in the test's process the kernels are interpreted, and the interpreter takes more than a compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from reference_engine.fast.kernels.add_norm import add_norm, rms_norm
from reference_engine.fast.kernels.int8_product import int8_product
from reference_engine.fast.kernels.norm_rotate import norm_rotate
from reference_engine.fast.kernels.paged_decode import paged_decode
from reference_engine.fast.kernels.paged_prefill import cut_into_tiles, paged_prefill
from reference_engine.fast.kernels.row_product import row_product
from reference_engine.fast.kernels.silu_mul import silu_mul
from reference_engine.fast.kernels.store_kv import store_kv
from reference_engine.fast.kernels.tiling import find_tiling

CASES = [
    (90, torch.bfloat16, 128, 8, 2), (89, torch.float32, 80, 8, 2), (90, torch.bfloat16, 128, 32, 8),
    (90, torch.float16, 64, 32, 8), (90, torch.bfloat16, 128, 16, 8), (90, torch.bfloat16, 256, 4, 1),
    (90, torch.float32, 128, 32, 8),
]  # fmt: skip
"""Compute capability (of 9.0: sm_90a), dtype, size of a head, heads and KV heads: also those of Qwen3-8B, Llama-3.2-1B,
Qwen3-0.6B and Gemma-3-1B."""


def compile_only(
    kernel: JITFunction, compiled: list[dict[str, object]], dtype: torch.dtype, *args: object, **kwargs: object
) -> None:
    result = kernel.warmup(*args, **kwargs)
    compiled.append(
        {
            "name": result.metadata.name,
            "shared_bytes": result.metadata.shared,
            # Asynchronous copies that are still on their way when the oldest are waited for: 0 where none is ahead.
            "copies_ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", result.asm["ptx"])), default=0),
            "is_float32": dtype == torch.float32,
            "has_matrix_units": "wgmma" in result.asm["ptx"] or "mma.sync" in result.asm["ptx"],
            "target": re.search(r"^\.target (\w+)", result.asm["ptx"], re.MULTILINE)[1],
            **assembled(result.asm["ptx"], result.metadata.target.arch),
        }
    )


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """Return the registers of a thread and the bytes that it spills, as ptxas says that has no GPU."""
    ptxas = next(Path(triton.__file__).parent.rglob("ptxas"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        chip = "sm_90a" if capability == 90 else f"sm_{capability}"
        command = [ptxas, "-v", f"--gpu-name={chip}", source, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        name: sum(map(int, re.findall(pattern, said)))
        for name, pattern in {
            "registers": r"Used (\d+) registers",
            "spilled_bytes": r"(\d+) bytes spill stores",
        }.items()
    }


def compile_all(
    capability: int, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv: int
) -> list[dict[str, object]]:
    target, compiled = GPUTarget("cuda", capability, 32), []
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: capability,  # what Triton keeps compiled kernels by
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    JITFunction.__getitem__ = lambda self, grid: partial(compile_only, self, compiled, dtype, grid=grid)
    q, kv = torch.zeros(3, num_heads, head_dim, dtype=dtype), torch.zeros(3, num_kv, head_dim, dtype=dtype)
    caches = [torch.zeros(4, 16, num_kv, head_dim, dtype=dtype) for _ in "kv"]
    narrow, wide = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 40, dtype=torch.int64)
    lens, tiling = torch.ones(3, dtype=torch.int64), find_tiling(head_dim, dtype)
    tiles = torch.tensor(cut_into_tiles([3], [3], tiling.rows), dtype=torch.int32)
    store_kv(kv, kv, lens, *caches)
    for window in (None, 600):
        for tables in (narrow, wide):
            paged_decode(q, *caches, tables, lens, torch.empty_like(q), window=window, tiling=tiling)
        paged_prefill(q, *caches, narrow, tiles, torch.empty_like(q), window=window, tiling=tiling)
    in_float8 = [cache.to(torch.float8_e4m3fn) for cache in caches]
    store_kv(kv, kv, lens, *in_float8, k_scale=0.5, v_scale=0.5)
    paged_decode(q, *in_float8, wide, lens, torch.empty_like(q), window=None, tiling=tiling, k_scale=0.5)
    paged_prefill(q, *in_float8, narrow, tiles, torch.empty_like(q), window=None, tiling=tiling, v_scale=0.5)
    rows, weight, cos = torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), q[:, :1]
    rms_norm(rows, weight, 1e-6)
    add_norm(rows, rows, weight, 1e-6)
    silu_mul(rows)
    for bias in (None, weight[:6]):
        row_product(rows[:1], torch.zeros(6, 4096, dtype=dtype), bias)
    in_float8 = torch.zeros(6, 4096, dtype=dtype).to(torch.float8_e4m3fn)
    row_product(rows[:1], in_float8, None, torch.zeros(6, 32), 128)
    integers, scales = torch.zeros(6, 4096, dtype=torch.int8), torch.zeros(6, 1)
    for num_rows in (1, 64):
        int8_product(
            torch.zeros(num_rows, 4096, dtype=torch.int8), torch.zeros(num_rows, 1), integers, scales, None, dtype
        )
    qkv = torch.zeros(3, (num_heads + 2 * num_kv) * head_dim, dtype=dtype)
    for norm_weight in (weight[:head_dim], None):
        norm_rotate(
            qkv,
            cos.contiguous(),
            cos.contiguous(),
            norm_weight,
            norm_weight,
            1e-6,
            num_heads,
            num_kv,
            keeps_normed=norm_weight is not None,
        )
    return compiled


if __name__ == "__main__":
    json.dump([compile_all(*case) for case in CASES], sys.stdout)
