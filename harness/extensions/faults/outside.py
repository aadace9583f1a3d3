"""Orders of rounding just outside of a convention: nearly legitimate, and wrong."""

from functools import partial

import torch

from harness.base.numerics import Numerics
from harness.extensions.faults.conventions import (
    coarse_cache,
    norms_in_order,
    patched_attention,
    products,
    quantised_inputs,
    rounded_inputs,
    scaled_first,
)
from harness.extensions.faults.fault import FIRST, SECOND, Category, table_of
from harness.extensions.faults.norm import edited_layers
from harness.extensions.faults.position import frequencies_changed

_SITES = ("input_layernorm", "self_attn.q_proj", "q_rope", "k_cache", "attention")
_NORM, _Q_PROJ, _Q_ROPE, _K_CACHE, _ATTENTION = (f"model.layers.0.{site}" for site in _SITES)


_fault = table_of(category=Category.NUMBERS, tap=_Q_PROJ, row=FIRST)
FAULTS = [
    _fault("inputs-bf16-of-fp32-weights", "Inputs are rounded to bfloat16, and the weights are float32.",
           products(partial(rounded_inputs, torch.bfloat16)), "input of the product is rounded to bfloat16"),
    _fault("inputs-fp16-of-bf16-weights", "Inputs are rounded to float16, and the weights are bfloat16.",
           products(partial(rounded_inputs, torch.float16)), "inputs? .*float16", weights_in="bfloat16"),
    _fault("inputs-q8-undeclared", "Inputs are quantised in blocks of 32, and the engine says nothing of it.",
           products(partial(quantised_inputs, 32)), "input.*int8.*for 32 inputs", weights_in="Q8_0"),
    _fault("inputs-q8-blocks-of-16", "Inputs are quantised in blocks of 16 where Q8_0 has blocks of 32.",
           products(partial(quantised_inputs, 16)), "input.*int8.*for 16 inputs", weights_in="Q8_0",
           numerics=Numerics(weights=("Q8_0",))),
    _fault("rope-frequencies-fp16", "The frequencies are kept in float16.",
           frequencies_changed(lambda config, inv_freq: inv_freq.half().float()), "frequencies in float16",
           tap=_Q_ROPE, row=SECOND),
    _fault("rope-frequencies-off-by-1e-6", "The frequencies are too high by a part in a million.",
           frequencies_changed(lambda config, inv_freq: inv_freq * (1 + 1e-6)),
           "frequencies are off by a factor of 1.000001", tap=_Q_ROPE, row=SECOND),
    _fault("squares-summed-in-order-and-large", "The squares are summed in order, and the norm is too large by 4e-6.",
           edited_layers(norms_in_order(1 + 4e-6)), "constant gain", tap=_NORM),
    _fault("queries-scaled-first-and-large", "The queries are scaled in bfloat16, by 1.25 times the scale.",
           patched_attention(scaled_first(torch.bfloat16, 1.25), lambda x: x), "softmax scale", tap=_ATTENTION,
           row=SECOND, dtype="bfloat16"),
    _fault("cache-bf16-declared-fp16", "The cache is declared to be float16, and is bfloat16.",
           coarse_cache(torch.bfloat16), "lower dtype: bfloat16", tap=_K_CACHE, numerics=Numerics(cache="float16")),
]  # fmt: skip
