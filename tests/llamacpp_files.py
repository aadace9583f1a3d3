"""Files for llama.cpp and its logits, without the harness: for tests, and for scripts that show what it computes."""

import ctypes
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MambaForCausalLM, PreTrainedModel

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
    _close(writer)


def write_glm4_moe(folder: Path, file: Path, change: Change = lambda _name, tensor: tensor) -> None:
    """Write what the converter makes of a GLM-4-MoE checkpoint with a layer that predicts a further token."""
    import gguf
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    num_layers, num_experts = config.num_hidden_layers + config.num_mtp_layers, config.n_routed_experts
    head_dim = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(file, "glm4moe")
    writer.add_tokenizer_model("none")
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings), (writer.add_vocab_size, config.vocab_size),
        (writer.add_embedding_length, config.hidden_size), (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads), (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_block_count, num_layers), (writer.add_nextn_predict_layers, config.num_mtp_layers),
        (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
        (writer.add_rope_dimension_count, int(head_dim * config.rope_parameters["partial_rotary_factor"])),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps), (writer.add_expert_count, num_experts),
        (writer.add_expert_used_count, config.num_experts_per_tok), (writer.add_expert_group_count, config.n_group),
        (writer.add_expert_group_used_count, config.topk_group),
        (writer.add_expert_gating_func, gguf.ExpertGatingFuncType.SIGMOID),
        (writer.add_expert_feed_forward_length, config.moe_intermediate_size),
        (writer.add_expert_shared_count, config.n_shared_experts), (writer.add_expert_weights_norm, True),
        (writer.add_leading_dense_block_count, config.first_k_dense_replace),
        (writer.add_expert_weights_scale, config.routed_scaling_factor),
    ):  # fmt: skip
        add(value)
    tensors = {name: change(name, tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if ".experts.0." in name]:
        prefix, _, rest = name.partition(".experts.0.")
        parts = [tensors.pop(f"{prefix}.experts.{at}.{rest}") for at in range(num_experts)]
        tensors[f"{prefix}.experts.{rest}"] = torch.stack(parts)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, num_layers)
    for name, tensor in tensors.items():
        hf_name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        writer.add_tensor(names.get_name(hf_name, (".weight", ".bias")), tensor.float().numpy())
    _close(writer)


def write_gemma3(model: PreTrainedModel, file: Path, kind: str, change: Change = lambda _name, tensor: tensor) -> None:
    """Write what the converter makes of a Gemma 3 of text alone, its matrices quantised to a type."""
    import gguf

    config, quantised = model.config, gguf.GGMLQuantizationType[kind]
    rope = config.rope_parameters
    writer = gguf.GGUFWriter(file, "gemma3")
    writer.add_tokenizer_model("none")
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings), (writer.add_vocab_size, config.vocab_size),
        (writer.add_embedding_length, config.hidden_size), (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads), (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_block_count, config.num_hidden_layers), (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_key_length, config.head_dim), (writer.add_value_length, config.head_dim),
        (writer.add_rope_freq_base, rope["full_attention"]["rope_theta"]),
        (writer.add_sliding_window, config.sliding_window),
    ):  # fmt: skip
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            tensor = change(name, value).float().numpy()
            gguf_name = names.get_name(name, (".weight", ".bias"))
            if name.endswith("norm.weight"):
                writer.add_tensor(gguf_name, tensor + 1)
            else:
                writer.add_tensor(gguf_name, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
    _close(writer)


def _close(writer: Any) -> None:
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
