"""llama.cpp's Mamba loses digits where a time step is small: its softplus is log(1 + exp(x)). Without the harness.

    PYTHONPATH=. python reports/cpu/llamacpp_softplus.py     # llama-cpp-python, gguf, torch, transformers

Prints the distance of logits from HF's in float64, over their norm: of llama.cpp, of HF in float32, and of HF in float32 with
that softplus. Seen (llama-cpp-python 0.3.36, AMD EPYC): see reports/cpu/llamacpp.md.
"""

import tempfile
from pathlib import Path

import torch
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM

from tests.llamacpp_files import last_logits, write_mamba

IDS = list(range(5, 200, 3))


@torch.no_grad()
def of_hf(model: MambaForCausalLM, dtype: torch.dtype) -> torch.Tensor:
    """Return the same of HF."""
    return model.to(dtype)(torch.tensor([IDS]), use_cache=False).logits[0, -1].double()


def main() -> None:
    """Print the distances for two sizes of the time step."""
    softplus = functional.softplus
    for bias in (0.0, -7.0):
        torch.manual_seed(0)
        config = MambaConfig(vocab_size=256, hidden_size=64, state_size=8, num_hidden_layers=2, time_step_rank=4)
        model = MambaForCausalLM(config).eval()
        for name, value in model.named_parameters():
            if name.endswith("dt_proj.bias"):
                value.data[:] = bias
            elif name.endswith(("mixer.D", "dt_proj.weight")):  # what goes around the recurrence, and larger steps
                value.data[:] = 0
            elif value.dim() > 1 and not name.endswith("A_log"):
                value.data = 0.3 * torch.randn(value.shape)
        with tempfile.TemporaryDirectory() as folder:
            write_mamba(model, Path(folder) / "mamba.gguf")
            logits_by_name = {"llama.cpp": last_logits(Path(folder) / "mamba.gguf", IDS)}
        truth = of_hf(model, torch.float64)
        logits_by_name["HF in float32"] = of_hf(model, torch.float32)
        functional.softplus = lambda x: torch.log(1 + torch.exp(x))
        logits_by_name["HF in float32, softplus as log(1 + exp(x))"] = of_hf(model, torch.float32)
        functional.softplus = softplus
        print(f"bias of the time step {bias}:")
        for name, logits in logits_by_name.items():
            print(f"  {name:44} {float((logits - truth).norm() / truth.norm()):.1e}")


if __name__ == "__main__":
    main()
