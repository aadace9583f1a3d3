"""Writes GGUF: a checkpoint as llama.cpp's converter makes it, a LoRA adapter of PEFT's, and a file in float32.

Of quantised types it writes those that the package gguf quantises; K-quants are made by llama.cpp's own quantiser.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.architecture import (
    FAMILIES,
    ROPE_FACTORS,
    gguf_name,
    is_query_or_key,
    llama3_factors,
)
from harness.extensions.llamacpp.gguf.header import BY_NAME, PLAIN
from harness.extensions.llamacpp.gguf.model import gguf_package, rows_of_gguf
from harness.formats.checkpoint.checkpoint import Checkpoint, read_shard

if TYPE_CHECKING:
    import torch


import numpy as np
import torch

from harness.extensions.llamacpp.gguf.architecture import Metadata
from harness.extensions.llamacpp.gguf.model import GGUFModel, read_tensor
from harness.oracle.lora import read_adapter

Change = Callable[[str, "torch.Tensor"], "torch.Tensor"]
"""Given HF's name and a tensor in HF's order, returns what is written in its place."""


def write_gguf(
    folder: Path,
    path: Path,
    type_name: str = "F32",
    *,
    num_shards: int = 1,
    change: Change | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: "Mapping[str, torch.Tensor | None] | None" = None,
) -> Path:
    """Write the checkpoint in `folder` as a GGUF file.

    Args:
        folder: a checkpoint of Llama, Mistral, Qwen2 or Qwen3.
        path: of the file to write; with several shards, of a name without their numbers.
        type_name: type of the matrices, `F32`, `BF16`, `F16`, `Q8_0`, `Q4_0`, ...; one-dimensional tensors are always
            float32, as llama.cpp wants them.
        num_shards: files to write.
        change: plants a fault in the tensors.
        metadata: settings to write beside or in the place of the model's own, by their key without the architecture;
            None leaves one out.
        extra: the same for tensors, by their names in GGUF.

    Returns:
        The file, or its first shard.

    Raises:
        HarnessError: PACKAGE_MISSING, UNSUPPORTED_ARCHITECTURE, or UNSUPPORTED_GGUF for a type that the package gguf
            does not quantise to.
    """
    gguf = gguf_package()
    config = _config(folder)
    written = {**dict(_tensors(folder, config, change)), **(extra or {})}
    tensors = {name: values for name, values in written.items() if values is not None}
    per_shard = -(-len(tensors) // num_shards) if num_shards > 1 else 0
    writer = gguf.GGUFWriter(path, config.model_type, split_max_tensors=per_shard)
    _write_settings(writer, config, metadata or {})
    _write_vocabulary(writer, folder, gguf)
    for name, values in tensors.items():
        _add(writer, gguf, name, values, type_name)
    finish(writer)
    return path if num_shards == 1 else path.with_name(f"{path.stem}-00001-of-{num_shards:05d}.gguf")


def finish(writer: Any) -> None:
    """Write what a `gguf.GGUFWriter` was given to its file, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type == "mistral":
        config.model_type = "llama"
    if config.model_type not in FAMILIES:
        raise HarnessError(
            Code.UNSUPPORTED_ARCHITECTURE,
            "models of this family are not written as GGUF",
            where=folder,
            expected=", ".join(FAMILIES),
            actual=config.model_type,
            hint="convert it with llama.cpp's convert_hf_to_gguf.py, and name the file: --engine-option gguf=FILE",
        )
    return config


def _tensors(folder: Path, config: Any, change: Change | None) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors under their GGUF names, in the order of GGUF's rows."""
    import torch

    permutes = FAMILIES[config.model_type].permutes_heads
    for name, (_, shard) in Checkpoint(folder).tensors.items():
        values = read_shard(shard, name)
        if change is not None:
            values = change(name, values)
        if permutes and is_query_or_key(name):
            is_key = ".k_proj." in name
            values = rows_of_gguf(values, config.num_key_value_heads if is_key else config.num_attention_heads)
        target = gguf_name(name)
        if target is None:
            raise HarnessError(Code.UNSUPPORTED_GGUF, "a tensor has no name in GGUF", where=f"{shard}: tensor {name!r}")
        yield target, values.contiguous()
    rope = config.rope_parameters or {}
    if rope.get("rope_type") == "llama3":
        yield ROPE_FACTORS, torch.tensor(llama3_factors(rope, _head_dim(config)), dtype=torch.float32)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add(writer: Any, gguf: Any, name: str, values: "torch.Tensor", type_name: str) -> None:
    import torch

    if values.ndim == 1:
        writer.add_tensor(name, values.float().numpy())
        return
    kind = gguf.GGMLQuantizationType(BY_NAME[type_name][0])
    if type_name in PLAIN:
        plain = values.to(getattr(torch, PLAIN[type_name]))
        writer.add_tensor(name, plain.view(torch.uint8).numpy(), raw_dtype=kind)  # numpy has no bfloat16
        return
    try:
        data = gguf.quants.quantize(values.float().numpy(), kind)
    except (NotImplementedError, gguf.quants.QuantError) as error:
        raise HarnessError(
            Code.UNSUPPORTED_GGUF,
            f"tensors cannot be quantised to {type_name} here",
            where=f"tensor {name!r}, {list(values.shape)}",
            actual=str(error) or type(error).__name__,
            hint="use llama.cpp's quantiser: harness quant",
        ) from error
    writer.add_tensor(name, data, raw_dtype=kind)


def _write_settings(writer: Any, config: Any, changed: Mapping[str, Any]) -> None:
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": _head_dim(config),
        "attention.value_length": _head_dim(config),
        "rope.dimension_count": _head_dim(config),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "vocab_size": config.vocab_size,
        **_scaling(config.rope_parameters),
    }
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (settings | dict(changed)).items():
        if value is not None:
            adders[type(value)](f"{config.model_type}.{key}", value)


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a rotary scaling, other than Llama 3's, which is a tensor."""
    kind = rope.get("rope_type", "default")
    if kind in ("default", "llama3"):
        return {}
    if kind not in ("linear", "yarn"):
        raise HarnessError(Code.UNSUPPORTED_GGUF, "the rotary scaling has no name in GGUF", where=kind)
    settings = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        settings["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return settings


def _write_vocabulary(writer: Any, folder: Path, gguf: Any) -> None:
    """Write a BPE vocabulary, byte-level or with byte fallback; of any other kind llama.cpp has none."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_bytes()) if path.is_file() else {}
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE":
        writer.add_tokenizer_model("none")
        return
    added = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", [])}
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda entry: int(entry[1]))]
    tokens += [content for index, content in sorted(added.items()) if index >= len(tokens)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    is_sentencepiece = bool(model.get("byte_fallback"))
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentencepiece else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([_token_type(gguf, index, token, added) for index, token in enumerate(tokens)])
    if is_sentencepiece:  # SentencePiece merges by score: the earlier a merge, the higher
        ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}
        writer.add_token_scores([-float(ranks.get(token, len(merges))) for token in tokens])
    else:
        writer.add_token_merges(merges)
    ids = {token: index for index, token in enumerate(tokens)}
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id),
                      ("unk_token", writer.add_unk_token_id)):  # fmt: skip
        if settings.get(name) in ids:
            add(ids[settings[name]])
    template = (tokenizer.get("post_processor") or {}).get("single") or [{}]
    writer.add_add_bos_token(template[0].get("SpecialToken", {}).get("id") == settings.get("bos_token", ""))


def _token_type(gguf: Any, index: int, token: str, added: Mapping[int, str]) -> int:
    kinds = gguf.TokenType
    if index in added:
        return int(kinds.UNKNOWN if token == "<unk>" else kinds.CONTROL)
    return int(kinds.BYTE if token.startswith("<0x") and len(token) == 6 else kinds.NORMAL)


def write_adapter_file(lora: Path, metadata: Metadata, path: Path) -> Path:
    """Write an adapter in PEFT's format as a GGUF file in float32, as llama.cpp's convert_lora_to_gguf.py does.

    Raises:
        HarnessError: PACKAGE_MISSING, BAD_LORA, or ENGINE_CANNOT_SERVE: it changes a module that GGUF has no name for.
    """
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, metadata.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp scales by alpha over the rank of each tensor: all scales are in B, and alpha is left out.
    for module, update in read_adapter(lora).items():
        name = gguf_name(f"{module}.weight")
        if name is None:
            what = "the adapter changes a module that llama.cpp has no name for"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=lora, actual=module)
        b = update.b.float() * update.scaling
        if metadata.family.permutes_heads and is_query_or_key(f"{module}.weight"):
            is_key = module.endswith("k_proj")
            b = rows_of_gguf(b, metadata.count("attention.head_count_kv" if is_key else "attention.head_count"))
        writer.add_tensor(f"{name}.lora_a", update.a.float().contiguous().numpy())
        writer.add_tensor(f"{name}.lora_b", torch.as_tensor(b).contiguous().numpy())
    finish(writer)
    return path


def write_plain_file(model: GGUFModel, path: Path) -> Path:
    """Write a GGUF file once more with all of its tensors in float32: its graph is the same, and its numbers are HF's.

    Raises:
        HarnessError: PACKAGE_MISSING, or UNSUPPORTED_GGUF for a type that cannot be dequantised.
    """
    gguf = gguf_package()
    writer: Any = gguf.GGUFWriter(path, model.metadata.architecture)
    for field in gguf.GGUFReader(model.path).fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            element_type = field.types[-1] if is_array else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element_type)
    for name, (tensor, file) in model.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(read_tensor(tensor, file).float().numpy()))
    finish(writer)
    return path
