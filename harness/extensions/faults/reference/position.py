"""Rotary embedding and positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reference_engine.model
import reference_engine.model_runner
import reference_engine.rope_types
from harness.extensions.faults.fault import FIRST, FIRST_DECODE, SECOND, Category, FaultConfig, table_of
from harness.extensions.faults.reference.injection import device_of, replacing
from reference_engine.rotary import RotaryEmbedding, rotate_half

CHUNK = 7
_Q_ROPE = "model.layers.0.q_rope"


def rotary(rotate: Callable[..., torch.Tensor]) -> Any:
    """Rotate heads by another function, of what is rotated and the tables of cosine and sine."""
    return replacing((reference_engine.model, "apply_rotary", lambda original, x, cos, sin: rotate(x, cos, sin)))


def _interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    cos, sin = (table[..., :half].repeat_interleave(2, dim=-1) for table in (cos, sin))
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def _partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first half of each head as if it were the whole head."""
    half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
    cos, sin = (torch.cat((table[..., :quarter],) * 2, dim=-1) for table in (cos, sin))
    turned, kept = x[..., :half], x[..., half:]
    return torch.cat((turned * cos + rotate_half(turned) * sin, kept), dim=-1)


def positions_changed(change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Any:
    """Change the positions that rotary sees: `change` gets them and the chunks of the step."""

    def make(build: Callable[..., Any], chunks: Any, *args: Any, **kwargs: Any) -> Any:
        batch = build(chunks, *args, **kwargs)
        with device_of(batch):
            return replace(batch, positions_T=change(batch.positions_T, chunks))

    return replacing((reference_engine.model_runner, "build_batch", make))


def per_row(chunks: Any, value: Callable[[Any], int]) -> torch.Tensor:
    """Return a number of each chunk, [T] int64, for every row of it."""
    return torch.tensor([value(chunk) for chunk in chunks for _ in range(chunk.num_tokens)])


def _without_chunk_offset(positions: torch.Tensor, chunks: Any) -> torch.Tensor:
    return positions - per_row(chunks, lambda chunk: 0 if chunk.is_decode else chunk.start)


def _across_the_batch(positions: torch.Tensor, chunks: Any) -> torch.Tensor:
    """The rows of a prefill are numbered through, from the first request's on."""
    return positions if chunks[0].is_decode else torch.arange(len(positions)) + positions[0]


def frequencies_changed(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """Change the frequencies of rotary: `change` gets the config and those that are right."""

    def make(init: Callable[..., None], self: Any, config: Any, *args: Any) -> None:
        init(self, config, *args)
        with device_of(self.inv_freq):
            self.inv_freq = change(config, self.inv_freq)

    return replacing((RotaryEmbedding, "__init__", make))


def _unscaled(config: Any, inv_freq: torch.Tensor) -> torch.Tensor:
    return reference_engine.rope_types.ROPE_TYPES["default"](config.rope, config.head_dim)[0]


def _of_theta_10000(config: Any, inv_freq: torch.Tensor) -> torch.Tensor:
    return reference_engine.rope_types.ROPE_TYPES["default"](replace(config.rope, theta=10_000.0), config.head_dim)[0]


def _coarse_table(call: Callable[..., Any], self: Any, positions: torch.Tensor) -> Any:
    return tuple(table.to(torch.bfloat16).to(table.dtype) for table in call(self, positions))


_fault = table_of(category=Category.POSITION, tap=_Q_ROPE, row=SECOND)
FAULTS = [
    _fault("rotary-interleaved", "Rotary turns neighbouring pairs instead of the halves of a head.",
           rotary(_interleaved), "interleaved", instance="shainet#111, vllm-metal#44"),
    _fault("rotary-backwards", "The sine has the wrong sign.",
           rotary(lambda x, cos, sin: x * cos - rotate_half(x) * sin), "sign of the sine"),
    _fault("rotary-skipped", "q and k are not rotated.", rotary(lambda x, cos, sin: x.clone()), "not applied"),
    _fault("rotary-partial", "Only half of each head is rotated.", rotary(_partial), "partial rotary",
           instance="vllm#29966"),
    _fault("position-decode-plus-one", "Decode counts the new token twice.",
           positions_changed(lambda at, chunks: at + per_row(chunks, lambda chunk: int(chunk.is_decode))),
           r"position.*\+1", row=FIRST_DECODE, instance="transformers#43082"),
    _fault("position-decode-minus-one", "Decode repeats the last position.",
           positions_changed(lambda at, chunks: at - per_row(chunks, lambda chunk: int(chunk.is_decode))),
           "position.*-1", row=FIRST_DECODE),
    _fault("position-chunk-offset", "Every chunk of a prompt starts at position 0.",
           positions_changed(_without_chunk_offset), "chunk", row=(0, CHUNK),
           setting=FaultConfig(schedule=f"chunked:{CHUNK}"), instance="mlx-node#33"),
    _fault("position-constant-plus-one",
           "All positions are one too high: outputs are nearly equal, the rotated keys are not.",
           positions_changed(lambda at, chunks: at + 1), r"position.*\+1", row=FIRST),
    _fault("position-across-batch", "The second request's positions go on from the first one's.",
           positions_changed(_across_the_batch), "batch", row=(1, 0)),
    _fault("rope-scaling-ignored", "The llama3 scaling of the frequencies is not applied.",
           frequencies_changed(_unscaled), "scaling.*ignored", setting=FaultConfig(model="llama-tiny"),
           instance="vllm#1956, mlx-vlm#1710"),
    _fault("rope-theta", "The base is 10000 whatever config.json says.", frequencies_changed(_of_theta_10000),
           "theta: 10000 ", instance="sglang#14745"),
    _fault("rope-table-bf16", "Cosine and sine are kept in bfloat16.",
           replacing((RotaryEmbedding, "__call__", _coarse_table)), "cos/sin table in bfloat16",
           instance="gpt-neox#1003"),
]  # fmt: skip
