"""Measure the scheduler's host time for a step that decodes many requests.

    OMP_NUM_THREADS=1 python tests/benchmarks/scheduler_step.py [--num-seqs 256] [--num-steps 2000]

A step is `schedule()` and `advance()`, with the prefix cache on: no model, no sampling. Process time of one thread, so
that what else runs on the machine counts as little as it can. Steps in which blocks are allocated and published are
among those measured: every 16th step of a request with blocks of 16 tokens.
"""

import argparse
import time
from statistics import mean

import numpy as np

from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.prefix_cache import PrefixCache
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence
from reference_engine.scheduler import Scheduler

PROMPT_TOKENS = 100
BLOCK_SIZE = 16


def decoding(num_seqs: int, num_steps: int) -> Scheduler:
    """Return a scheduler whose requests, of lengths that differ, have all computed their prompts."""
    num_blocks = 2 + num_seqs * (-(-(PROMPT_TOKENS + BLOCK_SIZE + num_steps) // BLOCK_SIZE))
    blocks = BlockManager(BlockPool(num_blocks, BLOCK_SIZE, PrefixCache(BLOCK_SIZE)))
    scheduler = Scheduler(blocks, max_num_batched_tokens=8192, max_num_seqs=num_seqs)
    for request_id in range(num_seqs):
        # Lengths and tokens of their own: blocks fill up in different steps, and no prefix is shared.
        token_ids = [request_id] * (PROMPT_TOKENS + request_id % BLOCK_SIZE)
        params = SamplingParams(max_new_tokens=num_steps + 1)
        scheduler.add(
            Sequence(request_id=request_id, token_ids=token_ids, num_prompt_tokens=len(token_ids), params=params)
        )
    while scheduler.waiting or any(sequence.num_remaining_tokens > 1 for sequence in scheduler.running):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> float:
    """Run one step with token 1 sampled everywhere, and return the scheduler's part of it in us."""
    start = time.process_time_ns()
    chunks = scheduler.schedule()
    scheduled = time.process_time_ns()
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    advancing = time.process_time_ns()
    scheduler.advance(chunks)
    end = time.process_time_ns()
    for sequence in sampling:
        sequence.append(1)
    return (scheduled - start + end - advancing) / 1000


def main() -> None:
    """Print mean and quantiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=2000)
    arguments = parser.parse_args()
    scheduler = decoding(arguments.num_seqs, arguments.num_steps)
    times_us = [step(scheduler) for _ in range(arguments.num_steps)]
    low, median, high = np.quantile(times_us, (0.1, 0.5, 0.9))
    print(f"host time of a step of {arguments.num_seqs} sequences, {arguments.num_steps} steps:")
    print(f"median {median:.1f} us (10 % below {low:.1f}, 10 % above {high:.1f}), mean {mean(times_us):.1f}")


if __name__ == "__main__":
    main()
