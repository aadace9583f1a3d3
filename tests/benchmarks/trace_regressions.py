"""How often the first sentence of `harness trace diff` names the regression that was planted between two traces.

    python tests/benchmarks/trace_regressions.py

Both traces are built by hand: an engine of 24 layers that serves 16 decode steps and 4 prefill steps, each time with a
noise of some per cent. The second one has one planted change, of other noise. The words that the sentence must have
are written beside each change, before the harness has said anything.
"""

import argparse
import json
import random
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.profiling.trace.compare import diff_files

NUM_LAYERS, NUM_STEPS = 24, 20
LAYER = (
    ("fused_add_rms_norm_kernel", 3.0),
    ("nvjet_tst_64x16_64x16_2x4_2cta_h_bz_TNT", 14.0),
    ("rotary_embedding_kernel", 3.0),
    ("reshape_and_cache_flash_kernel", 3.0),
    ("flash_fwd_splitkv_kernel", 12.0),
    ("nvjet_tst_64x8_64x16_2x4_2cta_h_bz_TNT", 9.0),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 6.0),
    ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", 20.0),
    ("act_and_mul_kernel<silu>", 3.0),
)
HEAD = (("nvjet_tst_192x8_64x8_4x1_v_bz_TNT", 60.0), ("topk_topp_sampling_kernel", 20.0))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine, whose trace is written."""

    layer: tuple[tuple[str, float], ...] = LAYER
    head: tuple[tuple[str, float], ...] = HEAD
    graphs: int = 1
    """Graphs that launch a decode step; 0 for a launch a kernel."""
    launch_us: float = 5.0
    call: str = "cudaLaunchKernel"
    operator: str = "aten::mm"
    operator_us: float = 7.0
    num_extra_operators: int = 0
    python_us: float = 30.0
    waits: int = 1
    calls: tuple[tuple[str, float], ...] = ()
    between_us: float = 40.0
    batch: int = 8
    scale: dict[str, float] = field(default_factory=dict)
    """Factors of the kernels whose names have these words."""
    phases: tuple[str, ...] = ("prefill", "decode")
    """Phases that `scale` is of."""
    stall_us: float = 0.0
    has_device: bool = True


class Writer:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.events: list[dict[str, Any]] = []
        self.now, self.gpu, self.correlation = 1000.0, 1000.0, 0

    def noisy(self, value: float, share: float = 0.03) -> float:
        return value * max(0.2, self.random.gauss(1.0, share))

    def event(self, category: str, name: str, begin: float, duration: float, thread: int = 1, **arguments: Any) -> None:
        process = 0 if thread == 7 else 100
        correlation = {"correlation": self.correlation} if category in ("kernel", "cuda_runtime") else {}
        args = {**correlation, **arguments}
        where = {"pid": process, "tid": thread, "ts": round(begin, 3), "dur": round(duration, 3)}
        self.events.append({"ph": "X", "cat": category, "name": name, **where, "args": args})

    def kernel(self, name: str, duration: float, ready: float, phase: str) -> None:
        for words, factor in self.engine.scale.items():
            duration *= factor if words in name and phase in self.engine.phases else 1.0
        begin = max(self.gpu + 0.8, ready)
        self.gpu = begin + self.noisy(duration)
        self.event("kernel", name, begin, self.gpu - begin, 7, stream=7, device=0)

    def host(self, name: str, duration: float, category: str = "python_function") -> None:
        taken = self.noisy(duration)
        self.event(category, name, self.now, taken)
        self.now += taken

    def launched(self, kernels: list[tuple[str, float]], phase: str, *, graph: bool) -> None:
        if graph:
            self.correlation += 1
            taken = self.noisy(20.0)
            self.event("cuda_runtime", "cudaGraphLaunch", self.now, taken)
            self.now += taken
            for name, duration in kernels:
                self.kernel(name, duration, self.now, phase)
            return
        for name, duration in kernels:
            self.correlation += 1
            begin, operator_us = self.now, self.noisy(self.engine.operator_us)
            launch = self.noisy(self.engine.launch_us)
            self.event("cpu_op", self.engine.operator, begin, operator_us + launch)
            self.event("cuda_runtime", self.engine.call, begin + operator_us * 0.9, launch)
            self.now = begin + operator_us + launch
            if self.engine.has_device:
                self.kernel(name, duration, self.now, phase)

    def step(self, phase: str, number: int) -> None:
        engine, begin = self.engine, self.now
        tokens = engine.batch if phase == "decode" else 512
        name = f"execute_context_{0 if phase == 'decode' else 1}({0 if phase == 'decode' else tokens})"
        name += f"_generation_{tokens if phase == 'decode' else 0}({tokens if phase == 'decode' else 0})"
        self.host("worker/input_batch.py(57): prepare_inputs", engine.python_us)
        for index in range(engine.num_extra_operators):
            self.host("aten::to" if index % 2 else "aten::index_select", 9.0, "cpu_op")
        for call, taken in engine.calls:
            self.host(call, taken, "cuda_runtime")
        kernels = [*engine.layer * NUM_LAYERS, *engine.head]
        if phase == "prefill":
            kernels = [(name, 8 * duration) for name, duration in kernels]
        graphs = engine.graphs if phase == "decode" and engine.has_device else 0
        size = -(-len(kernels) // max(1, graphs, engine.waits))
        for at in range(0, len(kernels), size):
            self.launched(kernels[at : at + size], phase, graph=graphs > 0)
            if engine.waits > 1 and engine.has_device:
                self.wait()
        if engine.waits == 1 and engine.has_device:
            self.wait()
        if engine.stall_us and number % 8 == 5:
            self.now += engine.stall_us
        self.event("user_annotation", name, begin, self.now - begin)
        self.now += self.noisy(engine.between_us, 0.1)

    def wait(self) -> None:
        begin, self.now = self.now, max(self.now + 2.0, self.gpu + 3.0)
        self.event("cuda_runtime", "cudaStreamSynchronize", begin, self.now - begin)


def write(path: Path, engine: Engine, seed: int) -> Path:
    writer = Writer(engine, seed)
    for number in range(NUM_STEPS):
        writer.step("prefill" if number % 5 == 0 else "decode", number)
    document = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
        "traceEvents": writer.events,
    }
    path.write_text(json.dumps(document))
    return path


def without(name: str) -> tuple[tuple[str, float], ...]:
    return tuple(kernel for kernel in LAYER if name not in kernel[0])


def swapped(old: str, *new: tuple[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(row for kernel in LAYER for row in (new if old in kernel[0] else (kernel,)))


BASE, EAGER, CPU = Engine(), Engine(graphs=0), Engine(has_device=False, graphs=0)
UNFUSED = (("vectorized_elementwise_kernel<pow>", 4.0), ("reduce_kernel<MeanOps>", 5.0), ("rms_norm_kernel", 4.0))
COPY, FILL = "elementwise_kernel<direct_copy_kernel_cuda>", "vectorized_elementwise_kernel<FillFunctor>"
TREE, TILE = "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", "nvjet_tst_64x64_64x8_1x2_h_bz_TNT"
PAGED, BATCH, SORT = "paged_attention_v1_kernel", "BatchDecodeWithPagedKVCache", "DeviceRadixSortOnesweepKernel"
PLANTED: tuple[tuple[str, Engine, dict[str, Any], str], ...] = (
    ("graphs off", BASE, {"graphs": 0}, "decode & graphs are off"),
    ("graph in 25 pieces, each with a wait", BASE, {"graphs": 25, "waits": 25}, "decode & 25 graphs a step for 1"),
    (
        "another attention backend",
        BASE,
        {"layer": swapped("flash", (PAGED, 40.0))},
        f"attention & flash_fwd_split & {PAGED}",
    ),
    (
        "another backend, eager",
        EAGER,
        {"layer": swapped("flash", (BATCH, 60.0))},
        f"attention & flash_fwd_split & {BATCH}",
    ),
    (
        "another GEMM tile",
        BASE,
        {"layer": swapped("128x64_64x8", (TILE, 31.0))},
        f"GEMM & nvjet_tst_128x64 & {TILE}",
    ),
    ("one GEMM longer", BASE, {"scale": {"128x64_64x8": 1.6}}, "GEMM & nvjet_tst_128x64 & 1.6 times as long"),
    ("attention longer", BASE, {"scale": {"flash": 2.0}}, "attention & flash_fwd_splitkv & 2 times as long"),
    ("attention of prefill", BASE, {"scale": {"flash": 2.5}, "phases": ("prefill",)}, "prefill & attention"),
    ("attention of decode", BASE, {"scale": {"flash": 2.5}, "phases": ("decode",)}, "decode & attention"),
    ("clocks 17 % lower", BASE, {"scale": {"": 1.2}}, "all kernels & 1.2"),
    ("clocks 31 % lower", BASE, {"scale": {"": 1.45}}, "all kernels & clocks"),
    ("a copy in each layer", BASE, {"layer": (*LAYER, (COPY, 9.0))}, "copy & direct_copy_kernel_cuda & new"),
    ("a fill in each layer", BASE, {"layer": (*LAYER, (FILL, 5.0))}, "copy & FillFunctor & new"),
    ("collectives longer", BASE, {"scale": {"nccl": 3.0}}, "communication & AllReduce & 3 times as long"),
    ("another collective", BASE, {"layer": swapped("nccl", (TREE, 14.0))}, "communication & RING_LL & TREE_LL"),
    ("two collectives a layer", BASE, {"layer": (*LAYER, LAYER[6])}, "communication & AllReduce & 48 a step for 24"),
    ("norm no longer fused", BASE, {"layer": swapped("fused_add", *UNFUSED)}, "rms_norm_kernel|pow|MeanOps"),
    ("writing the cache", BASE, {"scale": {"reshape_and_cache": 5.0}}, "cache & reshape_and_cache"),
    ("sampling by a sort", BASE, {"head": (HEAD[0], (SORT, 700.0))}, "sampling & DeviceRadixSort"),
    ("activation slower", BASE, {"scale": {"act_and_mul": 6.0}}, "activation & act_and_mul"),
    ("rotary slower", BASE, {"scale": {"rotary": 5.0}}, "rotary & rotary_embedding_kernel"),
    ("a wait in each layer", EAGER, {"waits": 24}, "waits for the device & 22 times & cudaStreamSynchronize"),
    ("memory allocated in a step", BASE, {"calls": (("cudaMalloc", 900.0), ("cudaFree", 300.0))}, "cudaMalloc"),
    ("preparing inputs in Python", BASE, {"python_us": 1500.0}, "decode & input_batch.py(57): prepare_inputs"),
    ("scheduling between steps", BASE, {"between_us": 2200.0}, "between two steps"),
    ("120 more operators", BASE, {"num_extra_operators": 120}, "operators|aten::to|aten::index_select"),
    ("operators slower on the CPU", EAGER, {"operator_us": 22.0}, "aten::mm & on the CPU"),
    (
        "larger batches",
        BASE,
        {"batch": 32, "scale": {"": 1.5}, "phases": ("decode",)},
        "other sizes & 32 requests for 8",
    ),
    ("on a CPU: an operator slower", CPU, {"operator_us": 14.0}, "aten::mm"),
    ("on a CPU: Python slower", CPU, {"python_us": 900.0}, "prepare_inputs"),
    ("nothing", BASE, {}, "no step is slower"),
    ("nothing, eager", EAGER, {}, "no step is slower"),
    ("nothing, on a CPU", CPU, {}, "no step is slower"),
    ("graphs on: faster", EAGER, {"graphs": 1}, "graphs are on"),
    ("attention faster", BASE, {"scale": {"flash": 0.4}}, "attention & flash_fwd_splitkv_kernel"),
    ("every eighth step stalls", BASE, {"stall_us": 30000.0}, "steps of & stall"),
)
"""The name, the engine before, what is other after, and the words of the sentence: all of them, or one by `|`."""


def is_right(sentence: str, words: str) -> bool:
    return all(any(word.strip() in sentence for word in either.split("|")) for either in words.split("&"))


def planted_sentence(folder: Path, name: str, before: Engine, changed: dict[str, Any], seed: int) -> str:
    engines = before, replace(before, **changed)
    paths = [write(folder / f"{name} {at}.json", engine, seed + at) for at, engine in enumerate(engines)]
    return diff_files(*paths).sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    rows, num_right = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, *pair, words) in enumerate(PLANTED):
            said = [planted_sentence(Path(folder), name, *pair, 1000 * seed + 2 * number) for seed in range(seeds)]
            right = sum(is_right(sentence, words) for sentence in said)
            num_right += right
            rows.append([name, f"{right} of {seeds}", said[0]])
    print(tabulate(rows, ["planted", "named", "first sentence, of the first pair"], tablefmt="github"))
    print(f"\n{num_right} of {seeds * len(PLANTED)}")


if __name__ == "__main__":
    main()
