"""Tokenizers of bytes with the chat templates of four families."""

import json
from pathlib import Path

import pytest

from ..tokens.conftest import write_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
MARKS = {
    "hermes": ["<|im_start|>", "<tool_call>", "<|im_end|>", "</tool_call>"],
    "qwen3_coder": ["<|im_start|>", "<tool_call>", "<|im_end|>", "</tool_call>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>", "<|end_header_id|>", "<|python_tag|>"],
    "mistral": ["<s>", "[INST]", "</s>", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"],
}
"""Tokens of their own: the first begins a text, the third ends it."""


def write_family(folder: Path, family: str, template: str | None = None) -> Path:
    """Write the tokenizer of a family, with its template or another one."""
    folder.mkdir(exist_ok=True)
    text = (TEMPLATES / f"{family}.jinja").read_text()
    write_tokenizer(folder, text if template is None else template, MARKS[family])
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="session")
def families(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    return {family: write_family(folder / family, family) for family in MARKS}
