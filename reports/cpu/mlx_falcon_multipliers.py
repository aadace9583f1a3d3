"""mlx-lm 0.32.2 leaves two of Falcon-H1's multipliers out: shown without the harness.

    pip install 'mlx[cpu]' mlx-lm transformers torch && python mlx_falcon_multipliers.py

It multiplies them into the weights. `attention_in_multiplier` goes into q and k and not into v; `key_multiplier` goes
into weights called `key_proj`, which do not exist. The same random weights by transformers and by mlx-lm, in float32.
"""

import json
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

IDS = [3, 9, 14, 27, 33, 5, 6, 41]
mx.set_default_device(mx.cpu)
for multipliers in ({}, {"attention_in_multiplier": 1.2}, {"key_multiplier": 0.390625}):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "falcon_h1", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=8, tie_word_embeddings=False, initializer_range=0.2,
        **{"attention_in_multiplier": 1.0, "key_multiplier": 1.0, **multipliers},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder) / "config.json"  # mlx-lm asks for keys that transformers does not write
        keys = {"rope_theta": config.rope_parameters["rope_theta"], "head_dim": 8}
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        ours, _ = load_model(Path(folder))
        with torch.no_grad():
            expected = model(torch.tensor([IDS])).logits.numpy()
        error = np.abs(np.array(ours(mx.array([IDS]))) - expected).max() / np.abs(expected).max()
    print(f"{multipliers or 'both are 1'}: logits differ by {error:.2g} of the largest")
