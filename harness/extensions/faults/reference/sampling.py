"""Faults of sampling: the row, and the numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reference_engine.checkpoint.model_config
import reference_engine.layers
import reference_engine.model
import reference_engine.model_runner
import reference_engine.sampler
from harness.extensions.faults.fault import (
    FIRST,
    FIRST_SAMPLED,
    Category,
    FaultConfig,
    sampling_suite,
    stopping_suite,
    table_of,
)
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.norm import edited_layers
from reference_engine.layers import Linear
from reference_engine.model import Decoder


def _sampling_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """In a prefill, the rows whose logits are taken are others."""

    def make(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = build(*args, **kwargs)
        if batch.sampled_rows_ is None:
            return batch
        return replace(batch, sampled_rows_=change(batch.sampled_rows_))

    return replacing((reference_engine.model_runner, "build_batch", make))


def _coarse_logits(logits: Callable[..., Any], self: Decoder, x: torch.Tensor, batch: Any) -> Any:
    head = self.lm_head
    wrong = replace(self, lm_head=lambda rows: head(rows).to(torch.bfloat16).to(rows.dtype))
    return logits(wrong, x, batch)


def _second_best(sample: Callable[..., Any], logits: torch.Tensor, sequences: Any) -> Any:
    return replace(sample(logits, sequences), token_ids=logits.topk(2).indices[:, 1].tolist())


def _first_of_the_list(read: Callable[..., frozenset[int]], generation: Any, config: Any, where: Any) -> frozenset[int]:
    """Of several end-of-sequence tokens the first one counts."""
    eos = generation.get("eos_token_id")
    return read({"eos_token_id": eos[0]} if isinstance(eos, list) else generation, config, where)


def _with_params(change: Callable[[Any], Any]) -> Any:
    """Change the parameters that the sets of allowed tokens are made from."""

    def make(allowed: Callable[..., torch.Tensor], scores: Any, params: Any) -> torch.Tensor:
        return allowed(scores, [change(request) for request in params])

    return replacing((reference_engine.sampler, "allowed_tokens", make))


def _seeds_of_the_batch(uniforms: Callable[..., Any], seeds: Any, indices: Any) -> Any:
    """The draws of a row depend on how many rows stand beside it."""
    return uniforms([seed + len(seeds) for seed in seeds], indices)


def _draws_again(sample: Callable[..., Any], seeds: Any, indices: Any) -> Any:
    """Every token of a request is drawn with the same number."""
    return sample([0 for _ in seeds], [0 for _ in indices])


class _HalfAccumulation:
    """A product whose sums are kept in float16."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(torch.float16).to(x.dtype)).to(torch.float16).to(x.dtype)


def _half_accumulation(layer: Any) -> Any:
    return replace(layer, mlp=replace(layer.mlp, down_proj=_HalfAccumulation(layer.mlp.down_proj)))


_fault = table_of(category=Category.SAMPLING, tap=None, row=FIRST_SAMPLED)
_NO_SUCH_SET = "which is none of|is in the set"
_DOWN_PROJ = "model.layers.0.mlp.down_proj"
_OVERFLOWING = FaultConfig(scaled={"model.layers.0.mlp.up_proj.weight": 1e7})
FAULTS = [
    _fault("logits-of-the-row-before", "The first token is sampled from the last row but one of the prompt.",
           _sampling_rows(lambda rows: (rows - 1).clamp(min=0)), "another token, -1 positions away", "lm_head"),
    _fault("logits-of-the-last-row", "The first token of every request is sampled from the last row of the batch.",
           _sampling_rows(lambda rows: rows.max().expand_as(rows)), "another token", "lm_head"),
    _fault("second-best-token", "Temperature 0 does not give the most likely token.",
           replacing((reference_engine.model_runner, "sample", _second_best)), "second largest", "lm_head"),
    _fault("eos-list-cut", "Of a list of end-of-sequence tokens only the first ends a request.",
           replacing((reference_engine.checkpoint.model_config, "_eos_token_ids", _first_of_the_list)), "the end is",
           suite=stopping_suite, instance="vllm#4182"),
    _fault("top-k-off-by-one", "One token more than top-k may be drawn.",
           _with_params(lambda params: replace(params, top_k=params.top_k and params.top_k + 1)), _NO_SUCH_SET,
           suite=sampling_suite),
    _fault("top-p-ignored", "Top-p is not applied.", _with_params(lambda params: replace(params, top_p=1.0)),
           _NO_SUCH_SET, suite=sampling_suite),
    _fault("min-p-ignored", "Min-p is not applied.", _with_params(lambda params: replace(params, min_p=0.0)),
           _NO_SUCH_SET, suite=sampling_suite),
    _fault("seed-of-the-batch", "What a request draws depends on its batch mates.",
           replacing((reference_engine.sampler, "uniforms", _seeds_of_the_batch)), "in the batch|same in any batch",
           suite=sampling_suite, instance="vllm#51226"),
    _fault("seed-ignored", "All requests draw the same number.",
           replacing((reference_engine.sampler, "uniforms", _draws_again)), "as often as|chi-square",
           suite=sampling_suite),
    _fault("logits-bf16", "Logits are rounded to bfloat16.", replacing((Decoder, "logits", _coarse_logits)),
           "rounded to bfloat16", "lm_head", category=Category.NUMBERS),
    _fault("product-fp16", "A matrix product takes and gives float16.", edited_layers(_half_accumulation), "float16",
           _DOWN_PROJ, category=Category.NUMBERS, row=FIRST),
    _fault("product-overflow-fp16",
           "A matrix product takes and gives float16, and what it takes is larger than float16 can hold.",
           edited_layers(_half_accumulation), "overflow of float16", _DOWN_PROJ, category=Category.NUMBERS, row=FIRST,
           setting=_OVERFLOWING),
]  # fmt: skip
