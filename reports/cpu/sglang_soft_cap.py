"""SGLang 0.5.23 alone: its attention in plain torch leaves out the cap of the scores that a layer asks for.

    PYTHONPATH=docs/adapters/sglang python reports/cpu/sglang_soft_cap.py

SGLang's layer and its backend `torch_native` attend over 24 drawn tokens, as one prompt and as one token after 23,
beside the formula with the layer's cap and without one.
"""

from types import SimpleNamespace

import cpu  # noqa: F401  # before SGLang: there is no kernel on a CPU
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention

TOKENS, HEADS, SIZE, CAP = 24, 4, 32, 5.0


class Pool:
    """A cache of keys and values as one tensor each, [tokens, heads, size]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value = key, value

    def get_key_buffer(self, _layer: int) -> torch.Tensor:
        return self.key

    def get_value_buffer(self, _layer: int) -> torch.Tensor:
        return self.value


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return the formula's rows, [tokens, heads, size]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * SIZE**-0.5
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


if __name__ == "__main__":
    torch.manual_seed(0)
    query, key, value = 3 * torch.randn(3, TOKENS, HEADS, SIZE)
    pool = Pool(key, value)
    tables = SimpleNamespace(req_to_token=torch.arange(TOKENS)[None])
    backend = TorchNativeAttnBackend(SimpleNamespace(device="cpu", req_to_token_pool=tables, token_to_kv_pool=pool))
    layer = RadixAttention(HEADS, SIZE, SIZE**-0.5, HEADS, layer_id=0, logit_cap=CAP)
    batch = SimpleNamespace(
        out_cache_loc=None, req_pool_indices=torch.tensor([0]), seq_lens=torch.tensor([TOKENS]), encoder_lens=None,
        extend_prefix_lens=torch.tensor([0]), extend_seq_lens=torch.tensor([TOKENS]),
    )  # fmt: skip
    prompt = backend.forward_extend(query.flatten(1), None, None, layer, batch, save_kv_cache=False)
    token = backend.forward_decode(query[-1:].flatten(1), None, None, layer, batch, save_kv_cache=False)
    for name, cap in ((f"with the cap of {layer.logit_cap}", CAP), ("without a cap", None)):
        rows = attended(query, key, value, cap)
        far = [float((got.view_as(expected) - expected).norm() / expected.norm()) for got, expected in ((prompt, rows), (token, rows[-1:]))]
        print(f"distance from the formula {name}: prompt {far[0]:.1e}, next token {far[1]:.1e}")
