"""In float32, nano-vllm's RMSNorm changes its input, and the residual that it returns is its normed result.

Needs torch and nano-vllm's file layers/layernorm.py (commit bb823b3), whose path is the argument; nothing of ours.
"""

import importlib.util
import sys

import torch

torch.compile = lambda function: function  # where it is compiled: not tried
torch.set_grad_enabled(False)

spec = importlib.util.spec_from_file_location("layernorm", sys.argv[1])
layernorm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(layernorm)

for dtype in (torch.bfloat16, torch.float32):
    torch.manual_seed(0)
    norm = layernorm.RMSNorm(64).to(dtype)
    hidden, residual = torch.randn(2, 4, 64, dtype=dtype) * 3
    before, total = hidden.clone(), hidden + residual
    norm(hidden)
    print(f"{dtype}: behind norm(x), x is", "as it was" if torch.equal(hidden, before) else "normed")
    _, residual = norm(before, residual)
    returned = "x + residual" if torch.equal(residual, total) else "a normed one"
    print(f"{dtype}: norm(x, residual) returns as residual", returned)
