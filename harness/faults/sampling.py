"""Which row a token is sampled from, and in what numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reference_engine.layers
import reference_engine.model
import reference_engine.model_runner
from harness.faults.fault import FIRST, FIRST_SAMPLED, Category, Fault, Setting
from harness.faults.norm import edited_layers
from harness.faults.plant import replacing
from reference_engine.layers import Linear
from reference_engine.model import Decoder


def _row_before(build: Callable[..., Any]) -> Callable[..., Any]:
    """In a prefill, the logits are those of the row before the last."""

    def built(*args: Any, **kwargs: Any) -> Any:
        batch = build(*args, **kwargs)
        if batch.sampled_rows_ is None:
            return batch
        return replace(batch, sampled_rows_=(batch.sampled_rows_ - 1).clamp(min=0))

    return built


def _coarse_logits(logits: Callable[..., Any]) -> Callable[..., Any]:
    def computed(self: Decoder, x: torch.Tensor, batch: Any) -> Any:
        head = self.lm_head
        wrong = replace(self, lm_head=lambda rows: head(rows).to(torch.bfloat16).to(rows.dtype))  # type: ignore[arg-type]
        return logits(wrong, x, batch)

    return computed


def _second_best(sample: Callable[..., Any]) -> Callable[..., Any]:
    def sampled(logits: torch.Tensor, sequences: Any) -> Any:
        return replace(sample(logits, sequences), token_ids=logits.topk(2).indices[:, 1].tolist())

    return sampled


class _HalfAccumulation:
    """A product whose sums are kept in float16."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(torch.float16).to(x.dtype)).to(torch.float16).to(x.dtype)


def _half_accumulation(layer: Any) -> Any:
    return replace(layer, mlp=replace(layer.mlp, down_proj=_HalfAccumulation(layer.mlp.down_proj)))


FAULTS = [
    Fault(
        id="logits-of-the-row-before",
        category=Category.SAMPLING,
        summary="The first token is sampled from the last row but one of the prompt.",
        plant=replacing((reference_engine.model_runner, "build_batch", _row_before)),
        tap="lm_head",
        row=FIRST_SAMPLED,
        cause="another token|row",
    ),
    Fault(
        id="second-best-token",
        category=Category.SAMPLING,
        summary="Temperature 0 does not give the most likely token.",
        plant=replacing((reference_engine.model_runner, "sample", _second_best)),
        tap="lm_head",
        row=FIRST_SAMPLED,
        cause="second|runner-up|rank",
    ),
    Fault(
        id="logits-bf16",
        category=Category.NUMBERS,
        summary="Logits are rounded to bfloat16.",
        plant=replacing((Decoder, "_logits", _coarse_logits)),
        tap="lm_head",
        row=FIRST_SAMPLED,
        cause="bfloat16",
    ),
    Fault(
        id="product-fp16",
        category=Category.NUMBERS,
        summary="A matrix product takes and gives float16.",
        plant=edited_layers(_half_accumulation),
        tap="model.layers.0.mlp.down_proj",
        row=FIRST,
        cause="float16",
        setting=Setting(),
    ),
]
