"""Check engines of other families than Llama, sound: `python reports/cpu/foreign_engines/families.py ENGINE [DTYPE]`.

ENGINE is `mamba_py`, `ai2_olmo`, `recurrentgemma_torch` or `gemma4_pt`; its file says how to get it.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from transformers import AutoConfig, AutoModelForCausalLM

import harness
from harness.extensions.faults.zoo.lively import make_lively

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {**SIZES, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "mamba_py": {**SIZES, "model_type": "mamba", "state_size": 8, "time_step_rank": 6, "tie_word_embeddings": False},
    "ai2_olmo": {**HEADS, "model_type": "olmo", "clip_qkv": 1.0, "tie_word_embeddings": False},
    "recurrentgemma_torch": {
        **HEADS, "model_type": "recurrent_gemma", "intermediate_size": 352, "num_key_value_heads": 1,
        "attention_window_size": 64,
    },
    "gemma4_pt": {
        **HEADS, "model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32,
        "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "sliding_window": 8,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40, 77, 101, 130, 2, 60], [7, 3, 99, 4]]

name, dtype = (*sys.argv[1:], "float32")[:2]
torch.set_num_threads(1)
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as made:
    folder, settings = Path(made), dict(MODELS[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    make_lively(model, settings["num_hidden_layers"])
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    engine = importlib.import_module(name).open_engine(folder, dtype)
    print(harness.check(engine, model=folder, prompts=PROMPTS, max_new_tokens=5, dtype=dtype).text())
