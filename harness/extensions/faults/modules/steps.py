"""Faults of steps."""

from typing import Any

from harness.extensions.faults.fault import Category, EngineKind, Fault
from harness.extensions.faults.modules.declaring import (
    BF16,
    F16,
    HEADS,
    MASK,
    ORDER,
    POSITION,
    PROMPT,
    ROTARY,
    SCALE,
    declaring,
)
from harness.extensions.faults.modules.norms import WEIGHT

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.CACHE, EngineKind.STEP)


LAYER_0 = r"layers\.0\..*"


def stepped(wrong: str, what: str, where: str, row: int | None, says: str | None, **more: Any) -> None:
    fault("gpt_neox", f"own-{wrong}", what, where, row, says, wrong, **more)


stepped(
    "whole-head", "the whole head is rotated instead of a quarter", LAYER_0 + "(rope|attention|context|cache|dense)",
    1, ROTARY + "|partial",
)  # fmt: skip
stepped(
    "fused-by-part", "rows of the fused product are read by part instead of by head", LAYER_0, 0, ORDER + "|head|part",
    dtype=BF16, schedule="chunked:11",
)  # fmt: skip
stepped(
    "chunk-positions", "positions begin anew in each chunk", LAYER_0 + "(rope|attention|context|cache|dense)", 7,
    POSITION + "|" + ROTARY, schedule="chunked:7",
)  # fmt: skip
stepped(
    "decode-position", "queries of decode are rotated by the position before",
    LAYER_0 + "(rope|attention|context|dense)", PROMPT, POSITION + "|" + ROTARY, schedule="batched",
)  # fmt: skip
stepped(
    "block-boundary", "the first slot of the third block is not written: its key goes into the slot before", LAYER_0,
    None, "slot|position|key|cache|block|place|written", request=None,
)  # fmt: skip
stepped(
    "pages-of-layer-0", "layer 1 stores into the pages of layer 0",
    r"layers\.0\..*cache|layers\.\d\..*(attention|context|cache|dense)", None,
    "layer|cache|slot|key|block|place|position|history", request=None,
)  # fmt: skip
stepped(
    "value-heads-rolled", "values are stored under the next head", LAYER_0 + "(cache|attention|context|dense|value)",
    0, HEADS, dtype=F16, schedule="chunked:11",
)  # fmt: skip
stepped(
    "table-of-the-first", "every request reads by the first one's block table", LAYER_0 + "(attention|context|dense)",
    None, "request|table|block|slot|place|position|history", schedule="batched", request=None,
)  # fmt: skip
stepped("strict-mask", "no token but the first sees itself", LAYER_0 + "(attention|context|dense)", 1, MASK, dtype=BF16)
stepped("scale", "scores are scaled by 1/sqrt(hidden size)", LAYER_0 + "(attention|context|dense)", 1, SCALE)
stepped("eps", "the eps of a norm is 1e-3", r"layers\.0\.input_layernorm", 0, "eps")
stepped("dense-bias", "a bias is left out", r"layers\.0\.attention\.dense", 0, "bias", dtype=F16, schedule="chunked:11")
stepped(
    "sequential", "the residuals are sequential", r"layers\.0\.(post_attention_layernorm.*|mlp.*)", 0,
    "residual|parallel|sequential|input|attention",
)  # fmt: skip
stepped("gelu", "GELU by its tanh formula", r"layers\.0\.mlp\..*", 0, "tanh|gelu|GELU|activation")
stepped("stale-layer", "layer 1 was loaded with layer 0's weights", r"layers\.1\.input_layernorm", 0, "layer|" + WEIGHT)
stepped(
    "final-norm-bias", "the bias of the last norm is left out", r"final_layer_norm", None, "bias", request=None,
    dtype=BF16,
)  # fmt: skip
stepped("head-tied", "the head is the embedding", r"lm_head|embed_out", None, "embed|tied|weight", request=None)
stepped(
    "head-rolled", "rows of the head are one off", r"lm_head|embed_out", None, ORDER + "|off by|shift|token",
    request=None,
)  # fmt: skip
stepped(
    "logits-of-the-row-before", "logits are those of the row before", r"lm_head|embed_out|logits|final_layer_norm",
    None, "row|token|position|other", request=None, schedule="chunked:7",
)  # fmt: skip
