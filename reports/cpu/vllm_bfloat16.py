"""vLLM's rotary kernel for the CPU cuts bfloat16 off in its AVX2 build. No harness: torch and vLLM's own operator.

python reports/cpu/vllm_bfloat16.py avx2     # as on a CPU without AVX-512
python reports/cpu/vllm_bfloat16.py native   # the build that vLLM chooses here
"""

import sys

import torch

if sys.argv[1] == "avx2":  # vLLM asks torch which of its builds to load
    torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False

from vllm import _custom_ops as ops

torch.manual_seed(0)
tokens, heads, size = 512, 8, 64
query = torch.randn(tokens, heads * size, dtype=torch.bfloat16)
positions = torch.arange(tokens)
angles = positions[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
table = torch.cat([angles.cos(), angles.sin()], dim=-1).bfloat16()  # [tokens, size], as vLLM keeps it

first, second = query.double().view(tokens, heads, size).chunk(2, dim=-1)
cos, sin = (part[:, None] for part in table.double().chunk(2, dim=-1))
exact = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1)

actual = query.clone()
ops.rotary_embedding(positions, actual, query.clone(), size, table, True)
rounded, cut = exact.bfloat16(), (exact.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
for name, made in (("vLLM's kernel", actual), ("exact, rounded", rounded), ("exact, cut off", cut)):
    gain = ((made.double() - exact) * exact).sum() / (exact * exact).sum()
    smaller = ((made.double().abs() < exact.abs()).sum() / (made.double() != exact).sum()).item()
    print(f"{name:15} gain {gain:+.2e}   {smaller:6.1%} of the inexact are too small", end="   ")
    print(f"{(made == cut).double().mean():.1%} equal to cut off, {(made == rounded).double().mean():.1%} to rounded")
