"""The vocabulary of a GGUF file as HuggingFace's tokenizer, as far as transformers can make one of it."""

from pathlib import Path

from harness.checkpoint.gguf.model import GGUFModel

NO_VOCABULARY = (None, "none", "no_vocab")
"""Values of `tokenizer.ggml.model` in files without a vocabulary."""


def write_tokenizer(model: GGUFModel, folder: Path) -> None:
    """Write tokenizer.json; nothing where the file has no vocabulary, or one that transformers does not read.

    Without a tokenizer, a prompt given as text is refused (NO_TOKENIZER), and token ids are taken as they are.
    """
    if model.headers[0].metadata.get("tokenizer.ggml.model") in NO_VOCABULARY:
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name, local_files_only=True)
        tokenizer.save_pretrained(folder)
    except Exception:  # whatever transformers raises for a vocabulary that it does not read
        for file in folder.glob("tokenizer*"):
            file.unlink()
