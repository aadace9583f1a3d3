"""One part of an operation that is wrong: a side of a sum, pairs of a head, keys or values alone, rows of a weight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from harness.extensions.faults.fault import FIRST, FIRST_SAMPLED, SECOND, Category, Fault, Row, table_of
from harness.extensions.faults.reference.attention import everywhere
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.norm import branches
from harness.extensions.faults.reference.position import frequencies_changed, positions_changed, rotary
from harness.extensions.faults.reference.weights import Weights, loaded
from reference_engine.batch import Batch
from reference_engine.model import Decoder
from reference_engine.rotary import rotate_half

_LAYER = "model.layers.0."
_LENGTH = 16
"""Positions of a table that is too short."""


def _next(num_heads: int, num_kv: int) -> torch.Tensor:
    """Return the KV head after the one that each query head should read."""
    return (torch.arange(num_heads) // (num_heads // num_kv) + 1) % num_kv


def _grouped(num_heads: int, num_kv: int) -> torch.Tensor:
    return torch.arange(num_heads) // (num_heads // num_kv)


def _capped(cap: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Softmax of scores under a soft cap; masked ones stay masked."""
    return lambda scores: torch.where(scores.isinf(), scores, cap * torch.tanh(scores / cap)).softmax(dim=-1)


def _with_sinks(scores_NTC: torch.Tensor) -> torch.Tensor:
    sinks = torch.linspace(0.5, 2.5, len(scores_NTC))[:, None, None].expand(*scores_NTC.shape[:2], 1)
    return torch.cat((scores_NTC, sinks), dim=-1).softmax(dim=-1)[..., :-1]


def _slow_half_zero(config: Any, inv_freq: torch.Tensor) -> torch.Tensor:
    """The slower half of the frequencies is zero."""
    return torch.where(torch.arange(len(inv_freq)) < len(inv_freq) // 2, inv_freq, 0.0)


def _logits_capped(cap: float) -> Any:
    """Put a soft cap after the head's product."""

    def make(original: Callable[..., torch.Tensor], self: Decoder, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        def head(rows_RD: torch.Tensor) -> torch.Tensor:
            return cap * torch.tanh(self.lm_head(rows_RD) / cap)

        return original(replace(self, lm_head=head), x_TD, batch)

    return replacing((Decoder, "logits", make))


def _rows_changed(ending: str, change: Callable[[torch.Tensor], None]) -> Any:
    """Change rows of one weight of layer 1 in place."""

    def changed(weights: Weights, _config: Any) -> None:
        name = f"model.layers.1.{ending}.weight"
        weights[name] = weights[name].clone()
        change(weights[name])

    return loaded(changed)


def _row_not_loaded(weight_OI: torch.Tensor) -> None:
    weight_OI[17] = 0


def _head_negated(weight_OI: torch.Tensor) -> None:
    weight_OI[:32] *= -1


def _rows_scaled(weight_OI: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_OI *= (1 + 0.1 * torch.randn(len(weight_OI), generator=generator)).to(weight_OI)[:, None]


_part = table_of(row=FIRST)


def _fault(
    id: str, category: Category, summary: str, inject: Any, cause: str, tap: str, *row: Row, **rest: Any
) -> Fault:
    place = tap if tap.startswith(("model.", "lm_head")) else _LAYER + tap
    return _part(id, summary, inject, cause, place, *row, category=category, **rest)


_BF16: dict[str, Any] = {"dtype": "bfloat16"}
_FP16: dict[str, Any] = {"dtype": "float16"}
_LLAMA: dict[str, Any] = {"model": "llama-tiny"}
_NORM, _POSITION, _ATTENTION, _WEIGHTS, _NUMBERS = (
    Category.NORM, Category.POSITION, Category.ATTENTION, Category.WEIGHTS, Category.NUMBERS,
)  # fmt: skip
FAULTS = [
    _fault("stream-scaled", _NORM, "The stream is added with a factor of 0.9.", branches(lambda x, y: 0.9 * x + y),
           "^the residual is added with a factor of 0.9[;:]", "output"),
    _fault("stream-scaled-in-bfloat16", _NORM, "The stream is halved before the branch is added to it.",
           branches(lambda x, y: x / 2 + y), "^the residual is added with a factor of 0.5[;:]", "output", **_BF16),
    _fault("both-sides-scaled", _NORM, "Stream and branch are added with factors of their own.",
           branches(lambda x, y: 0.7 * x + 1.3 * y), "factor of 0.7, and the branch with one of 1.3", "output",
           **_FP16),
    _fault("sum-cut-off", _NUMBERS, "The stream is cut off at one.", branches(lambda x, y: (x + y).clamp(-1, 1)),
           "values outside of -1 to 1 are cut off", "output", **_LLAMA),
    _fault("values-of-the-next-head", _ATTENTION, "Query heads read the values of the next KV head.",
           everywhere(value_heads=_next), "the values of the wrong KV heads", "attention"),
    _fault("values-of-the-next-head-in-bfloat16", _ATTENTION, "Query heads read the values of the next KV head.",
           everywhere(value_heads=_next), "the values of the wrong KV heads", "attention", schedule="chunked:7",
           **_BF16, **_LLAMA),
    _fault("keys-of-the-next-head", _ATTENTION, "Query heads read the keys of the next KV head.",
           everywhere(heads=_next, value_heads=_grouped), "the keys of the wrong KV heads", "attention", SECOND,
           **_FP16),
    _fault("soft-cap-added", _ATTENTION, "The scores have a soft cap.", everywhere(softmax=_capped(3.0)),
           "a soft cap of 3 is applied to the scores", "attention", SECOND),
    _fault("soft-cap-added-in-bfloat16", _ATTENTION, "The scores have a soft cap.", everywhere(softmax=_capped(2.0)),
           "a soft cap of (1.9|2)[0-9.]* is applied to the scores", "attention", SECOND, schedule="prefix-hit",
           **_BF16),
    _fault("sinks-added", _ATTENTION, "Every head has an attention sink.", everywhere(softmax=_with_sinks),
           "attention sinks take part", "attention", **_FP16),
    _fault("slow-pairs-not-turned", _POSITION, "The slower half of the frequencies is zero.",
           frequencies_changed(_slow_half_zero), "pairs of a head do not turn.*pairs 8 to 15", "q_rope", SECOND),
    _fault("slow-pairs-not-turned-in-float16", _POSITION, "The slower half of the frequencies is zero.",
           frequencies_changed(_slow_half_zero), "pairs of a head do not turn", "q_rope",
           (0, None),  # the fastest of them turns by 0.00125 a position: 2.6 roundings
           **_FP16, **_LLAMA),
    _fault("frequencies-reversed", _POSITION, "The last pair turns fastest.",
           frequencies_changed(lambda config, inv_freq: inv_freq.flip(0)), "frequencies of the pairs are in another",
           "q_rope", SECOND),
    _fault("sine-missing", _POSITION, "Only the cosine is applied.",
           rotary(lambda x, cos, sin: x * cos), "sine is left out",
           "q_rope", SECOND, **_FP16),
    _fault("cosine-and-sine-exchanged", _POSITION, "Cosine and sine stand in each other's place.",
           rotary(lambda x, cos, sin: x * sin + rotate_half(x) * cos),
           "cosine and sine of the rotary table are exchanged", "q_rope", **_BF16),
    _fault("positions-stop", _POSITION, "Rows after the end of a table take its last line.",
           positions_changed(lambda positions, chunks: positions.clamp(max=_LENGTH - 1)), "positions stop at 15",
           "q_rope", (0, _LENGTH)),
    _fault("positions-begin-again", _POSITION, "Rows after the end of a table take its first lines again.",
           positions_changed(lambda positions, chunks: positions % _LENGTH), "taken modulo 16", "q_rope",
           (0, _LENGTH), schedule="chunked:7", **_BF16),
    _fault("row-of-a-weight-zero", _WEIGHTS, "One row of a weight is zero.",
           _rows_changed("mlp.down_proj", _row_not_loaded), "some outputs are zero.*outputs 17: 1 of",
           "model.layers.1.mlp.down_proj"),
    _fault("row-of-a-weight-zero-in-bfloat16", _WEIGHTS, "One row of a weight is zero.",
           _rows_changed("mlp.down_proj", _row_not_loaded), "some outputs are zero.*outputs 17: 1 of",
           "model.layers.1.mlp.down_proj", **_BF16),
    _fault("head-negated", _WEIGHTS, "The rows of one head have the other sign.",
           _rows_changed("self_attn.qkv_proj", _head_negated), "other sign.*32 of", "model.layers.1.self_attn.q_proj",
           **_FP16),
    _fault("scales-of-rows", _WEIGHTS, "Every row of a weight has another scale.",
           _rows_changed("mlp.down_proj", _rows_scaled), "scaled by a factor of its own",
           "model.layers.1.mlp.down_proj"),
    _fault("logits-capped", _NUMBERS, "The logits have a soft cap.", _logits_capped(15.0),
           "a soft cap of 15 is applied", "lm_head", FIRST_SAMPLED),
]  # fmt: skip
