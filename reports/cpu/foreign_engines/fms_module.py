"""ibm-fms, its module as it is: `pip install ibm-fms`. It gets token ids alone, so that it computes all tokens in each step."""

from fms.models import get_model

DTYPES = ("float32", "bfloat16")
LACKS = ("cache",)


def load(folder, dtype):
    return get_model("hf_pretrained", model_path=str(folder), data_type=dtype).eval()


# mistakes
from types import MethodType

from fms.modules.attention import MultiHeadAttention
from fms.modules.layernorm import LayerNormParameterized
from torch.nn import functional
from truth import EPS, SCALE, THETA

ATTENTION = functional.scaled_dot_product_attention


def open_engine(folder, dtype, fault):
    model = load(folder, dtype)
    blocks = model.base_model.layers
    if fault == "theta":
        rotary = model.base_model.rot_emb
        rotary.ratio = THETA
        rotary.cached_freqs.clear(), rotary.max_seq_len_cached.clear()
        rotary.rope_scaling = type(rotary.rope_scaling)(16, THETA, rotary.rope_scaling.orig_max_seq_len, {})
        rotary.compute_freqs_cis(model.head.weight.device, 256)
    for module in model.modules():
        if fault == "eps" and isinstance(module, LayerNormParameterized):
            module.eps = EPS
        if fault == "scale" and isinstance(module, MultiHeadAttention):
            module.scale_factor = 16**-0.5 * SCALE
    if fault == "residual":
        blocks[1].forward = MethodType(without_residual, blocks[1])
    if fault == "gate_up":
        fused = blocks[1].ff_sub_layer.wg1_fused.weight
        fused.data = fused.data.roll(len(fused) // 2, 0)
    return model


def without_residual(self, x, *, position_ids=None, past_key_value_state=None, use_cache=False, **others):
    x = self.attn(q=self.ln(x), position_ids=position_ids, past_key_value_state=None, use_cache=use_cache, **others)
    cache = None
    if use_cache:
        x, cache = x
    x = x + self.ff_sub_layer(self.ff_ln(x))
    return (x, cache) if use_cache else x
