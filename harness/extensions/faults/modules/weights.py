"""Faults of weights."""

import torch

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import inputs, weight, weight_of
from harness.extensions.faults.modules.declaring import BF16, F16, FACTOR, ORDER, ROUND, declaring
from harness.extensions.faults.modules.rotary import L0

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.WEIGHTS)


fault(
    "starcoder2", "weight-of-the-next-layer", "c_proj of layer 0 holds layer 1's", r"layers\.0\.mlp\.c_proj", 0,
    "layer|weight", weight_of("model.layers.0.mlp.c_proj.weight", "model.layers.1.mlp.c_proj.weight"),
    schedule="batched",
)  # fmt: skip
fault(
    "phi3", "k-and-v-exchanged", "rows of k and v are exchanged in the fused product",
    r"layers\.0\.self_attn\.(qkv_proj)", 0, ORDER,
    weight(L0 + ".qkv_proj.weight", lambda w: torch.cat([w[:64], w[96:], w[64:96]])), dtype=BF16,
)  # fmt: skip
fault(
    "gpt_neox",
    "fused-by-part",
    "rows of the fused product are by part instead of by head",
    r"layers\.0\.attention\.query_key_value",
    0,
    ORDER,
    weight(
        "gpt_neox.layers.0.attention.query_key_value.weight",
        lambda w: w.unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(0, 2),
    ),
    schedule="chunked:11",
)
fault(
    "bloom",
    "fused-by-part",
    "rows of the fused product are by part instead of by head",
    r"h\.0\.self_attention\.query_key_value",
    0,
    ORDER,
    weight(
        "transformer.h.0.self_attention.query_key_value.weight",
        lambda w: w.unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(0, 2),
    ),
    dtype=BF16,
)
fault(
    "mpt", "q-and-k-exchanged", "rows of q and k are exchanged", r"blocks\.0\.attn\.Wqkv", 0, ORDER,
    weight("transformer.blocks.0.attn.Wqkv.weight", lambda w: torch.cat([w[64:128], w[:64], w[128:]])), dtype=F16,
)  # fmt: skip
fault(
    "gpt2", "conv1d-transposed", "a square weight is not transposed", r"h\.0\.attn\.c_proj", 0, "transpos",
    weight("transformer.h.0.attn.c_proj.weight", lambda w: w.T), schedule="batched",
)  # fmt: skip
fault(
    "opt", "out-proj-transposed", "a square weight is transposed", r"layers\.0\.self_attn\.out_proj", 0, "transpos",
    weight("model.decoder.layers.0.self_attn.out_proj.weight", lambda w: w.T), dtype=BF16,
)  # fmt: skip
fault(
    "codegen", "value-and-key-exchanged", "the parts of each shard are q, k, v instead of q, v, k",
    r"h\.0\.attn\.qkv_proj", 0, ORDER,
    weight("transformer.h.0.attn.qkv_proj.weight", lambda w: w.unflatten(0, (4, 3, 16))[:, [0, 2, 1]].flatten(0, 2)),
    schedule="chunked:11",
)  # fmt: skip
fault(
    "jetmoe", "kv-halves-exchanged", "keys and values are exchanged in the fused product",
    r"layers\.0\.self_attention\.kv_proj", 0, ORDER + "|half",
    weight("model.layers.0.self_attention.kv_proj.weight", lambda w: w.roll(32, 0)), dtype=BF16,
)  # fmt: skip
fault(
    "deepseek_v3", "kv-b-by-part", "rows of kv_b_proj are by part instead of by head",
    r"layers\.0\.self_attn\.kv_b_proj", 0, ORDER,
    weight(L0 + ".kv_b_proj.weight", lambda w: w.unflatten(0, (4, 2, 16)).transpose(0, 1).flatten(0, 2)),
)  # fmt: skip
fault(
    "nemotron", "int8-weights", "a weight is rounded to int8 with a scale of its own", r"layers\.0\.mlp\.down_proj", 0,
    ROUND,
    weight("model.layers.0.mlp.down_proj.weight", lambda w: (w / w.abs().amax() * 127).round() * w.abs().amax() / 127),
    schedule="batched",
)  # fmt: skip
fault(
    "olmo", "head-tied", "the head is the embedding, which is not tied", r"lm_head", None, "embed|tied|weight",
    weight_of("lm_head.weight", "model.embed_tokens.weight"), request=None,
)  # fmt: skip
fault(
    "stablelm", "head-rows-zero", "the last 8 rows of the head are zero", r"lm_head", None, "zero|row|output",
    weight("lm_head.weight", lambda w: torch.cat([w[:-8], 0 * w[-8:]])), request=None,
)  # fmt: skip
fault(
    "falcon", "rank-repeated", "the second half of the inputs has the first half's weights",
    r"h\.0\.self_attention\.dense", 0, "half|input|column|rank|weight|shard|part",
    weight("transformer.h.0.self_attention.dense.weight", lambda w: torch.cat([w[:, :32], w[:, :32]], 1)), dtype=BF16,
)  # fmt: skip
fault(
    "cohere", "partial-sum", "the second half of the inputs is not summed", r"layers\.0\.self_attn\.o_proj", 0,
    "half|input|column|rank|sum|part|zero|shard",
    weight(L0 + ".o_proj.weight", lambda w: torch.cat([w[:, :32], 0 * w[:, 32:]], 1)),
)  # fmt: skip
fault(
    "gptj", "head-bias-dropped", "the bias of the head is left out", r"lm_head", None, "bias",
    weight("lm_head.bias", lambda x: 0 * x), request=None, dtype=BF16,
)  # fmt: skip
fault(
    "glm4", "key-bias-dropped", "the bias of the keys is left out", r"layers\.0\.self_attn\.k_proj", 0, "bias",
    weight(L0 + ".k_proj.bias", lambda x: 0 * x), dtype=F16,
)  # fmt: skip
fault(
    "gpt_oss", "router-bias-dropped", "the bias of the router is left out", r"layers\.0\.mlp\.router", 0, "bias",
    weight("model.layers.0.mlp.router.bias", lambda x: 0 * x), schedule="chunked:11",
)  # fmt: skip
fault(
    "persimmon", "bias-of-the-next-layer", "a bias is that of the next layer", r"layers\.0\.mlp\.dense_h_to_4h", 0,
    "bias", weight_of("model.layers.0.mlp.dense_h_to_4h.bias", "model.layers.1.mlp.dense_h_to_4h.bias"), dtype=F16,
)  # fmt: skip
fault(
    "mamba", "x-and-z-exchanged", "the halves of in_proj are exchanged", r"layers\.0\.mixer\.in_proj", 0,
    ORDER + "|half", weight("backbone.layers.0.mixer.in_proj.weight", lambda w: w.roll(128, 0)),
)  # fmt: skip
fault(
    "lfm2", "in-proj-order", "the parts of in_proj are C, B, x instead of B, C, x", r"layers\.0\.conv\.in_proj", 0,
    ORDER, weight("model.layers.0.conv.in_proj.weight", lambda w: torch.cat([w[64:128], w[:64], w[128:]])),
    schedule="batched",
)  # fmt: skip
fault(
    "helium", "token-ids-int8", "ids from 128 on wrap around (a signed byte)", r"embed_tokens", None,
    "token|row|embed|id", inputs("model.embed_tokens", lambda ids: torch.where(ids > 127, ids - 128, ids), "input"),
    request=None,
)  # fmt: skip
fault(
    "arcee", "next-token-id", "the embedding of the next id is looked up", r"embed_tokens", 0, "token|row|embed|id",
    inputs("model.embed_tokens", lambda ids: ids + 1, "input"), dtype=BF16, schedule="chunked:11",
)  # fmt: skip
fault(
    "mixtral", "one-bit", "one element of a weight has another exponent", r"layers\.0\.self_attn\.q_proj", 0,
    "element|weight|row|output|one",
    weight(L0 + ".q_proj.weight", lambda w: w.index_put((torch.tensor(5), torch.tensor(9)), w[5, 9] * 256)),
    dtype=BF16,
)  # fmt: skip
fault(
    "olmo2",
    "lora-left-merged",
    "an adapter of rank 1 is still merged",
    r"layers\.0\.self_attn\.v_proj",
    0,
    "rank|adapter|LoRA|update|merged",
    weight(
        L0 + ".v_proj.weight",
        lambda w: w + 0.3 * torch.outer(torch.linspace(-1, 1, 32), torch.linspace(1, 0, 64).cos()),
    ),
    dtype=F16,
)
fault(
    "xglm", "weight-scaled-twice", "a weight is multiplied by its scale twice", r"layers\.0\.fc1", 0, FACTOR,
    weight("model.layers.0.fc1.weight", lambda w: 0.5 * w), schedule="batched",
)  # fmt: skip
