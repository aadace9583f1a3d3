"""SGLang 0.5.23 alone: a tied Qwen3-MoE has no head. Prints 0.0, where the head should be the embedding.

PYTHONPATH=docs/adapters/sglang python reports/cpu/sglang_tied_head.py cases/checkpoints/qwen3-moe-tiny
"""

import sys

import cpu  # noqa: F401  # before SGLang: there is no kernel on a CPU
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, ServerArgs

if __name__ == "__main__":
    arguments = ServerArgs(
        model_path=sys.argv[1], dtype="float32", device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", skip_tokenizer_init=True, max_total_tokens=4096, mem_fraction_static=0.1,
        log_level="error",
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    model = Scheduler(arguments, PortArgs.init_new(arguments)).tp_worker.model_runner.model
    print("tied:", model.config.tie_word_embeddings, "largest weight of the embedding:",
          float(model.model.embed_tokens.weight.abs().max()), "of the head:", float(model.lm_head.weight.abs().max()))  # fmt: skip
