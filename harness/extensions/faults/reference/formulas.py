"""Formulas read wrongly: roots of norms, scalings of frequencies, the stream that a head reads, a layer left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reference_engine.loader
import reference_engine.rope_types
from harness.extensions.faults.fault import FIRST, FIRST_SAMPLED, SECOND, Category, Fault, Row, table_of
from harness.extensions.faults.reference.attention import everywhere
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.norm import norm_scaled_by
from harness.extensions.faults.reference.position import frequencies_changed
from harness.extensions.faults.reference.weights import Weights, loaded
from reference_engine.layers import MLP, Embedding, RMSNorm
from reference_engine.model import Decoder

_NORM, _Q_ROPE, _HEAD = "model.layers.0.input_layernorm", "model.layers.0.q_rope", "lm_head"
_ATTENTION, _EMBEDDING = "model.layers.0.attention", "model.embed_tokens"
_SMALL = {"model.embed_tokens.weight": 1e-3}
"""Activations so small that eps matters in 16 bits."""


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def _outside_of_the_root(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return 1 / (_mean_square(x).sqrt() + norm.eps)


def _padded(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """The mean is over the row as it lies in memory, padded to a multiple of 64."""
    return torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (-(-x.shape[-1] // 64) * 64) + norm.eps)


def _one_norm_weight(weights: Weights, config: Any) -> None:
    weights[f"{_NORM}.weight"][17] *= 1.5


def _norm_weight_shifted(weights: Weights, config: Any) -> None:
    weights[f"{_NORM}.weight"] = weights[f"{_NORM}.weight"].roll(1)


def _scaled_frequencies(parameters: dict[str, Any]) -> Any:
    """Frequencies of the config with other parameters of rope."""

    def change(config: Any, inv_freq: torch.Tensor) -> torch.Tensor:
        rope = replace(config.rope, parameters={**config.rope.parameters, **parameters})
        return reference_engine.rope_types.ROPE_TYPES[config.rope.rope_type](rope, config.head_dim)[0]

    return frequencies_changed(change)


def _stretched(factor: float) -> Any:
    """All frequencies divided by a factor, which config.json does not ask for."""
    return frequencies_changed(lambda config, inv_freq: inv_freq / factor)


def _theta_stretched(config: Any, inv_freq: torch.Tensor) -> torch.Tensor:
    """NTK: the base is raised so that the longest wavelength grows eightfold."""
    dim = config.head_dim
    rope = replace(config.rope, theta=config.rope.theta * 8 ** (dim / (dim - 2)))
    return reference_engine.rope_types.ROPE_TYPES["default"](rope, dim)[0]


def _head_reads(choose: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Give the head another stream: `choose` gets the embedding's output and that of every layer."""

    def make(call: Callable[..., Any], self: Decoder, batch: Any) -> Any:
        streams = [self.embed_tokens(batch.token_ids_T)]
        batch.tap("model.", "embed_tokens", streams[0])
        rotation = self.rotary(batch.positions_T)
        for layer in self.layers:
            streams.append(layer(streams[-1], rotation, batch))
        batch.tap("model.", "norm", self.norm(streams[-1]))
        return self.logits(choose(streams), batch)

    return replacing((Decoder, "__call__", make))


def _without_layer(index: int) -> Any:
    def make(build: Callable[..., Decoder], *args: Any, **kwargs: Any) -> Decoder:
        decoder = build(*args, **kwargs)
        return replace(decoder, layers=decoder.layers[:index] + decoder.layers[index + 1 :])

    return replacing((reference_engine.loader, "build_decoder", make))


def _stale_head(weights: Weights, config: Any) -> None:
    """The embedding was trained on, and the head that is tied to it kept what it was."""
    table = weights["model.embed_tokens.weight"]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(0)).to(table)
    weights["lm_head.weight"] = table + 0.1 * table.std() * noise


def _embedding_scaled(call: Callable[..., torch.Tensor], self: Embedding, ids: torch.Tensor) -> Any:
    return call(self, ids) * self.weight_VD.shape[1] ** 0.5


def _embedding_of_the_token_before(call: Callable[..., torch.Tensor], self: Any, ids: torch.Tensor) -> torch.Tensor:
    """In a prefill of several tokens, each row takes the embedding of the token before it."""
    return call(self, torch.cat((ids[:1], ids[:-1])) if len(ids) > 3 else ids)


def _branch_scaled(factor: float) -> Any:
    def make(call: Callable[..., torch.Tensor], self: Any, x: Any, batch: Any, prefix: Any) -> torch.Tensor:
        return call(self, x, batch, prefix) * factor

    return replacing((MLP, "__call__", make))


_formula = table_of(row=FIRST)


def _fault(id: str, summary: str, inject: Any, cause: str, tap: str, *row: Row, **rest: Any) -> Fault:
    category = Category.POSITION if tap == _Q_ROPE else Category.ATTENTION if tap == _ATTENTION else Category.NORM
    return _formula(id, summary, inject, cause, tap, *row, category=category, **rest)


_LLAMA: dict[str, Any] = {"model": "llama-tiny"}
_BF16: dict[str, Any] = {"dtype": "bfloat16"}
FAULTS = [
    _fault("norm-eps-outside", "eps is added outside of the root.", norm_scaled_by(_outside_of_the_root),
           "eps.*outside of the root", _NORM, **_LLAMA),
    _fault("norm-eps-outside-in-bfloat16", "eps is added outside of the root.", norm_scaled_by(_outside_of_the_root),
           "eps.*outside of the root", _NORM, **_LLAMA, **_BF16, scaled=_SMALL),
    _fault("norm-eps-of-the-sum", "eps is added to the sum of the squares, not to their mean.",
           norm_scaled_by(lambda norm, x: torch.rsqrt((x.pow(2).sum(-1, keepdim=True) + norm.eps) / x.shape[-1])),
           "eps.*sum", _NORM, **_LLAMA),
    _fault("norm-not-divided", "The squares are summed up, not averaged.",
           norm_scaled_by(lambda norm, x: torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + norm.eps)),
           "not divided|sum of the squares", _NORM, **_BF16),
    _fault("norm-unbiased", "The mean of the squares is over one element less.",
           norm_scaled_by(lambda norm, x: torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + norm.eps)),
           "divided by 95 instead of 96", _NORM),
    _fault("norm-padded", "The mean of the squares is over a padded row.", norm_scaled_by(_padded),
           "divided by 128 instead of 96", _NORM, dtype="float16"),
    _fault("norm-one-weight", "One weight of a norm is another.", loaded(_one_norm_weight),
           "one weight of the norm is another", _NORM, **_BF16),
    _fault("norm-weight-shifted", "The weights of a norm are one off.", loaded(_norm_weight_shifted),
           "weights of the norm are in another order|shifted", _NORM, **_BF16),
    _fault("rope-linear", "Positions are divided by 4, which config.json does not ask for.", _stretched(4.0),
           "linear.*factor 4", _Q_ROPE, SECOND),
    _fault("rope-linear-in-bfloat16", "Positions are divided by 2, which config.json does not ask for.",
           _stretched(2.0), "linear.*factor 2", _Q_ROPE, SECOND, **_BF16),
    _fault("rope-factor", "The llama3 scaling has a factor of 32 where config.json says 8.",
           _scaled_frequencies({"factor": 32.0}), "factor.* 32 instead of 8", _Q_ROPE, SECOND, **_LLAMA),
    _fault("rope-factor-in-bfloat16", "The llama3 scaling has a factor of 4 where config.json says 8.",
           _scaled_frequencies({"factor": 4.0}), "factor.* 4 instead of 8", _Q_ROPE, (0, 2), **_LLAMA, **_BF16),
    _fault("rope-low-freq-factor", "low_freq_factor is 2 where config.json says 1.",
           _scaled_frequencies({"low_freq_factor": 2.0}), "low_freq_factor.* 2 instead of 1", _Q_ROPE, SECOND,
           **_LLAMA),
    _fault("rope-dynamic", "The base is stretched for eight times the length, which config.json does not ask for.",
           frequencies_changed(_theta_stretched), "theta", _Q_ROPE, SECOND),
    _fault("head-without-norm", "The head reads the stream before the final norm.", _head_reads(lambda x: x[-1]),
           "reads model.layers.2.output", _HEAD, FIRST_SAMPLED),
    _fault("head-of-an-earlier-layer", "The head reads the output of layer 1.", _head_reads(lambda x: x[-2]),
           "reads model.layers.1.output", _HEAD, FIRST_SAMPLED, **_BF16),
    _fault("head-stale", "A tied head keeps what the embedding was before it was trained on.", loaded(_stale_head),
           "tied head.*stale", _HEAD, FIRST_SAMPLED, **_LLAMA, max_new_tokens=50),
    _fault("layer-skipped", "Layer 1 does not run.", _without_layer(1), "layer 1 did not run",
           "model.layers.1.k_cache", options={"debug_checks": "true"}),
    _fault("layer-skipped-in-bfloat16", "The last layer does not run.", _without_layer(2), "layer 2 did not run",
           "model.layers.2.k_cache", options={"debug_checks": "true"}, **_BF16),
    _fault("embedding-scaled", "The embedding is scaled by the root of the hidden size.",
           replacing((Embedding, "__call__", _embedding_scaled)), "root of the hidden size", _EMBEDDING, **_BF16),
    _fault("embedding-of-the-token-before", "Rows of a prefill take the embedding of the token before.",
           replacing((Embedding, "__call__", _embedding_of_the_token_before)), "token before", _EMBEDDING, SECOND),
    _fault("scale-of-padded-head", "Scores are divided by the root of a padded head size.",
           everywhere(scale=64**-0.5), "head size padded to 64: 0.125", _ATTENTION, SECOND, **_BF16),
    _fault("scale-of-padded-head-in-float16", "Scores are divided by the root of a padded head size.",
           everywhere(scale=48**-0.5), "softmax scale is 0.1443", _ATTENTION, SECOND, dtype="float16"),
    _fault("mlp-scaled", "The MLP's branch is added with a factor of 1.02.", _branch_scaled(1.02),
           "gain of 1.02|factor of 1.02|1.02 times", "model.layers.0.output"),
]  # fmt: skip
