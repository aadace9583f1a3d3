"""mlx-lm, by `--engine mlx`: `pip install 'mlx[cpu]' mlx-lm`."""

from harness.engines import open_engine as open_by_name

DTYPES = ("float32", "bfloat16")

# mistakes
from mlx import nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import TransformerBlock
from truth import EPS, SCALE, THETA

UPDATE = KVCache.update_and_fetch


def open_engine(folder, dtype, fault):
    KVCache.update_and_fetch = update if fault == "cache" else UPDATE
    engine = open_by_name("mlx", folder, dtype=dtype, device="cpu", options={})
    model = engine._open()._model
    for layer in model.model.layers:
        if fault == "theta":
            layer.self_attn.rope = nn.RoPE(16, traditional=False, base=THETA)
        if fault == "scale":
            layer.self_attn.scale *= SCALE
    for _, module in model.named_modules():
        if fault == "eps" and isinstance(module, nn.RMSNorm):
            module.eps = EPS
    if fault == "residual":
        model.model.layers[1].__class__ = WithoutResidual
    if fault == "gate_up":
        mlp = model.model.layers[1].mlp
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    return engine


class WithoutResidual(TransformerBlock):
    def __call__(self, x, mask=None, cache=None):
        h = self.self_attn(self.input_layernorm(x), mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))


def update(self, keys, values):
    if keys.shape[2] > 1 or not self.offset:
        return UPDATE(self, keys, values)
    UPDATE(self, keys, values)
    for kept, rows in ((self.keys, keys), (self.values, values)):
        kept[..., self.offset - 2 : self.offset - 1, :] = rows
        kept[..., self.offset - 1 : self.offset, :] = 0
    return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]
