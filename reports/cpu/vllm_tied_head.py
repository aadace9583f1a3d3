"""vLLM's Qwen3-Next leaves a tied head as it was allocated: its logits come from uninitialized memory.

    python reports/cpu/vllm_tied_head.py CHECKPOINT

CHECKPOINT: a Qwen3-Next with `tie_word_embeddings`, without `lm_head.weight`, and heads of 64 or 128 in its linear
attention, which is what the kernels for a CPU take. The harness is not used.
"""

import os
import sys

import torch
from vllm import LLM

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

engine = LLM(sys.argv[1], dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128)
model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
head, table = model.lm_head.weight.float(), model.model.embed_tokens.weight.float()
sys.stdout.write(f"tied {model.config.tie_word_embeddings}, the head is the table: {torch.equal(head, table)}\n")
for name, weight in (("head", head), ("table", table)):
    num_bad, largest = int((~weight.isfinite()).sum()), float(weight.nan_to_num().abs().max())
    sys.stdout.write(f"{name}: {num_bad} not finite, the largest other {largest}\n")
