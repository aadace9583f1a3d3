"""mlx-lm 0.32.2 makes the weights of Jamba's chosen experts a sum of one, transformers does not: without the harness.

    pip install 'mlx[cpu]' mlx-lm transformers torch && python mlx_jamba_router.py

The same random weights by transformers and by mlx-lm, in float32. With all of the experts chosen the logits agree.
"""

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

IDS = [3, 9, 14, 27, 33, 5, 6, 41]
mx.set_default_device(mx.cpu)
for num_chosen in (4, 2):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "jamba", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=num_chosen, expert_layer_period=1,
        expert_layer_offset=0, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours, _ = load_model(Path(folder))
        with torch.no_grad():
            expected = model(torch.tensor([IDS])).logits.numpy()
        error = np.abs(np.array(ours(mx.array([IDS]))) - expected).max() / np.abs(expected).max()
    print(f"{num_chosen} of 4 experts: logits differ by {error:.2g} of the largest")
