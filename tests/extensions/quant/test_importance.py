"""The importance matrix of llama.cpp's quantiser, from the harness's own run."""

import torch

from harness.extensions.quant.files import importance_of
from harness.oracle.model import load_model


def test_it_is_the_mean_square_of_each_input(checkpoints):
    hf = load_model(checkpoints / "qwen3-tiny", dtype=torch.float32, stays=True)
    sequences = [(3, 14, 15, 9, 2), (6, 5, 3)]
    importance = importance_of(hf, sequences)
    states = [hf.run(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in sequences]
    normed = torch.cat([hf.model.model.layers[1].input_layernorm(state[1])[0] for state in states])
    assert torch.equal(importance["blk.1.attn_q.weight"], importance["blk.1.attn_v.weight"])
    torch.testing.assert_close(importance["blk.1.attn_k.weight"], normed.square().mean(dim=0))
    assert set(importance) == {"output.weight", *(f"blk.{layer}.{part}.weight" for layer in range(3) for part in PARTS)}


PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
