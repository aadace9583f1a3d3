"""gptqmodel dequantises in float16 where float32 is asked for, and keeps biases in float16: shown without the harness.

    python reports/cpu/gptqmodel_float32.py FOLDER     # a GPTQ checkpoint of 4 bits, sym or not, in groups, no act-order

needs gptqmodel, safetensors, torch and transformers. Errors of one product, relative to it, against float64.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

NAME = "model.layers.0.self_attn.q_proj"


def weight(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs], computed in a dtype; AutoGPTQ's first format adds one to each zero point."""
    shifts = torch.arange(0, 32, 4)
    codes = ((tensors[f"{NAME}.qweight"][:, None] >> shifts[:, None]) & 15).flatten(0, 1)
    zeros = (((tensors[f"{NAME}.qzeros"][..., None] >> shifts) & 15) + 1).flatten(1)
    group = tensors[f"{NAME}.g_idx"].long()
    return ((codes - zeros[group]).to(dtype) * tensors[f"{NAME}.scales"].to(dtype)[group]).T


@torch.no_grad()
def main(folder: str) -> None:
    """Print how far the product is from that of the weight in float32, and of the weight in float16."""
    tensors = {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[0].self_attn.q_proj
    x = torch.randn(21, module.in_features, generator=torch.Generator().manual_seed(0))
    actual = module(x).double()
    bias = tensors.get(f"{NAME}.bias")
    for dtype in (torch.float32, torch.float16):
        product = x.double() @ weight(tensors, dtype).double().T
        expected = product if bias is None else product + bias.to(dtype).double()
        print(f"{type(module).__name__}, weight and bias in {dtype}: {float((actual - expected).norm() / actual.norm()):.2e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
