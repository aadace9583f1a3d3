"""Plant regressions in the reference engine, see whether a profile finds and names each, and find none where is none.

    python tests/benchmarks/profile_regressions.py [--quads 120] [--aa-runs 20] [--load 2]

Four of the five change exact counts. The fifth, an operator that is 5 % slower, changes only time: its operation is
timed at the boundaries that the engine shows, in steps that alternate as A B B A, and judged by the bootstrap interval
of the median ratio of the quads. The time is the thread's own CPU time, which what else runs on the core does not count
in; torch uses one thread. `--load N` keeps N processes busy meanwhile.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harness.engines import open_engine
from harness.engines.stepping import Session, open_session
from harness.profiling.counters import PhaseCounts, count
from harness.profiling.load import CaptureSchedule, ProfileRequests, dry_run, window
from harness.profiling.trace.tables import site_of
from harness.results.profile import StepShape
from reference_engine.kv_cache import KVCache
from reference_engine.layers import MLP, Linear
from reference_engine.rotary import RotaryEmbedding

SLOWDOWN = 1.05
TOLERANCE = 1.02
"""A ratio is an alarm when all of its interval is above."""
CONFIDENCE = 0.999
"""Of each operation's interval: there are some fifteen operations in each run."""
NUM_RESAMPLES = 2000
PROMPT = tuple(range(100, 164))


def write_model(folder: Path) -> None:
    """Write a random model whose operations take long enough to be timed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096, hidden_size=768, intermediate_size=2304, num_hidden_layers=4, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def opened(folder: Path, **options: str) -> Session:
    engine = open_engine("reference", folder, dtype="float32", device="cpu", options=options)
    return open_session(engine, max_num_tokens=256, max_num_seqs=2)


@contextmanager
def patched(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def copying(original: Any) -> Any:
    return lambda self, x, batch, prefix: original(self, x.clone(), batch, prefix)


def growing(original: Any) -> Any:
    grown: dict[int, torch.Tensor] = {}

    def store(self: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        original(self, layer, k, v, slots)
        grown[layer] = torch.cat([grown[layer], k]) if layer in grown else k.clone()

    return store


def synchronizing(original: Any) -> Any:
    def rotate(self: RotaryEmbedding, positions: torch.Tensor) -> Any:
        positions.sum().item()
        return original(self, positions)

    return rotate


def counts_of(session: Session) -> dict[str, PhaseCounts]:
    load = ProfileRequests(prompts=(PROMPT,), max_new_tokens=(8,))
    steps = dry_run(session, load)
    return {phase: count(session, window(phase, load, steps, CaptureSchedule())) for phase in ("prefill", "decode")}


def changes(before: dict[str, PhaseCounts], after: dict[str, PhaseCounts]) -> list[str]:
    """Return the largest changes, by phase, operation and operator."""
    lines = []
    for phase, counts in after.items():
        difference: Counter[tuple[str, str]] = Counter()
        for one in counts.counts:
            difference[one.operation, one.operator] += one.count
        for one in before[phase].counts:
            difference[one.operation, one.operator] -= one.count
        lines += [f"{phase} {operation} {operator} {change:+d}"
                  for (operation, operator), change in difference.most_common() if change]  # fmt: skip
        if counts.flops != before[phase].flops:
            lines.append(f"{phase} FLOPs x{counts.flops / before[phase].flops:.2f}")
        if counts.kv_bytes != before[phase].kv_bytes:
            lines.append(f"{phase} KV bytes {before[phase].kv_bytes} to {counts.kv_bytes}")
    return lines


def report_counts(folder: Path) -> None:
    before = counts_of(opened(folder))
    print("nothing changed:", changes(before, counts_of(opened(folder))) or "no change")
    for name, owner, method, make in (
        ("an extra copy in each layer", MLP, "__call__", copying),
        ("a cache that grows by cat", KVCache, "store", growing),
        ("a synchronization with the host", RotaryEmbedding, "__call__", synchronizing),
    ):
        with patched(owner, method, make):
            changed = changes(before, counts_of(opened(folder)))
        print(f"{name}: {len(changed)} changes")
        print(*(f"    {line}" for line in changed[:4]), sep="\n")
    changed = changes(before, counts_of(opened(folder, attention_backend="recompute")))
    print(f"attention without a cache: {len(changed)} changes")
    print(*(f"    {line}" for line in changed if "FLOPs" in line or "KV" in line), sep="\n")


class Boundaries:
    """A watcher that adds up the CPU time of each operation."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self._last = 0.0

    def begin_step(self, shape: StepShape) -> None:
        self._last = time.thread_time()

    def reached(self, name: str) -> None:
        now = time.thread_time()
        self.times[site_of(name)] += now - self._last
        self._last = now


class Slowed:
    """Makes the product with one shape of weight slower while it is on."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape, self.is_on = shape, False

    def make(self, original: Any) -> Any:
        def product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
            if not self.is_on or tuple(linear.weight_OI.shape) != self._shape:
                return original(linear, x)
            begin = time.thread_time()
            result = original(linear, x)
            end = begin + SLOWDOWN * (time.thread_time() - begin)
            while time.thread_time() < end:
                pass
            return result

        return product


def quads(session: Session, switch: Callable[[bool], None], num_quads: int) -> dict[str, list[float]]:
    """Return, for each operation, the ratio of changed to unchanged time of each quad of decode steps."""
    boundaries, ratios = Boundaries(), defaultdict(list)
    session.add(PROMPT, 4 * num_quads + 8)
    session.step()
    with session.watching(boundaries):
        for _ in range(4):
            session.step()
        for _ in range(num_quads):
            total = {False: Counter[str](), True: Counter[str]()}
            for is_changed in (False, True, True, False):
                boundaries.times.clear()
                switch(is_changed)
                session.step()
                total[is_changed].update(boundaries.times)
            for operation, changed in total[True].items():
                ratios[operation].append(changed / total[False][operation])
    switch(False)
    session.stop()
    return ratios


def interval(samples: list[float], draw: random.Random) -> tuple[float, float]:
    """Return the bootstrap interval of the median."""
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(NUM_RESAMPLES))
    cut = int((1 - CONFIDENCE) / 2 * NUM_RESAMPLES)
    return medians[cut], medians[-1 - cut]


def alarms(ratios: dict[str, list[float]], draw: random.Random) -> dict[str, tuple[float, float, float]]:
    """Return median and interval of each operation that is slower beyond doubt."""
    verdicts = {}
    for operation, samples in ratios.items():
        low, high = interval(samples, draw)
        if low > TOLERANCE:
            verdicts[operation] = (statistics.median(samples), low, high)
    return verdicts


def report_times(folder: Path, num_quads: int, num_aa_runs: int) -> None:
    draw, slowed = random.Random(0), Slowed((768, 2304))

    def switch(is_on: bool) -> None:
        slowed.is_on = is_on

    with patched(Linear, "__call__", slowed.make):
        session = opened(folder)
        quads(session, lambda _on: None, 4)
        ratios = quads(session, switch, num_quads)
        slower = alarms(ratios, draw)
        print(f"mlp.down_proj 5 % slower: {json.dumps(slower)}")
        down_ratios = ratios["mlp.down_proj"]
        print(f"    its ratio: median {statistics.median(down_ratios):.4f}, interval {interval(down_ratios, draw)}")
        num_alarms, widths = 0, []
        for _ in range(num_aa_runs):
            ratios = quads(session, lambda _on: None, num_quads)
            num_alarms += bool(alarms(ratios, draw))
            low, high = interval(ratios["mlp.down_proj"], draw)
            widths.append(high - low)
        print(f"{num_aa_runs} A/A runs: {num_alarms} with an alarm; interval of mlp.down_proj "
              f"{statistics.median(widths):.4f} wide (median), {max(widths):.4f} (widest)")  # fmt: skip


def burn() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quads", type=int, default=120)
    parser.add_argument("--aa-runs", type=int, default=20)
    parser.add_argument("--load", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    burning = [multiprocessing.Process(target=burn, daemon=True) for _ in range(options.load)]
    for process in burning:
        process.start()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        report_counts(Path(folder))
        report_times(Path(folder), options.quads, options.aa_runs)
    for process in burning:
        process.terminate()


if __name__ == "__main__":
    main()
