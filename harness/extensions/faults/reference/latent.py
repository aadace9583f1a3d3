"""Latent attention: what is cached and turned, and how scores are scaled."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import reference_engine.loader
from harness.extensions.faults.fault import FIRST, SECOND, Category, table_of
from harness.extensions.faults.reference.injection import replacing
from reference_engine.checkpoint.latent import LatentShape
from reference_engine.families.latent_attention import LatentAttention
from reference_engine.kv_cache import KVCache

_LAYER = "model.layers.0."
Call = Callable[..., Any]


def _key_not_turned(original: Call, self: Any, x_TNR: Any, rotation: Any) -> Any:
    return original(self, x_TNR, rotation) if x_TNR.shape[1] > 1 else x_TNR


def _not_normed(original: Call, self: LatentAttention, x_TD: torch.Tensor, *args: Any) -> torch.Tensor:
    """The latent is cached, and read, as it was before its norm."""
    rank = self.shape.rank
    raw_T1L = self.kv_a_proj(x_TD)[:, None, :rank]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.backend.attend(layer, q, torch.cat([raw_T1L, k[..., rank:]], dim=-1), raw_T1L, batch)

    return original(replace(self, backend=SimpleNamespace(attend=attend)), x_TD, *args)  # type: ignore[no-any-return]


def _turned_part_lost(
    original: Call, self: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    original(self, layer, torch.cat([v, torch.zeros_like(k[..., v.shape[-1] :])], dim=-1), v, slots)


def _scaled_by(width: Callable[[LatentShape], int]) -> Any:
    """Scale scores by the root of a width alone."""

    def make(original: Call, model_dir: Any, config: Any, model_config: Any, dtype: Any, device: Any) -> Any:
        spec = original(model_dir, config, model_config, dtype, device)
        return replace(spec, score_scale=width(model_config.latent) ** -0.5)

    return replacing((reference_engine.loader, "resolve_cache_spec", make))


_fault = table_of(category=Category.ATTENTION, tap=f"{_LAYER}attention", row=SECOND, model="deepseek-v3-tiny")
FAULTS = [
    _fault("latent-key-not-turned", "The part of the key that all heads share is not rotated.",
           replacing((LatentAttention, "_rotate", _key_not_turned)), "rotary is not applied", f"{_LAYER}k_rope", FIRST),
    _fault("latent-not-normed", "The latent is cached before its norm.",
           replacing((LatentAttention, "__call__", _not_normed)), "before the norm|kv_a_layernorm.*is left out",
           f"{_LAYER}k_cache", FIRST),
    _fault("latent-turned-part-lost", "The cache does not keep the rotated part of the key.",
           replacing((KVCache, "store", _turned_part_lost)), "zeros come back", f"{_LAYER}v_cache", FIRST),
    _fault("latent-scale", "Scores are scaled by the width of the latent.",
           _scaled_by(lambda latent: latent.cached_dim), "the softmax scale is"),
    _fault("latent-mscale-ignored", "Scores do not grow with the stretched context.",
           _scaled_by(lambda latent: latent.head_dim), "the softmax scale is"),
]  # fmt: skip
