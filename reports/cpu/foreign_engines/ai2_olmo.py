"""ai2-olmo: OLMo 1 (LayerNorm without weights, clip_qkv) and OLMo 2 (norms after, norms of q and k)."""

import json
import torch
from safetensors.torch import load_file
from olmo import OLMo, ModelConfig


def load(folder, dtype, **changes):
    c = json.loads((folder / "config.json").read_text())
    two = c["model_type"] == "olmo2"
    config = ModelConfig(
        **{
            **dict(
                d_model=c["hidden_size"],
                n_heads=c["num_attention_heads"],
                n_kv_heads=c["num_key_value_heads"],
                n_layers=c["num_hidden_layers"],
                mlp_hidden_size=2 * c["intermediate_size"],
                activation_type="swiglu",
                block_type="sequential",
                rope=True,
                rope_theta=c["rope_parameters"]["rope_theta"],
                clip_qkv=c.get("clip_qkv"),
                attention_layer_norm=two,
                norm_after=two,
                layer_norm_type="rms" if two else "default",
                layer_norm_with_affine=two,
                attention_layer_norm_with_affine=two,
                bias_for_layer_norm=False,
                layer_norm_eps=c.get("rms_norm_eps", 1e-5),
                include_bias=False,
                weight_tying=False,
                vocab_size=c["vocab_size"],
                embedding_size=c["vocab_size"],
                max_sequence_length=256,
                attention_dropout=0.0,
                residual_dropout=0.0,
                embedding_dropout=0.0,
                eos_token_id=2,
                pad_token_id=0,
                init_device="cpu",
            ),
            **changes,
        }
    )
    model = OLMo(config)
    w = load_file(folder / "model.safetensors")
    s = {"transformer.wte.weight": w["model.embed_tokens.weight"], "transformer.ff_out.weight": w["lm_head.weight"]}
    if two:
        s["transformer.ln_f.weight"] = w["model.norm.weight"]
    for i in range(config.n_layers):
        hf, p = f"model.layers.{i}.", f"transformer.blocks.{i}."
        s[p + "att_proj.weight"] = torch.cat([w[f"{hf}self_attn.{n}_proj.weight"] for n in "qkv"])
        s[p + "attn_out.weight"] = w[hf + "self_attn.o_proj.weight"]
        s[p + "ff_proj.weight"] = torch.cat([w[f"{hf}mlp.{n}_proj.weight"] for n in ("up", "gate")])
        s[p + "ff_out.weight"] = w[hf + "mlp.down_proj.weight"]
        if two:
            s[p + "attn_norm.weight"] = w[hf + "post_attention_layernorm.weight"]
            s[p + "ff_norm.weight"] = w[hf + "post_feedforward_layernorm.weight"]
            s[p + "q_norm.weight"], s[p + "k_norm.weight"] = (
                w[hf + "self_attn.q_norm.weight"],
                w[hf + "self_attn.k_norm.weight"],
            )
    model.load_state_dict(s)
    return model.to(getattr(torch, dtype)).eval()


class Engine:
    def __init__(self, model):
        self.model, self.caches = model, {}

    def step(self, work):
        rows = []
        for request, ids, first in work:
            out = self.model(
                torch.tensor([ids]), past_key_values=self.caches.get(request), use_cache=True, last_logits_only=True
            )
            self.caches[request] = out.attn_key_values
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    def finish(self, request):
        del self.caches[request]


def open_engine(folder, dtype):
    return Engine(load(folder, dtype))
