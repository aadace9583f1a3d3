"""Write the model that servers.md asks servers for: a random Qwen3 of two layers, a tokenizer of bytes, Hermes's tools.

    python reports/cpu/server_model.py FOLDER [ascii]

With `ascii` the tokens are printable characters, so that a server of text alone shows them all. Special tokens are never
likely, for the same reason. Heads are 32 wide: vLLM's attention for CPUs takes none of 16.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FOLDER = Path(sys.argv[1])
TEMPLATE = Path(__file__).parents[2] / "tests" / "extensions" / "server" / "chat" / "tool_calls" / "templates" / "hermes.jinja"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

MERGES = [("t", "h"), ("i", "n"), ("e", "r")]  # llama.cpp takes no file without one
BOS = SPECIAL[0] if sys.argv[2:] == ["ascii"] else None  # llama.cpp takes token 11 for it where a file names none

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
if sys.argv[2:] == ["ascii"]:
    letters = [letter for letter in letters if "!" <= letter <= "~" or letter in "ĠĊ"]
tokens = [*letters, *map("".join, MERGES)]
tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=MERGES))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")])
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0], bos_token=BOS)
fast.chat_template = TEMPLATE.read_text()
fast.save_pretrained(FOLDER)
first, _, last = fast.convert_tokens_to_ids(SPECIAL)
config = Qwen3Config(
    vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.15, bos_token_id=None,
    eos_token_id=last, pad_token_id=first, tie_word_embeddings=False,
)  # fmt: skip
torch.manual_seed(0)
model = Qwen3ForCausalLM(config)
with torch.no_grad():  # one number of the residual stream is the same everywhere: special tokens are held down by it
    model.model.embed_tokens.weight[:, 0] = 2.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            layer.get_submodule(name).weight[:, 0] = 0.0
    model.lm_head.weight *= 2.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[first:] = -40.0 * torch.eye(config.hidden_size)[0]
model.generation_config.do_sample = False
model.generation_config.eos_token_id = [last, first]
model.save_pretrained(FOLDER)
path = FOLDER / "config.json"  # older releases read the base of the rotary embedding at the top
config = json.loads(path.read_text())
path.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}, indent=1))
