"""Tiny models with layers that predict further tokens (MTP), and an engine in plain torch that runs one."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from harness.extensions.faults.zoo.lively import make_lively, normal
from harness.extensions.faults.zoo.quiet import quiet
from harness.extensions.faults.zoo.tiny_config import tiny_config

try:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel
except ImportError:
    pytest.skip("this version of transformers has no MtpModel", allow_module_level=True)

__all__ = ["MtpCache", "MtpEngine", "MtpModel", "save"]

_OF_MELLUM = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def save(model_type: str, folder: Path, *, num_depths: int = 1, num_layers: int | None = None) -> PreTrainedModel:
    """Write a tiny checkpoint with such layers, named as in published ones, and return the main model.

    HF looks for them by number: of GLM-4-MoE behind 46 layers or 92, of DeepSeek-V3 behind 61.
    """
    config = tiny_config(model_type)
    fields = {name: value for name, value in config.to_dict().items() if name != "model_type"} | {
        "num_mtp_layers": num_depths,
        "num_hidden_layers": num_layers or config.num_hidden_layers,
    }
    fields.pop("num_nextn_predict_layers", None)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        main = AutoModelForCausalLM.from_config(type(config)(**fields), dtype=torch.float32).eval()
        make_lively(main, 0)
        main.save_pretrained(folder)
        mtp, generator = MtpModel(main, num_depths).eval(), torch.Generator().manual_seed(1)
        for name, parameter in mtp.layers.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.data = centre * (parameter.dim() == 1) + spread * normal(parameter, generator)
        tensors = revert_weight_conversion(main, dict(_named(mtp, model_type, main.config.num_hidden_layers)))
    file = folder / "model.safetensors"
    added = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return main


def _named(mtp: MtpModel, model_type: str, first: int) -> Any:
    for name, tensor in mtp.layers.state_dict().items():
        depth, _, rest = name.partition(".")
        part, _, inner = rest.partition(".")
        if model_type == "mellum":
            yield (f"mtp.layers.{depth}.{inner}" if part == "mtp_block" else f"mtp.{_OF_MELLUM[part]}.{inner}"), tensor
        else:
            module = inner if part == "mtp_block" else rest.replace("post_norm", "shared_head.norm")
            yield f"model.layers.{first + int(depth)}.{module}", tensor


class _Norm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class _Product(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class _Head(nn.Module):
    """Mellum's layer that predicts the token after the next, with names of its own."""

    def __init__(self, folder: Path, main: PreTrainedModel, dtype: torch.dtype, faults: Collection[str]) -> None:
        super().__init__()
        tensors = load_file(folder / "model.safetensors")
        self.config, self.faults = main.config, faults
        self.embedding = nn.Embedding.from_pretrained(main.model.embed_tokens.weight.data)

        def of(name: str) -> torch.Tensor:
            return tensors[f"mtp.{name}.weight"].to(dtype)

        eps = main.config.rms_norm_eps
        for attribute, name in (
            ("norm_of_token", "pre_fc_norm_embedding"), ("norm_of_hidden", "pre_fc_norm_hidden"), ("last", "norm"),
            ("before", "layers.0.input_layernorm"), ("between", "layers.0.post_attention_layernorm"),
            ("norm_of_q", "layers.0.self_attn.q_norm"), ("norm_of_k", "layers.0.self_attn.k_norm"),
        ):  # fmt: skip
            self.add_module(attribute, _Norm(of(name), eps))
        for attribute, name in (
            ("join", "fc"), ("q", "layers.0.self_attn.q_proj"), ("k", "layers.0.self_attn.k_proj"),
            ("v", "layers.0.self_attn.v_proj"), ("o", "layers.0.self_attn.o_proj"), ("router", "layers.0.mlp.gate"),
        ):  # fmt: skip
            self.add_module(attribute, _Product(of(name)))
        self.experts = [
            [of(f"layers.0.mlp.experts.{at}.{part}_proj") for part in ("gate", "up", "down")]
            for at in range(main.config.num_experts)
        ]
        size = main.config.head_dim
        theta = main.config.rope_parameters["sliding_attention"]["rope_theta"]
        self.frequencies = theta ** -(torch.arange(0, size, 2).float() / size)

    def forward(
        self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        token = self.embedding(ids)
        if "no token at position 0" in self.faults:  # as vLLM does
            token = torch.where(positions[:, None] == 1, 0, token)
        if "no norm of the token" not in self.faults:
            token = self.norm_of_token(token)
        if "no norm of the hidden state" not in self.faults:
            hidden = self.norm_of_hidden(hidden)
        parts = [hidden, token] if "other order" in self.faults else [token, hidden]
        x = self.join(torch.cat(parts, dim=-1))
        x = x + self.o(self._attention(self.before(x), positions, cache))
        x = x + self._mixture(self.between(x))
        return x if "no last norm" in self.faults else self.last(x)

    def _attention(self, x: torch.Tensor, positions: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        size, num_heads, num_kv = self.config.head_dim, self.config.num_attention_heads, self.config.num_key_value_heads
        q_positions = positions - 1 if "own positions" in self.faults else positions
        q = self._turned(self.norm_of_q(self.q(x).view(-1, num_heads, size)), q_positions)
        k = self.norm_of_k(self.k(x).view(-1, num_kv, size))
        k = self._turned(k, q_positions - 1 if "keys one position early" in self.faults else q_positions)
        new = {"k": k, "v": self.v(x).view(-1, num_kv, size)}
        for name, rows in new.items():
            is_kept = name in cache and "no cache" not in self.faults
            cache[name] = torch.cat([cache[name], rows]) if is_kept else rows
        keys, values = (item.repeat_interleave(num_heads // num_kv, dim=1) for item in (cache["k"], cache["v"]))
        key = torch.arange(len(keys))
        query = key[len(keys) - len(q) :, None]
        sees = (key <= query) & ((key > query - self.config.sliding_window) | ("no window" in self.faults))
        q, keys, values = (item.transpose(0, 1) for item in (q, keys, values))
        context = functional.scaled_dot_product_attention(q, keys, values, attn_mask=sees)
        return context.transpose(0, 1).reshape(len(x), -1)

    def _turned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = (positions[:, None].float() * self.frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(x.dtype)

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self.config.num_experts_per_tok, dim=-1)
        if "weights do not add up to 1" not in self.faults:
            weights = weights / weights.sum(-1, keepdim=True)
        weights, result = weights.to(x.dtype), torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(self.experts):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            y = functional.silu(x[rows] @ gate.T) * (x[rows] @ up.T)
            result[rows] += (y @ down.T) * weights[rows, slot, None]
        return result


class MtpEngine:
    """Mellum's main model by HF and its further layer by hand, one request a step."""

    tokens_ahead = 1

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.float32, faults: Collection[str] = ()) -> None:
        with quiet():
            self.main = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.faults, self.head = frozenset(faults), _Head(folder, self.main, dtype, faults)
        self._before_norm: list[torch.Tensor] = []
        self.main.model.norm.register_forward_pre_hook(lambda _norm, args: self._before_norm.append(args[0]))
        self._caches: dict[int, tuple[Any, dict[str, torch.Tensor]]] = {}

    def step(self, work: Any) -> torch.Tensor:
        if len(work) > 1:
            raise ValueError("one request a step")
        ((number, ids, start, following),) = work
        past, head_cache = self._caches.get(number, (None, {}))
        self._before_norm.clear()
        output = self.main.model(input_ids=torch.tensor([ids]), cache=past, use_cache=True)
        hidden = output.last_hidden_state[0]
        rows = self._before_norm[0][0] if "hidden state before the norm" in self.faults else hidden
        ahead = [*ids, *following][: len(ids)] if "own token" in self.faults else [*ids[1:], *(following or [0])]
        if "not run" not in self.faults:
            self.head(torch.tensor(ahead), rows, torch.arange(start, start + len(ids)) + 1, head_cache)
        self._caches[number] = output.cache, head_cache
        return self.main.lm_head(hidden[-1:])
