"""llama.cpp's Mamba loses digits where a time step is small: its softplus is log(1 + exp(x)). Without the harness.

    pip install llama-cpp-python gguf torch transformers && python reports/cpu/llamacpp_softplus.py

Prints the distance of logits from HF's in float64, over their norm: of llama.cpp, of HF in float32, and of HF in float32 with
that softplus. Seen (llama-cpp-python 0.3.36, AMD EPYC): see reports/cpu/llamacpp.md.
"""

import ctypes
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import torch
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM

IDS = list(range(5, 200, 3))


def write(model: MambaForCausalLM, path: Path) -> None:
    """Write what llama.cpp's converter writes of a Mamba."""
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(1024)
    writer.add_vocab_size(256)
    writer.add_tokenizer_model("none")
    for add, value in (
        (writer.add_embedding_length, 64), (writer.add_feed_forward_length, 0), (writer.add_head_count, 0),
        (writer.add_block_count, 2), (writer.add_ssm_conv_kernel, 4), (writer.add_ssm_inner_size, 128),
        (writer.add_ssm_state_size, 8), (writer.add_ssm_time_step_rank, 4), (writer.add_layer_norm_rms_eps, 1e-5),
    ):  # fmt: skip
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA, 2)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":
            tensor = -value.exp() if name.endswith("A_log") else value.squeeze()
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_llamacpp(path: Path) -> torch.Tensor:
    """Return the logits after the last token."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    context = llama_cpp.llama_init_from_model(model, llama_cpp.llama_context_default_params())
    tokens = (ctypes.c_int32 * len(IDS))(*IDS)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(IDS))) == 0
    return torch.tensor(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(256,)))


@torch.no_grad()
def of_hf(model: MambaForCausalLM, dtype: torch.dtype) -> torch.Tensor:
    """Return the same of HF."""
    return model.to(dtype)(torch.tensor([IDS]), use_cache=False).logits[0, -1].double()


def main() -> None:
    """Print the distances for two sizes of the time step."""
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
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
            write(model, Path(folder) / "mamba.gguf")
            found = {"llama.cpp": of_llamacpp(Path(folder) / "mamba.gguf").double()}
        truth = of_hf(model, torch.float64)
        found["HF in float32"] = of_hf(model, torch.float32)
        functional.softplus = lambda x: torch.log(1 + torch.exp(x))
        found["HF in float32, softplus as log(1 + exp(x))"] = of_hf(model, torch.float32)
        functional.softplus = softplus
        print(f"bias of the time step {bias}:")
        for name, logits in found.items():
            print(f"  {name:44} {float((logits - truth).norm() / truth.norm()):.1e}")


if __name__ == "__main__":
    main()
