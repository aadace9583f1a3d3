"""Three mistakes of torchtune 0.6.1's Gemma 2 against HF: `pip install torchtune==0.6.1 torchao==0.10.0`, then run it.

A random model of four layers in float32, a window of 8, a prompt of 20 tokens and one decode step, the largest
difference of logits relative to HF's largest logit: as it is, and with each mistake mended in turn.

1. `gemma2/_convert_weights.py` exchanges the norms before and after the feed-forward network.
2. `Gemma2FinalNorm` caps the normed hidden states; Gemma 2 caps the logits.
3. `Gemma2Attention` counts the window from the mask's first row, which in decode is not the query's position: with a
   cache a new token sees the first 8 keys, not the last 8.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.models.gemma2._component_builders import gemma2
from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune
from torchtune.modules import KVCache
from transformers import Gemma2Config, Gemma2ForCausalLM

HEADS, HEAD_DIM, WINDOW, ROOM = 4, 16, 8, 96


def hf_model(folder):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=HEAD_DIM, sliding_window=WINDOW, query_pre_attn_scalar=24,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.5 if "norm" in name else 0.2)
    model.save_pretrained(folder)
    return model


def torchtune_model(folder):
    model = gemma2(
        vocab_size=256, num_layers=4, num_heads=HEADS, head_dim=HEAD_DIM, num_kv_heads=2, embed_dim=64,
        intermediate_dim=176, max_seq_len=ROOM, sliding_window_size=WINDOW, query_pre_attn_scalar=24,
    )  # fmt: skip
    model.load_state_dict(gemma2_hf_to_tune(load_file(folder / "model.safetensors"), HEADS, 2, 64, HEAD_DIM))
    return model.eval()


def exchange_norms(model):
    for layer in model.layers:
        layer.mlp_norm, layer.mlp_scale = layer.mlp_scale, layer.mlp_norm


def cap_logits(model):
    cap, linear = model.norm.logit_capping, model.output
    model.norm.logit_capping = torch.nn.Identity()
    model.output = lambda hidden: cap(linear(hidden))


def count_window_from_query(model):
    """Give the mask of the window with the positions of the queries, and switch off the module's own."""
    for layer in model.layers:
        if layer.attn.sliding_window_size is not None:
            layer.attn.sliding_window_size, sound = None, layer.attn.forward

            def forward(x, y=None, *, mask=None, input_pos=None, sound=sound):
                near = torch.arange(ROOM) > input_pos[0][:, None] - WINDOW
                return sound(x, y, mask=mask & near, input_pos=input_pos)

            layer.attn.forward = forward


def logits_of(model, ids):
    """Compute the prompt with a cache, and then the last token alone."""
    for layer in model.layers:
        layer.attn.kv_cache, layer.attn.cache_enabled = KVCache(1, ROOM, HEADS, HEAD_DIM, torch.float32), True
    causal = torch.ones(ROOM, ROOM, dtype=torch.bool).tril()
    parts = [torch.arange(len(ids) - 1), torch.arange(len(ids) - 1, len(ids))]
    return [model(ids[at][None], mask=causal[None, at], input_pos=at[None])[0] for at in parts]


@torch.no_grad()
def main():
    with tempfile.TemporaryDirectory() as folder:
        hf, ids = hf_model(folder), torch.randint(3, 256, (21,), generator=torch.Generator().manual_seed(1))
        right = hf(ids[None]).logits[0]
        model = torchtune_model(Path(folder))
        for mend in (None, exchange_norms, cap_logits, count_window_from_query):
            if mend is not None:
                mend(model)
            prompt, last = logits_of(model, ids)
            errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in ((prompt, right[:-1]), (last, right[-1:]))]
            print(f"{mend.__name__ if mend else 'as it is':24} prompt {errors[0]:.1e}  decode {errors[1]:.1e}")


if __name__ == "__main__":
    main()
