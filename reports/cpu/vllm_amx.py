"""vLLM's bfloat16 attention for AMX ends the process (SIGILL) if its first step has one token. No harness: vLLM alone.

    python reports/cpu/vllm_amx.py CHECKPOINT 1          # one token: SIGILL
    python reports/cpu/vllm_amx.py CHECKPOINT 32         # a longer first prompt: a product of oneDNN asks for AMX first
    python reports/cpu/vllm_amx.py CHECKPOINT 1 asked    # one token, and the process has asked the kernel for AMX

Linux gives a process AMX's tiles only when it has asked (arch_prctl, ARCH_REQ_XCOMP_PERM).
"""

import ctypes
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
from vllm import LLM, SamplingParams

if sys.argv[3:] == ["asked"]:
    ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
    assert ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0
llm = LLM(
    sys.argv[1], dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, block_size=32, max_model_len=64,
    kv_cache_memory_bytes=1 << 26,
)  # fmt: skip
prompt = {"prompt_token_ids": [0] * int(sys.argv[2])}
(output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, detokenize=False), use_tqdm=False)
print(f"{sys.argv[2:]} made {list(output.outputs[0].token_ids)}")
