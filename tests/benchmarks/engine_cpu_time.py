"""CPU time of one thread, engine by engine in turn: comparable where other work shares the machine.

    OMP_NUM_THREADS=1 python tests/benchmarks/engine_cpu_time.py --dtype bfloat16 --peer llamacpp --batch-size 1

Each repeat runs every engine on one even workload of the shape, in the opposite order in every second repeat. Printed
are medians and the ratio to ours of the same repeat, with its least and most: above 1 ours is faster. On several
threads `harness bench engine` is the measure, on a machine that does nothing else.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from harness.extensions.bench import peer
from harness.extensions.bench.peer import OURS, BenchConfig, Generation, even_workload
from harness.extensions.bench.peers import PEERS
from harness.extensions.bench.shape import build_checkpoint, find_shape


class CPUClock:
    """Takes the place of the module `time`, so that every engine's steps are stamped with CPU time."""

    perf_counter = staticmethod(time.process_time)


def figures(run: Generation) -> dict[str, float]:
    """Return milliseconds of CPU time; a step is the median one."""
    steps = [end - begin for begin, end in zip(run.step_ends, run.step_ends[1:], strict=False)]
    return {"prefill": 1e3 * run.prefill_seconds, "decode step": 1e3 * median(steps)}


def main() -> None:
    """Parse the options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="142m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peer", default="llamacpp", choices=sorted(PEERS))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if torch.get_num_threads() != 1:
        parser.error("CPU time of several threads is no measure of speed: set OMP_NUM_THREADS=1")
    shape = find_shape(options.shape)
    workload = even_workload(
        options.batch_size, prompt_len=shape.prompt_len, output_len=shape.decode_len, vocab_size=shape.vocab_size,
        seed=0,
    )  # fmt: skip
    request_len = shape.prompt_len + shape.decode_len
    peer.time = CPUClock  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as temporary:
        build_checkpoint(shape, Path(temporary), dtype=options.dtype, seed=0, device="cpu")
        config = BenchConfig(
            folder=Path(temporary), scratch=Path(temporary), dtype=options.dtype,
            device="cpu", num_threads=1, max_request_len=request_len, max_total_len=request_len * options.batch_size,
            max_requests=options.batch_size, engine_options={},
        )  # fmt: skip
        engines = [PEERS[name](config) for name in (OURS, options.peer)]
        times: dict[str, dict[str, list[float]]] = {}
        for repeat in range(options.repeats + 1):  # the first warms up
            for engine in engines if repeat % 2 else reversed(engines):
                start = time.process_time()
                run = engine.generate(workload)
                run.start = start
                for name, value in figures(run).items() if repeat else ():
                    times.setdefault(name, {}).setdefault(engine.name, []).append(value)
    print(f"{options.shape}, {options.dtype}, batch {options.batch_size}, one thread,", end=" ")
    print(f"{torch.backends.cpu.get_cpu_capability()}, {options.repeats} repeats, ms of CPU time")
    for name, samples in times.items():
        ratios = [theirs / ours for ours, theirs in zip(samples[OURS], samples[options.peer], strict=True)]
        medians = ", ".join(f"{engine} {median(values):.2f}" for engine, values in samples.items())
        print(f"{name}: {medians}; {median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
