"""vLLM 0.32's synchronous client waits without end for an engine core that was killed. Needs vLLM, nothing of ours."""

import os
import signal
import tempfile
import threading
import time

from transformers import LlamaConfig, LlamaForCausalLM
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

SECONDS = 60
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the core's worker is in its own process; the core is not in ours


def main():
    folder = tempfile.mkdtemp()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    args = EngineArgs(folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    engine.add_request("0", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=40, detokenize=False))
    (core,) = engine.engine_core.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGKILL)

    def give_up():
        time.sleep(SECONDS)
        print(f"step() has not returned {SECONDS} s after the engine core was killed", flush=True)
        os._exit(1)

    threading.Thread(target=give_up, daemon=True).start()
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    main()
