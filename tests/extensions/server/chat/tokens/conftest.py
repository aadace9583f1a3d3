"""A tokenizer of bytes with a template of tools and reasoning, a tiny model beside it, and a server of both."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.extensions.server.address import Address

from ...served import serve

SPECIAL = ["<|begin|>", "<|start|>", "<|end|>", "<|stop|>"]
TEMPLATE = """\
{{- bos_token -}}
{%- if tools %}<|start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for message in messages -%}
<|start|>{{ message.role }}{{ '\\n' }}
{%- set reasoning = message.reasoning_content if message.reasoning_content is defined else '' %}
{%- if reasoning %}<think>{{ reasoning }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[call ' }}{{ call.function.name }}({{ call.function.arguments.city }})]
{%- endfor -%}
<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{{ '\\n' }}{% endif %}"""


def write_tokenizer(folder: Path, template: str | None = TEMPLATE, special: Sequence[str] = SPECIAL) -> Path:
    """Write a tokenizer of single bytes and special tokens: the first begins a text, the third ends it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[2], clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = write_tokenizer(tmp_path_factory.mktemp("chat"))
    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=256, eos_token_id=[258, 259],
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": [258, 259]}))
    return folder


@pytest.fixture(scope="session")
def chat_server(chat_folder: Path) -> Iterator[tuple[Any, Address]]:
    """The text part of the server, which tests break, and its address."""
    pytest.importorskip("httpx", reason="the extra `serve` is not installed")
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    with serve(chat_folder, model="chat", num_blocks=600) as server:
        yield server.text, server.address()
