"""Steps of the engine on a GPU, with random weights that are made there: no checkpoint is written or read.

    python -m tests.benchmarks.gpu_steps 'decode("qwen3-8b", [1, 16])' 'kernels("qwen3-8b")' 'workload("qwen3-0.6b")'

`harness bench engine` times the same beside its peers, and compares tokens first; this is for looking into the engine.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import reference_engine.model_runner
from harness.extensions.bench.peer import uneven_workload
from harness.extensions.bench.shape import SHAPES
from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.weights import LM_HEAD, TOKEN_EMBEDDING, weight_table
from reference_engine.fast import products
from reference_engine.launch import find_model
from reference_engine.parallel.ranks import Ranks

DEFAULTS: Mapping[str, Any] = {
    "dtype": "bfloat16", "device": "cuda", "attention_backend": "triton", "max_model_len": 2048, "max_num_seqs": 256,
}  # fmt: skip
PROMPT_LEN, NUM_TOKENS = 128, 64
RANK_PORT = 29517


def sizes(prompt_len: int, num_tokens: int) -> None:
    """Give all requests from now on other lengths."""
    global PROMPT_LEN, NUM_TOKENS
    PROMPT_LEN, NUM_TOKENS = prompt_len, num_tokens


def random_weights(_folder: object, config: ModelConfig, dtype: torch.dtype, device: torch.device, *_: Any) -> Any:
    """Stand in for `load_weights`: norms are 1, all else is normal with the deviation that checkpoints begin with."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in weight_table(config).values():  # rows of stacked parameters come in order
        shapes[place.parameter] = (place.row + place.shape[0], *place.shape[1:])
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        name: torch.ones(shape, dtype=dtype, device=device)
        if "norm" in name
        else torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }
    if config.tie_word_embeddings:
        weights[LM_HEAD] = weights[TOKEN_EMBEDDING]
    return weights


def opened(shape: str, **options: Any) -> LLMEngine:
    reference_engine.loader.load_weights = random_weights
    reference_engine.cache_spec.read_cache_scales = lambda *_: ()
    folder = tempfile.mkdtemp()
    SHAPES[shape].config().save_pretrained(folder)
    return LLMEngine(folder, EngineConfig(**{**DEFAULTS, **options}))


def add(engine: LLMEngine, batch_size: int, num_tokens: int) -> None:
    for request in range(batch_size):
        prompt = [(7 * request + position) % 500 + 5 for position in range(PROMPT_LEN)]
        engine.add_request(prompt, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))


def step_seconds(engine: LLMEngine, batch_size: int, num_tokens: int | None = None) -> tuple[float, float]:
    """Return the seconds of the first step, and of the median one of decode, when everything is warm."""
    num_tokens = num_tokens or NUM_TOKENS
    for _ in range(2):
        add(engine, batch_size, num_tokens)
        times = []
        while engine.has_unfinished():
            begin = time.perf_counter()
            num_outputs = len(engine.step())
            times.append((time.perf_counter() - begin, num_outputs))
    return times[0][0], median(seconds for seconds, num_outputs in times[1:] if num_outputs == batch_size)


def num_bytes(shape: str, batch_size: int, context_len: int) -> int:
    """Return what a decode step has to read: weights once, and the K and V of all requests."""
    sizes = SHAPES[shape]
    attention = sizes.hidden_size * sizes.head_dim * 2 * (sizes.num_heads + sizes.num_kv_heads)
    weights = (
        sizes.num_layers * (attention + 3 * sizes.hidden_size * sizes.ffn_size) + sizes.vocab_size * sizes.hidden_size
    )
    return 2 * (weights + batch_size * context_len * sizes.kv_elements_per_token)


def decode(shape: str, batch_sizes: list[int], **options: Any) -> None:
    """Time prefill and decode at some batch sizes."""
    with opened(shape, **options) as engine:
        for batch_size in batch_sizes:
            prefill_s, decode_s = step_seconds(engine, batch_size)
            moved = num_bytes(shape, batch_size, PROMPT_LEN + 32)
            print(
                f"{shape} {options} batch {batch_size}: {decode_s * 1e3:.3f} ms a step, {moved / 1e6:.0f} MB, "
                f"{moved / decode_s / 1e12:.3f} TB/s; first step {prefill_s * 1e3:.1f} ms",
                flush=True,
            )


def without_row_kernel() -> None:
    """Leave the product of one row to torch from now on."""
    products.MIN_ROW_ELEMENTS = 1 << 60


def kernels(shape: str, batch_size: int = 1, trace: str | None = None, **options: Any) -> None:
    """Show which kernels a step of decode is made of; `trace`, a file, gets a chrome trace of four steps."""
    with opened(shape, **options) as engine:
        step_seconds(engine, batch_size, 8)
        add(engine, batch_size, 40)
        for _ in range(6):
            engine.step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(4):
                engine.step()
            torch.cuda.synchronize()
        print(f"{shape} {options} batch {batch_size}, four steps")
        print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))
        if trace is not None:
            profiler.export_chrome_trace(trace)


def host(shape: str, batch_size: int = 256, **options: Any) -> None:
    """Show what the host does in a step of decode."""
    with opened(shape, **options) as engine:
        step_seconds(engine, batch_size, min(8, NUM_TOKENS))
        add(engine, batch_size, NUM_TOKENS)
        for _ in range(NUM_TOKENS // 3):
            engine.step()
        with cProfile.Profile() as profiler:
            for _ in range(NUM_TOKENS // 2):
                engine.step()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def workload(shape: str, num_requests: int | None = None, **options: Any) -> None:
    """Time the uneven workload of a shape, twice: the first time warms up."""
    sizes = SHAPES[shape]
    size = replace(sizes.uneven, num_requests=num_requests or sizes.uneven.num_requests)
    work = uneven_workload(size, vocab_size=sizes.vocab_size, seed=0)
    requests = list(zip(work.prompts, work.output_lens, strict=True))
    num_blocks = 1 + len(requests) + sum(len(prompt) + length for prompt, length in requests) // 16
    with opened(shape, num_blocks=num_blocks, **options) as engine:
        for _ in range(2):
            begin, num_steps = time.perf_counter(), 0
            for prompt, length in requests:
                engine.add_request(prompt, SamplingParams(max_new_tokens=length, ignore_eos=True))
            while engine.has_unfinished():
                engine.step()
                num_steps += 1
            seconds = time.perf_counter() - begin
            rate = work.num_output_tokens / seconds
            print(f"{shape} {options} {len(requests)} requests: {seconds:.2f} s, {rate:.0f} tok/s, {num_steps} steps")


def one_rank(device: str = "cuda") -> None:
    """Compare the tokens of a single rank, whose sums go through NCCL on a GPU, with those of an engine without."""
    folder, prompts = find_model("qwen3-tiny"), [[5, 6, 7], list(range(9, 40))]
    tokens = []
    for ranks in (None, Ranks.join(f"127.0.0.1:{RANK_PORT}", 0, 1, device)):
        with LLMEngine(folder, EngineConfig(device=device, dtype="float32"), ranks=ranks) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
        tokens.append([output.token_ids for output in outputs])
    backends = dist.get_backend(), dist.get_backend(ranks.tensors)
    dist.destroy_process_group()
    assert tokens[0] == tokens[1], tokens
    print(f"one rank, commands by {backends[0]} and sums by {backends[1]}: the same tokens")


if __name__ == "__main__":
    status = 0
    for call in sys.argv[1:]:
        try:
            eval(call)  # what stands on the command line: one of the functions above
        except Exception:  # the next call may still say something
            traceback.print_exc(file=sys.stdout)
            status = 1
    sys.exit(status)
