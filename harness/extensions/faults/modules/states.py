"""Faults of states."""

from collections.abc import Callable
from typing import Any

import torch

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import Plant, cache, inputs, weight, weight_of
from harness.extensions.faults.modules.declaring import BF16, CHUNK, ORDER, PROMPT, ROUND, STATE, declaring

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.STATES)


CONV = r"layers\.0\.(mixer|mamba|linear_attn|conv)\.?.*"


def held(change: Callable[[torch.Tensor], torch.Tensor], which: str = "recurrent") -> Plant:
    def get(inner: Any, *args: Any, **named: Any) -> Any:
        state = inner(*args, **named)
        return None if state is None else state.copy_(change(state))

    return cache(**{f"get_{which}_state": get})


fault(
    "mamba", "conv-state-shifted", "the state of the convolution is one token late", CONV, PROMPT,
    "conv|state|shift|token", held(lambda x: x.roll(1, -1), "conv"),
)  # fmt: skip
fault(
    "mamba", "state-bfloat16", "the state is kept in bfloat16", CONV, PROMPT, ROUND + "|state",
    held(lambda x: x.bfloat16().to(x.dtype)),
)  # fmt: skip
fault(
    "mamba2", "conv-state-lost", "the convolution begins anew in each chunk", CONV, 7, CHUNK + "|conv",
    held(lambda x: 0 * x, "conv"), schedule="chunked:7",
)  # fmt: skip
fault(
    "mamba2", "skip-dropped", "the skip D x is left out", r"layers\.0\.mixer.*", 0, "skip|D",
    weight("backbone.layers.0.mixer.D", lambda x: 0 * x),
)  # fmt: skip
fault(
    "mamba2", "dt-bias-dropped", "dt_bias is left out", r"layers\.0\.mixer.*", 0, "dt|step|bias",
    weight("backbone.layers.0.mixer.dt_bias", lambda x: 0 * x), dtype=BF16,
)  # fmt: skip
fault(
    "mamba2", "state-lost", "the state begins anew in each chunk", CONV, 7, CHUNK, held(lambda x: 0 * x),
    schedule="chunked:7",
)  # fmt: skip
fault(
    "falcon_h1", "decay-heads-reversed", "the decays of the heads are in reverse order", r"layers\.0\.mamba.*", 1,
    "decay|A_log|head|A", weight("model.layers.0.mamba.A_log", lambda x: x.flip(0)),
)  # fmt: skip
fault(
    "zamba2", "b-and-c-exchanged", "B and C are exchanged in the fused product", r"layers\.0\.mamba\.in_proj", 0,
    ORDER,
    weight("model.layers.0.mamba.in_proj.weight", lambda w: torch.cat([w[:256], w[272:288], w[256:272], w[288:]])),
    dtype=BF16, schedule="chunked:11",
)  # fmt: skip
fault(
    "recurrent_gemma",
    "decay-of-the-next-layer",
    "the decay is the next layer's",
    r"layers\.0\.temporal_block\.rg_lru",
    1,
    "decay|layer|weight|param|recurrent",
    weight_of(
        "model.layers.0.temporal_block.rg_lru.recurrent_param", "model.layers.1.temporal_block.rg_lru.recurrent_param"
    ),
)
fault(
    "recurrent_gemma",
    "state-forgotten-in-decode",
    "decode begins with a state of zero",
    r"layers\.0\.temporal_block\.rg_lru",
    PROMPT,
    STATE,
    lambda model: inputs(
        "model.layers.0.temporal_block.rg_lru",
        lambda x: (
            [setattr(model.model.layers[0].temporal_block.rg_lru, "recurrent_states", None), x][1]
            if x.shape[1] == 1
            else x
        ),
        "activations",
    )(model),
)
fault(
    "qwen3_next", "state-bfloat16", "the state is kept in bfloat16", CONV, PROMPT, ROUND + "|state",
    held(lambda x: x.bfloat16().to(x.dtype)),
)  # fmt: skip
fault(
    "qwen3_next", "conv-state-lost", "the convolution begins anew in each chunk", CONV, 7, CHUNK + "|conv",
    held(lambda x: 0 * x, "conv"), schedule="chunked:7", dtype=BF16,
)  # fmt: skip
fault(
    "jamba", "b-and-c-exchanged", "B and C are exchanged in x_proj", r"layers\.0\.mamba\.x_proj", 0, ORDER,
    weight("model.layers.0.mamba.x_proj.weight", lambda w: torch.cat([w[:4], w[20:36], w[4:20]])),
    schedule="chunked:11",
)  # fmt: skip
fault(
    "lfm2", "kernel-reversed", "the kernel of the convolution is in reverse order", r"layers\.0\.conv.*", 0,
    "kernel|revers|order|flip|conv", weight("model.layers.0.conv.conv.weight", lambda w: w.flip(-1)),
)  # fmt: skip
fault(
    "bamba", "state-doubled", "the state is added twice on the way from prefill to decode", CONV, PROMPT,
    STATE + "|decay|twice|factor", held(lambda x: 2 * x), dtype=BF16,
)  # fmt: skip


def faster_slopes(model: Any) -> None:
    module = model.model.layers[1].self_attn
    module.slope_rate = 2 * module.slope_rate
    module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)


fault(
    "minimax", "slopes-doubled", "the decay of linear attention is twice as fast", r"layers\.1\.self_attn.*", 1,
    "decay|slope|state", faster_slopes,
)  # fmt: skip
