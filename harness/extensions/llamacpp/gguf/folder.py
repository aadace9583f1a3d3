"""A GGUF model as a checkpoint folder of HuggingFace's, with the weights dequantised.

Everything else in the harness reads such folders, so that a GGUF file is a model like any other: it is inspected,
streamed, hashed and run by HF's own code. The folder lies in the cache and is made once. `gguf.json` in it says where
the weights come from and in which type each was.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.against import check_against, read_original
from harness.extensions.llamacpp.gguf.architecture import FAMILIES, hf_config
from harness.extensions.llamacpp.gguf.by_transformers import write_by_transformers
from harness.extensions.llamacpp.gguf.model import GGUFModel, open_gguf
from harness.extensions.llamacpp.gguf.names import ROPE_FACTORS, hf_name, is_query_or_key
from harness.extensions.llamacpp.gguf.tokenizer import write_tokenizer
from harness.extensions.llamacpp.gguf.weights import read_tensor, rows_of_hf
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.converted import (
    GGUF_INFO,
    folder_name,
    made_once,
    read_info,
    write_settings,
    write_shards,
)

if TYPE_CHECKING:
    import torch

VERSION = 3
"""Part of a folder's name: raise it with every change of what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFSource:
    """The source of a checkpoint folder's weights."""

    path: Path
    """The GGUF file, or its first shard."""
    types: Mapping[str, str]
    """Type of each tensor by HF's name: `Q4_K`."""


def read_source(folder: Path) -> GGUFSource | None:
    """Return where a folder's weights come from; None for a folder that was not made of a GGUF file."""
    info = read_info(folder, GGUF_INFO)
    try:
        return GGUFSource(path=Path(info["source"]), types=dict(info["types"]))
    except (ValueError, KeyError, TypeError):
        return None


def checkpoint_of_gguf(path: Path, cache: Path, *, hf: Checkpoint | None = None) -> Path:
    """Return the folder of a GGUF model's checkpoint, made first where the cache does not have it.

    The path is the file's, or of one of its shards; `cache` keeps such folders. Of the HF checkpoint `hf` that the file
    was made from, configuration and tokenizer are taken, and each of its tensors is held against the file's. An
    architecture that is not read here is read by transformers, and needs `hf`.

    Raises:
        HarnessError: DAMAGED_GGUF, UNSUPPORTED_GGUF, UNSUPPORTED_ARCHITECTURE, MISSING_SHARD, PACKAGE_MISSING,
            GGUF_DIFFERS, or CANNOT_WRITE.
    """
    model = open_gguf(path)
    originals = () if hf is None else hf.folder.iterdir()
    folder = cache / folder_name(VERSION, [*(header.path for header in model.headers), *originals], hf is None)
    return made_once(folder, GGUF_INFO, lambda made: _write(model, made, hf))


def _write(model: GGUFModel, folder: Path, hf: Checkpoint | None) -> dict[str, Any]:
    """Fill the folder; return what it is made of."""
    types = {}
    if hf is not None and model.metadata.architecture not in FAMILIES:
        write_by_transformers(model, folder, hf)
    else:
        _write_family(model, folder, hf)
        types = {hf_name(name): tensor.type.name for name, (tensor, _) in model.tensors.items() if hf_name(name)}
    return {"source": str(model.path.resolve()), "types": types}


def _write_family(model: GGUFModel, folder: Path, hf: Checkpoint | None) -> None:
    """Write a model of one of the families that are read here."""
    _ = model.metadata.family
    if hf is None:
        own = gguf_config(model)
        write_tokenizer(model, folder)
        write_settings(folder, own)
    else:
        original = read_original(model, hf)
        own = gguf_config(model, original)
        check_against(model, own, original, hf, tensors(model, own))
        config = {**hf.config, "tie_word_embeddings": own["tie_word_embeddings"]}  # a head's own type is kept
        write_settings(folder, config, hf.folder)
    write_shards(folder, tensors(model, own))


def gguf_config(model: GGUFModel, original: Any = None) -> dict[str, Any]:
    """Return the HF configuration that the metadata and the tensors tell.

    `original` is HF's configuration of the checkpoint that it was made from, whose rotary factors it may have.

    Raises:
        HarnessError: as `hf_config`; DAMAGED_GGUF without an embedding.
    """
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise HarnessError(
            Code.DAMAGED_GGUF,
            "the file has no embedding",
            where=model.path,
            expected="a tensor token_embd.weight",
            hint="is it a vocabulary, an adapter or a projector? pass the model itself",
        )
    factors = model.tensors.get(ROPE_FACTORS)
    config = hf_config(
        model.metadata,
        vocab_size=embedding[0].shape[0],
        is_tied="output.weight" not in model.tensors,
        rope_factors=None if factors is None else read_tensor(*factors).flatten().tolist(),
        original_rope=None if original is None else original.rope_parameters,
    )
    if config["model_type"] == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in model.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in model.tensors
    return config


def tensors(model: GGUFModel, config: Mapping[str, Any]) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield every tensor by HF's name, dequantised and with its rows in HF's order.

    Raises:
        HarnessError: UNSUPPORTED_GGUF: a tensor has no place in HF's model, or cannot be dequantised.
    """
    heads = {
        "q": config["num_attention_heads"],
        "k": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    permutes = FAMILIES[model.metadata.architecture].permutes_heads
    for name, (tensor, path) in model.tensors.items():
        if name == ROPE_FACTORS:
            continue
        target = hf_name(name)
        if target is None:
            raise HarnessError(
                Code.UNSUPPORTED_GGUF,
                "a tensor has no place in HuggingFace's model",
                where=f"{path}: tensor {name!r}",
                hint=f"harness inspect {path}",
            )
        values = read_tensor(tensor, path)
        if permutes and is_query_or_key(target):
            count = heads[target.rpartition("_proj")[0][-1]]
            if values.shape[0] % (2 * count) == 0:  # otherwise the shape is refused when the folder is loaded
                values = rows_of_hf(values, count)
        yield target, values
