"""mlx-lm 0.32.2 normalises Mamba-2's gated output as one group, whatever n_groups says: shown without the harness.

    pip install 'mlx[cpu]' mlx-lm transformers torch && python mlx_mamba2_groups.py

The same random weights by transformers and by mlx-lm, in float32. With one group the logits agree, with two not.
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
for n_groups in (1, 2):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mamba2", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=4, head_dim=16,
        n_groups=n_groups, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = Path(folder) / "config.json"  # mlx-lm asks for a key that transformers does not write
        path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 64}))
        ours, _ = load_model(Path(folder))
        with torch.no_grad():
            expected = model(torch.tensor([IDS])).logits.numpy()
        error = np.abs(np.array(ours(mx.array([IDS]))) - expected).max() / np.abs(expected).max()
    print(f"n_groups {n_groups}: logits differ by {error:.2g} of the largest")
