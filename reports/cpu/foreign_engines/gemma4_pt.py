"""Gemma 4 of gemma4-pt-claude with its own cache and its own converter: `pip install gemma4-pt-claude`."""

import json
import torch
from gemma4_pt_claude.config import AttentionType as A, Gemma4Config, KVCacheSharingConfig, TextConfig
from gemma4_pt_claude.generate import init_cache
from gemma4_pt_claude.load import load_weights
from gemma4_pt_claude.model import Gemma4Model


def load(folder, dtype, **ch):
    c = json.loads((folder / "config.json").read_text())
    n = c["num_hidden_layers"]
    kinds = {"sliding_attention": A.LOCAL_SLIDING, "full_attention": A.GLOBAL}
    r = c["rope_parameters"]
    text = TextConfig(
        **{
            **dict(
                vocab_size=c["vocab_size"],
                embed_dim=c["hidden_size"],
                hidden_dim=c["intermediate_size"],
                num_heads=c["num_attention_heads"],
                head_dim=c["head_dim"],
                num_kv_heads=c["num_key_value_heads"],
                num_layers=n,
                sliding_window_size=c["sliding_window"],
                final_logit_softcap=c["final_logit_softcapping"],
                attention_pattern=tuple(kinds[k] for k in c["layer_types"]),
                per_layer_input_dim=c["hidden_size_per_layer_input"],
                local_rope_base=r["sliding_attention"]["rope_theta"],
                global_rope_base=r["full_attention"]["rope_theta"],
                global_rope_proportion=r["full_attention"].get("partial_rotary_factor", 1.0),
                global_head_dim=next(iter(c["per_layer_config"].values()))["head_dim"],
                num_global_kv_heads=c.get("num_global_key_value_heads"),
                kv_sharing=KVCacheSharingConfig(c["num_kv_shared_layers"] / n, True, True)
                if c["num_kv_shared_layers"]
                else None,
            ),
            **ch,
        }
    )
    model = Gemma4Model(Gemma4Config(text=text, vision=None, audio=None))
    load_weights(model, str(folder), format="hf")
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model, dtype):
        self.model, self.dtype, self.caches = model, dtype, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            cache = self.caches.get(request) or init_cache(self.model.cfg, 1, 128, self.dtype)
            logits, self.caches[request] = self.model(
                torch.tensor([ids]), torch.arange(first, first + len(ids))[None], cache=cache
            )
            rows.append(logits[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


def open_engine(folder, dtype):
    return Engine(load(folder, dtype), getattr(torch, dtype))
