"""Google DeepMind's RecurrentGemma in torch: `pip install recurrentgemma einops jaxtyping jax flax`."""

import json, sys
from types import ModuleType

_p = next(p + "/recurrentgemma" for p in sys.path if __import__("os").path.isdir(p + "/recurrentgemma"))
_m = ModuleType("recurrentgemma")
_m.__path__ = [_p]
sys.modules["recurrentgemma"] = _m  # without its JAX half
import torch
from safetensors.torch import load_file
from recurrentgemma.torch.griffin import Griffin
from recurrentgemma.common import GriffinConfig, TemporalBlockType as T


def load(folder, dtype, **ch):
    c = json.loads((folder / "config.json").read_text())
    types = [
        {"recurrent": T.RECURRENT, "attention": T.ATTENTION}[(c["block_types"] * 9)[i]]
        for i in range(c["num_hidden_layers"])
    ]
    model = Griffin(
        GriffinConfig(
            **{
                **dict(
                    vocab_size=c["vocab_size"],
                    width=c["hidden_size"],
                    mlp_expanded_width=c["intermediate_size"] // 2,
                    num_heads=c["num_attention_heads"],
                    block_types=tuple(types),
                    embeddings_scale_by_sqrt_dim=True,
                    attention_window_size=c["attention_window_size"],
                    logits_soft_cap=c["logits_soft_cap"],
                    lru_width=c["lru_width"],
                ),
                **ch,
            }
        ),
        gradient_checkpointing=False,
    )
    w = load_file(folder / "model.safetensors")
    s = {"embedder.input_embedding": w["model.embed_tokens.weight"], "final_norm.scale": w["model.final_norm.weight"]}
    for i, kind in enumerate(types):
        h, p = f"model.layers.{i}.", f"blocks.{i}."
        for n in ("temporal", "channel"):
            s[f"{p}{n}_pre_norm.scale"] = w[f"{h}{n}_pre_norm.weight"]
        m = h + "mlp_block."
        s[p + "mlp_block.ffw_up.w"] = torch.stack([w[f"{m}{n}_proj.weight"].T for n in ("gate", "up")])
        s[p + "mlp_block.ffw_up.b"] = torch.stack([w[f"{m}{n}_proj.bias"] for n in ("gate", "up")])[:, None, None]
        for n in ("weight", "bias"):
            s[f"{p}mlp_block.ffw_down.{n}"] = w[f"{m}down_proj.{n}"]
        t = h + "temporal_block."
        if kind is T.ATTENTION:
            for n in "qkv":
                s[f"{p}attention_block.proj_{n}.weight"] = w[f"{t}{n}_proj.weight"]
            for n in ("weight", "bias"):
                s[f"{p}attention_block.proj_final.{n}"] = w[f"{t}o_proj.{n}"]
        else:
            r = p + "recurrent_block."
            for name in ("linear_x", "linear_y", "linear_out"):
                for n in ("weight", "bias"):
                    s[f"{r}{name}.{n}"] = w[f"{t}{name}.{n}"]
            s[r + "conv_1d.w"], s[r + "conv_1d.b"] = w[t + "conv_1d.weight"][:, 0].T, w[t + "conv_1d.bias"]
            s[r + "rg_lru.a_param"] = w[t + "rg_lru.recurrent_param"]
            for a, b in (("input_gate", "input_gate"), ("a_gate", "recurrent_gate")):
                s[f"{r}rg_lru.{a}.w"], s[f"{r}rg_lru.{a}.b"] = w[f"{t}rg_lru.{b}_weight"], w[f"{t}rg_lru.{b}_bias"]
    model.load_state_dict(s)
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            if first == 0:
                logits, cache = self.model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
            for i, token in enumerate(ids if first else ()):
                logits, cache = self.model(torch.tensor([[token]]), torch.tensor([[first + i]]), self.caches[request])
                self.caches[request] = cache
            self.caches[request] = cache
            rows.append(logits[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]

    def states(self, request):
        return {
            i: [c.conv1d_state, c.rg_lru_state]
            for i, c in enumerate(self.caches[request].values())
            if hasattr(c, "rg_lru_state")
        }


def open_engine(folder, dtype):
    return Engine(load(folder, dtype))
