"""A GGUF model as a checkpoint folder of HuggingFace's, with the weights dequantised.

Everything else in the harness reads such folders, so that a GGUF file is a model like any other: it is inspected,
streamed, hashed and run by HF's own code. The folder lies in the cache and is made once. `made_from.json` in it says
where the weights come from and in which type each was.

Architectures that are not read here are dequantised by transformers, for its own configuration. The checkpoint that a
file was made from then gives configuration and tokenizer, and each tensor that transformers reads is held against the
checkpoint's, so that one which is read in another order, or left out, is no truth.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.against import check_against, read_original
from harness.extensions.llamacpp.gguf.architecture import FAMILIES, ROPE_FACTORS, hf_config, hf_name, is_query_or_key
from harness.extensions.llamacpp.gguf.model import GGUFModel, open_gguf, read_tensor, rows_of_hf
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.converted import folder_name, made_once, read_info, write_settings, write_shards

if TYPE_CHECKING:
    import torch

from typing import TYPE_CHECKING

from harness.base.progress import quiet_transformers
from harness.extensions.llamacpp.gguf.model import gguf_package
from harness.formats.checkpoint.converted import copy_tokenizer

if TYPE_CHECKING:
    import torch


NAME = "gguf"
"""The reader's name among the entry points."""
VERSION = 4
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
    info = read_info(folder)
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
    return made_once(folder, NAME, lambda made: _write(model, made, hf))


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
        file_config = gguf_config(model)
        write_tokenizer(model, folder)
        write_settings(folder, file_config)
    else:
        original = read_original(model, hf)
        file_config = gguf_config(model, original)
        check_against(model, file_config, original, hf, tensors(model, file_config))
        config = {**hf.config, "tie_word_embeddings": file_config["tie_word_embeddings"]}  # a head's own type is kept
        write_settings(folder, config, hf.folder)
    write_shards(folder, tensors(model, file_config))


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


_FARTHEST = 0.5
"""Relative distance of a tensor from the checkpoint's, beyond which it is another one: types of two bits reach 0.4."""


def write_by_transformers(model: GGUFModel, folder: Path, hf: Checkpoint) -> None:
    """Write the weights of a GGUF file as a checkpoint of the model in `hf`, in float32.

    Raises:
        HarnessError: UNSUPPORTED_GGUF: transformers does not read it; GGUF_DIFFERS: a tensor is not the checkpoint's;
            PACKAGE_MISSING.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    gguf_package()
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True}
    with quiet_transformers():
        original = AutoModelForCausalLM.from_pretrained(hf.folder, **options)
        options["config"] = AutoConfig.from_pretrained(hf.folder, local_files_only=True)
        try:
            read = AutoModelForCausalLM.from_pretrained(model.path.parent, gguf_file=model.path.name, **options)
        except Exception as error:  # transformers raises ValueError, NotImplementedError, KeyError, RuntimeError, ...
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise HarnessError(
                Code.UNSUPPORTED_GGUF,
                f"transformers does not read the file: {reason[0]}",
                where=model.path,
                actual=model.metadata.architecture,
                hint="a file in float32 needs no reader: --model CHECKPOINT --engine-option gguf=FILE",
            ) from error
        _check_near(model, original.state_dict(), read.state_dict())
        original.load_state_dict(read.state_dict())
        original.save_pretrained(folder)
    copy_tokenizer(hf.folder, folder)


def _check_near(model: GGUFModel, original: "Mapping[str, torch.Tensor]", read: "Mapping[str, torch.Tensor]") -> None:
    for name, expected in original.items():
        difference = float((read[name] - expected).norm()) / max(float(expected.norm()), 1e-30)
        if not difference <= _FARTHEST:
            raise HarnessError(
                Code.GGUF_DIFFERS,
                f"{name} is not the checkpoint's, as transformers reads the file",
                where=model.path,
                expected=f"a relative distance of at most {_FARTHEST}",
                actual=f"{difference:.3g}",
                hint="is it made from this checkpoint? transformers may read this architecture otherwise",
            )


NO_VOCABULARY = (None, "none", "no_vocab")
"""Values of `tokenizer.ggml.model` in files without a vocabulary."""


def write_tokenizer(model: GGUFModel, folder: Path) -> None:
    """Write tokenizer.json; nothing where the file has no vocabulary, or one that transformers does not read.

    Without a tokenizer, a prompt given as text is refused (NO_TOKENIZER), and token ids are taken as they are.

    Raises:
        HarnessError: DAMAGED_GGUF: there are more tokens than the model has embeddings for.
    """
    metadata = model.headers[0].metadata
    if metadata.get("tokenizer.ggml.model") in NO_VOCABULARY:
        return
    _check_size(model)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.path.parent, gguf_file=model.path.name, local_files_only=True, trust_remote_code=False
        )
        begin_as_the_file_says(tokenizer, metadata)
        tokenizer.save_pretrained(folder)
    except Exception:  # whatever transformers raises for a vocabulary that it does not read
        for file in folder.glob("tokenizer*"):
            file.unlink()


def begin_as_the_file_says(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Put the token that begins a text before every text, where the file asks for it.

    transformers 5.17 leaves it out of byte-level vocabularies.
    """
    from tokenizers.processors import TemplateProcessing

    token_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is not True or token_id is None:
        return
    if tokenizer.encode("a")[:1] != [token_id]:
        token = metadata["tokenizer.ggml.tokens"][token_id]
        tokenizer.bos_token = token
        template = TemplateProcessing(single=[token, "$A"], special_tokens=[(token, token_id)])
        tokenizer.backend_tokenizer.post_processor = template


def _check_size(model: GGUFModel) -> None:
    tokens = model.headers[0].metadata.get("tokenizer.ggml.tokens")
    num_embeddings = model.tensors["token_embd.weight"][0].shape[0]
    if isinstance(tokens, list) and len(tokens) > num_embeddings:
        raise HarnessError(
            Code.DAMAGED_GGUF,
            "the vocabulary has more tokens than the model has embeddings",
            where=f"{model.path}: tokenizer.ggml.tokens",
            expected=f"at most {num_embeddings}",
            actual=len(tokens),
            hint="convert the model again, with the tokenizer that belongs to it",
        )
