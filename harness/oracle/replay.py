"""Replay: the oracle's operation, in float64, on inputs that an engine recorded.

Comparing an engine's layer 20 with HF's layer 20 mixes the error of layer 20 with all that came before it. Replay
feeds the *engine's own* input of an operation to HF's module and so yields what that one operation should have given.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from harness.oracle.decoder import Decoder
from harness.oracle.precision import TRUTH_DTYPE, keeping_double, linear_in_double, raised, without_tf32
from harness.taps import Kind, Operation

_SCORE_BYTES = 64 << 20
"""Attention scores held at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What an operation should have given, and how far rounding inside it may legitimately carry."""

    expected: torch.Tensor
    """[rows, ...] float64."""
    amplification: torch.Tensor | None = None
    """[rows] float64: by how much the relative error of a row exceeds that of the products summed in it, when they
    cancel; None where nothing cancels. Linear: sqrt(sum_jk w_jk^2 x_k^2) / ||y||. Attention: see `AttentionInputs`."""
    score_sensitivity: torch.Tensor | None = None
    """[rows] float64, attention only: relative change of the row per relative rounding of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Rows of one request that attend to its history.

    `N` query heads, `K` KV heads, `H` head size, `T` query rows, `S` history rows. Heads may be a dimension of their
    own or not, as the engine recorded them.
    """

    query: torch.Tensor
    """[T, N, H] or [T, N*H]."""
    key: torch.Tensor
    """[S, K, H] or [S, K*H], row s at position `key_position[s]`."""
    value: torch.Tensor
    """[S, K, H] or [S, K*H]."""
    query_position: torch.Tensor
    """[T] int64."""
    key_position: torch.Tensor
    """[S] int64."""


class Replayer:
    """HF's operations, one at a time, in float64 on the device of the model."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @contextmanager
    def layer(self, index: int | None) -> Iterator[None]:
        """Hold a decoder layer, or the modules outside the layers but for embedding and head, in float64."""
        modules = [self.decoder.module("model.norm")] if index is None else [self.decoder.layers[index]]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(without_tf32())
            stack.enter_context(raised(*modules))
            yield

    def replay(self, operation: Operation, inputs: list[torch.Tensor], positions: torch.Tensor) -> Replayed:
        """Compute the operation of every row from its recorded inputs; call it inside `layer`.

        Args:
            operation: any operation but attention and cache read-back.
            inputs: recorded tensors [rows, ...] in the order of `operation.inputs`; token ids [rows] for the embedding.
            positions: [rows], read by rotary only.
        """
        with keeping_double():
            return self._replay(operation, [x.to(self.decoder.device) for x in inputs], positions)

    def _replay(self, operation: Operation, inputs: list[torch.Tensor], positions: torch.Tensor) -> Replayed:
        if operation.kind is Kind.EMBEDDING:
            return Replayed(expected=self.decoder.module(operation.tap)(inputs[0]).to(TRUTH_DTYPE))
        doubles = [x.to(TRUTH_DTYPE).flatten(1) for x in inputs]
        if operation.kind is Kind.LINEAR:
            return self._linear(operation, doubles[0])
        if operation.kind is Kind.NORM:
            return Replayed(expected=self._norm(operation, doubles[0]))
        if operation.kind is Kind.ROTARY:
            return Replayed(expected=self._rotary(doubles[0], positions))
        if operation.kind is Kind.ADD:
            return Replayed(expected=doubles[0] + doubles[1])
        if operation.kind is Kind.ACTIVATION:
            mlp: Any = self.decoder.module(operation.tap.removesuffix(".act"))
            return Replayed(expected=mlp.act_fn(doubles[0]) * doubles[1])
        raise ValueError(f"{operation.kind} is not replayed row by row")

    def _linear(self, operation: Operation, x: torch.Tensor) -> Replayed:
        module: Any = self.decoder.module(operation.tap)
        expected = linear_in_double(module, x)
        weight = module.weight
        column_norm2 = torch.zeros(x.shape[-1], dtype=TRUTH_DTYPE, device=x.device)
        for rows in weight.split(max(1, _SCORE_BYTES // (8 * x.shape[-1]))):
            column_norm2 += rows.to(TRUTH_DTYPE).square().sum(dim=0)
        scale = (x.square() @ column_norm2).sqrt()
        return Replayed(expected=expected, amplification=scale / expected.norm(dim=-1))

    def in_parts(self, operation: Operation, x: torch.Tensor, num_parts: int, dtype: torch.dtype) -> torch.Tensor:
        """Compute a linear operation as that many ranks do: [rows, outputs] float64, not yet rounded.

        Each has a share of the inputs, and what it makes of it is rounded to `dtype` before all are added up; the first
        adds the bias.
        """
        module: Any = self.decoder.module(operation.tap)
        x = x.to(self.decoder.device, TRUTH_DTYPE).flatten(1)
        size = x.shape[1] // num_parts
        total: torch.Tensor | float = 0.0
        for part in range(num_parts):
            own = slice(part * size, (part + 1) * size)
            bias = None if module.bias is None or part else module.bias.to(TRUTH_DTYPE)
            share = torch.nn.functional.linear(x[:, own], module.weight[:, own].to(TRUTH_DTYPE), bias)
            total = total + share.to(dtype).to(TRUTH_DTYPE)
        assert isinstance(total, torch.Tensor)
        return total

    def _norm(self, operation: Operation, x: torch.Tensor) -> torch.Tensor:
        module: Any = self.decoder.module(operation.tap)
        size = module.weight.shape[0]
        # q_norm and k_norm see heads of the flat projection
        expected: torch.Tensor = module(x if x.shape[-1] == size else x.unflatten(-1, (-1, size)))
        return expected

    def _rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        head_dim = self.decoder.head_dim()
        x_NTH = x.unflatten(-1, (-1, head_dim)).transpose(0, 1)
        cos, sin = self.decoder.model.model.rotary_emb(x, positions.to(x.device)[None])
        rotate = self.decoder.library_function("apply_rotary_pos_emb")
        rotated: torch.Tensor = rotate(x_NTH[None], x_NTH[None], cos, sin)[0]
        return rotated[0].transpose(0, 1)

    def attention(self, layer: int, inputs: AttentionInputs) -> Replayed:
        """Compute causal attention by its definition, softmax(q k^T scale + mask) v, in float64: [T, N*H].

        The sensitivities, per row: with p the probabilities, o the context, s the scores,
        `amplification` is sqrt(sum_j p_j^2 ||v_j||^2) / ||o|| (each product p_j v_j rounded by itself), and
        `score_sensitivity` is sqrt(sum_j p_j^2 b_j^2 ||v_j - o||^2) / ||o|| with b_j = ||q|| ||k_j|| scale, the bound
        of the score (each score rounded by itself), both with the sums running over all heads as well.
        """
        module: Any = self.decoder.layers[layer].self_attn
        device, num_groups = self.decoder.device, module.num_key_value_groups
        q_NTH, k_KSH, v_KSH = (self._heads(x.to(device, TRUTH_DTYPE)) for x in (inputs.query, inputs.key, inputs.value))
        k_NSH, v_NSH = (x.repeat_interleave(num_groups, dim=0) for x in (k_KSH, v_KSH))
        step = max(1, _SCORE_BYTES // (8 * k_NSH.shape[0] * max(1, k_NSH.shape[1])))
        window = self.window(module)
        parts = []
        for at in range(0, q_NTH.shape[1], step):
            visible = _visible(inputs.query_position[at : at + step], inputs.key_position, window).to(device)
            parts.append(_attend(q_NTH[:, at : at + step], k_NSH, v_NSH, visible, float(module.scaling)))
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return Replayed(expected=columns[0], amplification=columns[1], score_sensitivity=columns[2])

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, ...] to [heads, rows, head size]."""
        heads: torch.Tensor = x.flatten(1).unflatten(-1, (-1, self.decoder.head_dim())).transpose(0, 1)
        return heads

    def window(self, module: Any) -> int | None:
        """Return the layer's sliding window: its own where the family has one a layer, else the config's (Mistral)."""
        window: int | None = getattr(module, "sliding_window", getattr(self.decoder.config, "sliding_window", None))
        return window

    def eager_attention(self, layer: int, inputs: AttentionInputs) -> torch.Tensor:
        """Compute attention as HF's eager code does in the engine's dtype, scores rounded: [T, N*H].

        A legitimate convention that is coarser than scores in float32; an engine that follows it is held to it.
        """
        module: Any = self.decoder.layers[layer].self_attn
        dtype, device = self.decoder.dtype, self.decoder.device
        visible = _visible(inputs.query_position, inputs.key_position, self.window(module)).to(device)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        q, k, v = (self._heads(x.to(device, dtype))[None] for x in (inputs.query, inputs.key, inputs.value))
        eager = self.decoder.library_function("eager_attention_forward")
        context: torch.Tensor = eager(module, q, k, v, mask[None, None], scaling=module.scaling)[0]
        return context[0].flatten(1)


def _visible(query_position: torch.Tensor, key_position: torch.Tensor, window: int | None) -> torch.Tensor:
    """[T, S] bool: which keys a query may see; a window of w sees itself and the w - 1 tokens before it."""
    distance = query_position[:, None] - key_position[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _attend(
    q_NTH: torch.Tensor, k_NSH: torch.Tensor, v_NSH: torch.Tensor, visible_TS: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of some queries and its two sensitivities (see `Replayer.attention`)."""
    scores = (q_NTH @ k_NSH.transpose(1, 2) * scale).masked_fill(~visible_TS, -torch.inf)
    p_NTS = functional.softmax(scores, dim=-1)
    o_NTH = p_NTS @ v_NSH
    v2_NS, p2_NTS = v_NSH.square().sum(-1), p_NTS.square()
    norm_T = o_NTH.square().sum(dim=(0, 2)).sqrt()
    amplification = (p2_NTS @ v2_NS[..., None]).sum(dim=(0, 2)).sqrt() / norm_T
    bound_NTS = q_NTH.norm(dim=-1)[..., None] * k_NSH.norm(dim=-1)[:, None] * scale
    spread_NTS = v2_NS[:, None] - 2 * o_NTH @ v_NSH.transpose(1, 2) + o_NTH.square().sum(-1)[..., None]
    sensitivity = (p2_NTS * bound_NTS.square() * spread_NTS).sum(dim=(0, 2)).clamp(min=0).sqrt() / norm_T
    return o_NTH.transpose(0, 1).flatten(1), amplification, sensitivity
