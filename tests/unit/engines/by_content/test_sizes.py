"""Engines whose layers have heads of other sizes."""

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import harness

PROMPT = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33]


class Recomputing:
    """HF's Gemma 4 as an engine that computes all tokens of a request in each step."""

    recomputes = True

    def __init__(self, model):
        self.model, self.tokens = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            self.tokens[request] = [*self.tokens.get(request, [])[:first], *ids]
            tokens = torch.tensor([self.tokens[request]])
            rows.append(self.model(tokens, use_cache=False).logits[0, -1])
        return torch.stack(rows)


def test_another_rotation_of_the_larger_heads_stands_at_its_tap(tmp_path):
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, global_head_dim=16, sliding_window=8,
        hidden_size_per_layer_input=8, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = Gemma4ForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    rotary = model.model.rotary_emb
    rotary.full_attention_inv_freq = rotary.full_attention_inv_freq * 0.5
    report = harness.check(Recomputing(model), model=tmp_path, prompts=[PROMPT], max_new_tokens=2, schedules=["plain"])
    assert report.first_divergence.tap == "model.layers.1.q_rope"
