"""mlx-lm 0.32.2 lets padding into Mamba's and Jamba's states in a batch of unequal prompts: shown without the harness.

    pip install 'mlx[cpu]' mlx-lm transformers torch && python mlx_ragged_states.py

A random model, and mlx-lm's own BatchGenerator, greedy: each prompt alone, then all in one batch.
"""

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import torch
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

PROMPTS = [[3, 9, 14, 27, 33], [*range(5, 25)], [7, 8, 9]]
SAME_LENGTH = [[3, 9, 14, 27, 33], [*range(5, 10)], [7, 8, 9, 1, 2]]
FAMILIES = {
    "mamba": {"state_size": 8},
    "jamba": {"num_experts": 1, "intermediate_size": 48, "attn_layer_period": 2, "attn_layer_offset": 1,
              "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_state": 8},
    "llama": {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


def generated(model, prompts):
    """Return twelve greedy tokens after each prompt, of one batch."""
    batch = BatchGenerator(model, max_tokens=12)
    tokens = {uid: [] for uid in batch.insert(prompts)}
    while responses := batch.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
    batch.close()
    return list(tokens.values())


mx.set_default_device(mx.cpu)
for family, sizes in FAMILIES.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, num_hidden_layers=2, tie_word_embeddings=False, **sizes
    )
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in hf.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        path = Path(folder) / "config.json"  # mlx-lm asks for a key that transformers does not write
        path.write_text(json.dumps({"rope_theta": 1e4, **json.loads(path.read_text())}))
        model, _ = load_model(Path(folder))
    for what, prompts in (("unequal", PROMPTS), ("equal", SAME_LENGTH)):
        alone = [generated(model, [prompt])[0] for prompt in prompts]
        together = generated(model, prompts)
        same = [a == b for a, b in zip(alone, together, strict=True)]
        print(f"{family}, prompts of {what} length: the same tokens alone and in a batch: {same}")
