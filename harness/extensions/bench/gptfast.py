"""A loop as gpt-fast has it (github.com/meta-pytorch/gpt-fast): what plain torch reaches with one compiled step.

A cache of fixed size, fused weights, one compiled step that CUDA graphs replay, and each token fed back on the device,
so that the host waits once for all tokens of a batch. It schedules nothing: all requests are equally long.

Shapes: B requests, T tokens, N query heads, K KV heads, H head dim, C cached positions.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from harness.errors import Code, HarnessError
from harness.extensions.bench.hf import load_hf_model
from harness.extensions.bench.peer import BenchConfig, BenchWorkload, Generation

_NUM_WARM_STEPS = 4
"""Compiling, then recording, take the first steps of a batch of another shape."""


class _Layer(nn.Module):
    """The weights of a layer, products of one input as one, and its cache [2, B, K, C, H]: all of them buffers.

    Buffers stay in place. A recorded step copies whatever else it reads, in every replay.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        weights = {
            "qkv": torch.cat([item.weight.data for item in (attention.q_proj, attention.k_proj, attention.v_proj)]),
            "gate_up": torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data]),
            "out": attention.o_proj.weight.data,
            "down": mlp.down_proj.weight.data,
            "norm": layer.input_layernorm.weight.data,
            "mlp_norm": layer.post_attention_layernorm.weight.data,
            "q_norm": attention.q_norm.weight.data,
            "k_norm": attention.k_norm.weight.data,
        }
        for name, weight in weights.items():
            self.register_buffer(name, weight)
        self.register_buffer("cache", None)


class _Decoder(nn.Module):
    layers: Any
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: Any, num_positions: int) -> None:
        super().__init__()
        self.config, self.eps = model.config, model.config.rms_norm_eps
        self.layers = nn.ModuleList(map(_Layer, model.model.layers))
        embedding = model.model.embed_tokens.weight.data
        positions = torch.arange(num_positions, device=embedding.device)
        cos_1CH, sin_1CH = model.model.rotary_emb(embedding[:1], positions[None])
        tensors = {"embedding": embedding, "head": model.lm_head.weight.data, "norm": model.model.norm.weight.data}
        for name, tensor in {**tensors, "cos": cos_1CH[0], "sin": sin_1CH[0]}.items():
            self.register_buffer(name, tensor)

    def forward(self, tokens_BT: torch.Tensor, places_T: torch.Tensor) -> torch.Tensor:
        """Return the tokens that follow, [B, 1], and keep K and V at some positions of all requests."""
        x, cos, sin = functional.embedding(tokens_BT, self.embedding), self.cos[places_T], self.sin[places_T]
        is_seen_TC = places_T[:, None] >= torch.arange(self.layers[0].cache.shape[3], device=x.device)
        for layer in self.layers:
            q, k, v = self._heads(functional.linear(self._norm(x, layer.norm), layer.qkv))
            q = _rotated(self._norm(q, layer.q_norm).transpose(1, 2), cos, sin)
            k = _rotated(self._norm(k, layer.k_norm).transpose(1, 2), cos, sin)
            layer.cache[0].index_copy_(2, places_T, k)
            layer.cache[1].index_copy_(2, places_T, v.transpose(1, 2))
            context = functional.scaled_dot_product_attention(
                q, layer.cache[0], layer.cache[1], is_seen_TC, enable_gqa=True
            )
            x = x + functional.linear(context.transpose(1, 2).flatten(2), layer.out)
            gate, up = functional.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.linear(self._norm(x[:, -1:], self.norm), self.head).argmax(dim=-1)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, [B, T, N or K, H]."""
        num_kv = self.config.num_key_value_heads
        heads = qkv.unflatten(-1, (-1, self.config.head_dim))
        return torch.split(heads, [self.config.num_attention_heads, num_kv, num_kv], dim=2)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.eps)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [B, N or K, T, H] turned by the angles of its positions, [T, H]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class GptFastPeer:
    """The loop, of a decoder of Qwen3's architecture.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: the model is of another one.
    """

    name = "gpt-fast"
    shows_steps = True

    @torch.no_grad()
    def __init__(self, setting: BenchConfig) -> None:
        model, self._device = load_hf_model(setting), torch.device(setting.device)
        if model.config.model_type != "qwen3":
            what = f"{self.name} computes Qwen3 alone, and not {model.config.model_type}"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="--peer", hint="leave this peer out")
        self._decoder = _Decoder(model, setting.max_request_len)
        self._step: Any = self._decoder

    @torch.no_grad()
    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        if len(set(workload.request_lens)) > 1 or len(set(workload.output_lens)) > 1:
            what = f"{self.name} takes requests of one length only"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=workload.name)
        prompts_BT = torch.tensor(workload.prompts, device=self._device)
        places = torch.arange(workload.request_lens[0], device=self._device)
        self._make_room(len(prompts_BT), len(places))
        generation = Generation()
        tokens = [self._decoder(prompts_BT, places[: prompts_BT.shape[1]])]
        tokens[0].tolist()  # waits for the device
        generation.end_step()
        for place in places[prompts_BT.shape[1] : -1].split(1):
            # The next replay of a recorded step overwrites what this one returns.
            tokens.append(self._step(tokens[-1], place).clone())
        generation.token_ids = torch.cat(tokens, dim=1).tolist()
        generation.end_steps(len(tokens) - 1)
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        del self._decoder, self._step

    def _make_room(self, batch_size: int, length: int) -> None:
        """Have a cache of a shape, and the step compiled for it, before the clock starts."""
        config, before = self._decoder.config, self._decoder.layers[0].cache
        shape = (2, batch_size, config.num_key_value_heads, length, config.head_dim)
        if before is not None and before.shape == shape:
            return
        for layer in self._decoder.layers:
            layer.cache = self._decoder.embedding.new_zeros(shape)
        if self._device.type == "cuda":
            torch.compiler.reset()  # whose limit of versions is below the number of shapes that are timed
            self._step = torch.compile(self._decoder, mode="reduce-overhead", fullgraph=True, dynamic=False)
        tokens_B1, place = (
            torch.zeros(*size, dtype=torch.int64, device=self._device) for size in ((batch_size, 1), (1,))
        )
        for _ in range(_NUM_WARM_STEPS):
            self._step(tokens_B1, place).clone()
