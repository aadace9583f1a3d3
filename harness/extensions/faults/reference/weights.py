"""Faults of loading: the tensors that are loaded, and their places."""

from collections.abc import Callable
from typing import Any

import torch

import reference_engine.loader
from harness.extensions.faults.fault import FIRST, FIRST_SAMPLED, Category, Fault, FaultConfig, table_of
from harness.extensions.faults.reference.injection import replacing

_LAYER = "model.layers.0."
Weights = dict[str, torch.Tensor]


def loaded(change: Callable[[Weights, Any], None]) -> Any:
    """Change the parameters in place once they are loaded: `change` gets them and the model's config."""

    def make(load: Callable[..., Weights], folder: Any, config: Any, *args: Any, **kwargs: Any) -> Weights:
        weights = {name: tensor.clone() for name, tensor in load(folder, config, *args, **kwargs).items()}
        change(weights, config)
        return weights

    return replacing((reference_engine.loader, "load_weights", make))


def _qkv_rows(config: Any) -> tuple[int, int]:
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _k_and_v_swapped(weights: Weights, config: Any) -> None:
    num_q, num_kv = _qkv_rows(config)
    for name, tensor in weights.items():
        if ".qkv_proj." in name:
            q, k, v = tensor.split([num_q, num_kv, num_kv])
            weights[name] = torch.cat((q, v, k))


def _kv_heads_interleaved(weights: Weights, config: Any) -> None:
    """The stack holds, per KV head, its query heads, its key and its value, and is read as if it were q, k, v."""
    num_q, num_kv = _qkv_rows(config)
    heads = config.num_key_value_heads
    for name, tensor in weights.items():
        if ".qkv_proj." in name:
            parts = [part.unflatten(0, (heads, -1)) for part in tensor.split([num_q, num_kv, num_kv])]
            weights[name] = torch.cat(parts, dim=1).flatten(0, 1)


def _gate_and_up_swapped(weights: Weights, config: Any) -> None:
    for name, tensor in weights.items():
        if ".gate_up_proj." in name:
            gate, up = tensor.chunk(2)
            weights[name] = torch.cat((up, gate))


def _bias_dropped(weights: Weights, config: Any) -> None:
    for name in [name for name in weights if name.endswith(".bias")]:
        del weights[name]


def _layer_from_another(weights: Weights, config: Any) -> None:
    for name in list(weights):
        if name.startswith("model.layers.1.mlp."):
            weights[name] = weights[name.replace("layers.1.", "layers.2.")]


def _second_shard_skipped(weights: Weights, config: Any) -> None:
    """The second shard of qwen2-tiny is not loaded: its parameters stay as they were allocated."""
    second = ("model.layers.2.", "model.norm.", "lm_head.", "model.layers.1.mlp.down_proj", "model.layers.1.input_lay")
    for name in list(weights):
        if name.startswith((*second, "model.layers.1.post_att")):
            weights[name] = torch.zeros_like(weights[name])


def _head_not_loaded(weights: Weights, config: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = weights["lm_head.weight"].shape
    weights["lm_head.weight"] = torch.randn(shape, generator=generator).to(weights["lm_head.weight"]) * 0.02


def _head_tied(weights: Weights, config: Any) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]


def _embedding_shifted(weights: Weights, config: Any) -> None:
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].roll(1, dims=0)


def _one_weight_flipped(weights: Weights, config: Any) -> None:
    """The sign of the largest element: one bit of the checkpoint."""
    weight = weights["model.layers.2.mlp.down_proj.weight"].flatten()
    at = weight.abs().argmax()
    weight[at] = -weight[at]


_of_weights = table_of(category=Category.WEIGHTS, row=FIRST)


def _fault(id: str, summary: str, change: Any, *rest: Any, **fields: Any) -> Fault:
    return _of_weights(id, summary, loaded(change), *rest, **fields)


_QWEN2 = FaultConfig(model="qwen2-tiny")
_MANY_LOGITS = FaultConfig(max_new_tokens=50)
"""150 rows of logits for a head of 96 inputs: with fewer than half as many again as inputs, any head would fit."""
FAULTS = [
    _fault("qkv-k-and-v-swapped", "The stacked projection holds v before k.", _k_and_v_swapped, "v_proj",
           _LAYER + "self_attn.k_proj", instance="vllm#42803"),
    _fault("qkv-by-kv-head", "The stacked projection is ordered by KV head and read as q, k, v.", _kv_heads_interleaved,
           "in the wrong order", _LAYER + "self_attn.q_proj", instance="vllm#42803"),
    _fault("gate-and-up-swapped", "The stacked projection holds up before gate.", _gate_and_up_swapped, "up_proj",
           _LAYER + "mlp.gate_proj", instance="sglang#32430"),
    _fault("qkv-bias-dropped", "The biases of q, k and v are not loaded.", _bias_dropped, "bias .*left out",
           _LAYER + "self_attn.q_proj", setting=_QWEN2),
    _fault("layer-from-another", "Layer 1 has the MLP of layer 2.", _layer_from_another,
           r"weights are those of model\.layers\.2", "model.layers.1.mlp.gate_proj"),
    _fault("shard-skipped", "The second file of the checkpoint is not read.", _second_shard_skipped, "zero|not loaded",
           "model.layers.1.input_layernorm", setting=_QWEN2),
    _fault("tied-head-not-loaded", "A head that is tied to the embedding stays as it was initialised.",
           _head_not_loaded, "not loaded|none of this checkpoint", "lm_head", row=FIRST_SAMPLED, setting=_MANY_LOGITS,
           instance="vllm#5621"),
    _fault("head-tied-wrongly", "A head of its own is replaced by the embedding.", _head_tied, "tied to the embedding",
           "lm_head", row=FIRST_SAMPLED, setting=_QWEN2),
    _fault("embedding-shifted", "The embedding's rows are one off.", _embedding_shifted, "token id",
           "model.embed_tokens"),
    _fault("one-weight-flipped", "One element of one matrix has the wrong sign.", _one_weight_flipped,
           "one element of the weight is another", "model.layers.2.mlp.down_proj"),
]  # fmt: skip
