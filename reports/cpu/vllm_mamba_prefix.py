"""vLLM's CPU build ends with an IndexError where a prefix of Mamba-2 layers would be kept: no prompt may fill a block.

    python reports/cpu/vllm_mamba_prefix.py float32

A random Falcon-H1 of two layers, no part of the harness. With prefix caching, vLLM 0.32 keeps the recurrent state at the end of each
block of a prompt; its kernels for CPUs return the last state alone (`mamba_mixer2.py`, `conv_ssm_forward`: `varlen_states[...]`).
"""

import os
import sys
import tempfile

os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from transformers import FalconH1Config, FalconH1ForCausalLM
from vllm import LLM, SamplingParams

config = FalconH1Config(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
    mamba_d_state=16, mamba_chunk_size=16, max_position_embeddings=512,
)  # fmt: skip
torch.manual_seed(0)
for caches in (False, True):
    with tempfile.TemporaryDirectory() as folder:
        FalconH1ForCausalLM(config).save_pretrained(folder)
        llm = LLM(
            folder, dtype=sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=caches,
            kv_cache_memory_bytes=1 << 28, gpu_memory_utilization=0.01, block_size=32, max_model_len=512,
        )  # fmt: skip
        block = llm.llm_engine.vllm_config.cache_config.block_size
        for length in (block - 1, block + 1):
            prompt = {"prompt_token_ids": [3 + at % 250 for at in range(length)]}
            try:
                (output,) = llm.generate(
                    [prompt], SamplingParams(max_tokens=4, temperature=0, detokenize=False), use_tqdm=False
                )
                outcome = list(output.outputs[0].token_ids)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            print(f"prefix caching {caches}, blocks of {block}, a prompt of {length} tokens: {outcome}")
        del llm
