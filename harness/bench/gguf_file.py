"""A Qwen3 checkpoint as a GGUF file without a vocabulary."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from harness.bench.peer import PeerMissingError


def write_gguf(folder: Path, path: Path, *, dtype: str) -> None:
    """Write the checkpoint's weights to `path` bit for bit; norms become float32, as llama.cpp wants them.

    Raises:
        PeerMissingError: the package gguf is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise PeerMissingError(str(error)) from error
    config = Qwen3Config.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "qwen3")
    _write_sizes(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "bfloat16": kinds.BF16, "float16": kinds.F16}[dtype]
    for name, tensor in load_file(folder / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:  # bytes, since numpy has no bfloat16
            writer.add_tensor(target, tensor.view(torch.uint8).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: Qwen3Config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
