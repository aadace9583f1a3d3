"""The vocabulary of a GGUF file as HuggingFace's tokenizer, as far as transformers can make one of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.model import GGUFModel

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
