"""Files for llama.cpp and its logits, without the harness: for tests, and for scripts that show what it computes."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import MambaForCausalLM

Change = Callable[[str, torch.Tensor], torch.Tensor]
_CONVERT = """
import sys, logging
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
logging.disable(logging.INFO)
folder = Path(sys.argv[2])
settings = ModelBase.load_hparams(folder, False)
kind = get_model_class(get_model_architecture(settings, ModelType.TEXT))
def no_vocabulary(model):
    model.gguf_writer.add_tokenizer_model("none")
    model.gguf_writer.add_vocab_size(settings["vocab_size"])
kind.set_vocab = no_vocabulary
with torch.inference_mode():
    kind(folder, gguf.LlamaFileType.ALL_F32, Path(sys.argv[3])).write()
"""
"""The steps of llama.cpp's converter, with no vocabulary: tiny models have none."""


def convert(checkout: Path, folder: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """Run the converter of a checkout of llama.cpp over a checkpoint."""
    command = [sys.executable, "-c", _CONVERT, str(checkout), str(folder), str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_mamba(model: MambaForCausalLM, file: Path, change: Change = lambda _name, tensor: tensor) -> None:
    """Write what the converter makes of a Mamba; `change` is given HF's name and the tensor, and plants a fault."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "mamba")
    writer.add_tokenizer_model("none")
    for add, value in (
        (writer.add_context_length, 1024), (writer.add_vocab_size, config.vocab_size),
        (writer.add_embedding_length, config.hidden_size), (writer.add_feed_forward_length, 0),
        (writer.add_head_count, 0), (writer.add_block_count, config.num_hidden_layers),
        (writer.add_ssm_conv_kernel, config.conv_kernel), (writer.add_ssm_inner_size, config.intermediate_size),
        (writer.add_ssm_state_size, config.state_size), (writer.add_ssm_time_step_rank, config.time_step_rank),
        (writer.add_layer_norm_rms_eps, config.layer_norm_epsilon),
    ):  # fmt: skip
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MAMBA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            tensor = -value.exp() if name.endswith("A_log") else value.squeeze()
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), change(name, tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def last_logits(file: Path, ids: Sequence[int]) -> torch.Tensor:
    """Return llama.cpp's logits after the last token, [vocabulary] float64, with a cache and attention in float32."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    params, options = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    params.n_gpu_layers, options.flash_attn_type = 0, 0
    options.type_k = options.type_v = 0
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
    context = llama_cpp.llama_init_from_model(model, options)
    tokens = (ctypes.c_int32 * len(ids))(*ids)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(ids))) == 0
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return torch.tensor(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(size,))).double()
