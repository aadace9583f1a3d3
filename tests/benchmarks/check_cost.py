"""What a check costs, in plain forwards of the same model in the same process, part by part.

CPU seconds of one process on one thread. A part's time is its own, without that of the parts in it. Each figure is the
median of some checks, one after the other, with the smallest and the largest. What is multiplied is counted exactly, in
products of one plain forward by their dtype: `--gate` fails if a count is above what it was when the gate was set.

    python -m tests.benchmarks.check_cost [--layers 6] [--tokens 256] [--dtype float32] [--times 3] [--small --gate]
"""

import argparse
import functools
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from harness.base.memory import collect_rarely
from harness.extensions.faults.zoo.lively import make_lively
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.oracle.turns import Ahead
from harness.plan import plan_request

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 32000, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {
    **SHAPE, "hidden_size": 640, "intermediate_size": 1280, "num_attention_heads": 10, "num_key_value_heads": 5,
    "head_dim": 64, "vocab_size": 1000,
}  # fmt: skip
PARTS = {
    "open and hash": ("harness.judge.jobs.check:planned_model", "harness.oracle.make_golden:golden_key"),
    "trace of the graph": ("harness.oracle.graph:trace_graph",),
    "golden: continuation": (
        "harness.oracle.make_golden:greedy_continuation",
        "harness.oracle.make_golden:record_continuation",
    ),
    "golden: control": ("harness.oracle.make_golden:run_pair/control",),
    "golden: truth": ("harness.oracle.make_golden:run_pair",),
    "golden: noise, sketches, writing": (
        "harness.oracle.make_golden:make_golden",
        "harness.oracle.make_golden:_Dump",
        "harness.oracle.make_golden:_Sketches",
    ),
    "golden: opening": ("harness.oracle.make_golden:_open_cached",),
    "engine": ("harness.judge.jobs.check:record_run", "harness.judge.jobs.check:with_served_run"),
    "replay: control": ("harness.judge.compare.local:run_pair/control",),
    "replay: truth": ("harness.judge.compare.local:run_pair",),
    "replay: judging": ("harness.judge.compare.local:LocalJudge", "harness.judge.compare.replay:Replay"),
    "propagated": ("harness.judge.compare.run:propagated_errors",),
    "caches": ("harness.judge.compare.run:cache_errors",),
    "digests of recordings": ("harness.formats.recording:Recording.verify_all",),
    "search for the power": ("harness.judge.jobs.check:power_of",),
}
"""By part: functions whose time it is, and classes; `/control`: what the second thread of `run_pair` does."""
REST = "rest"
NOT_COUNTED = ("engine", "search for the power")
"""Parts that no check of another engine has, or whose time follows that of the others."""
GATE = {
    "first check": {"float32": 1.082, "float64": 0.578},
    "other prompts": {"float32": 0.953, "float64": 0.402},
    "same prompts": {"float32": 0.005, "float64": 0.398},
}
"""Products of the `--small` form, in those of a plain forward: of the first check of a checkpoint, of a second one with
other prompts, which needs a golden but no graph, hash or projected weights, and of one with its golden."""


class Stopwatch:
    """CPU seconds of some functions, by part, each without what is measured inside of it."""

    def __init__(self) -> None:
        self.spent = Counter[str]()
        self._part, self._since = REST, time.process_time()

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Count the time of a block for a part."""
        before = self._switched(part)
        try:
            yield
        finally:
            self._switched(before)

    def _switched(self, part: str) -> str:
        now = time.process_time()
        self.spent[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before

    def lap(self) -> Counter[str]:
        """Return what was counted since the last lap."""
        self._switched(self._part)
        spent, self.spent = self.spent, Counter[str]()
        return spent

    @contextmanager
    def on(self, parts: Mapping[str, tuple[str, ...]]) -> Iterator[None]:
        """Measure the functions of all parts in the block."""
        with patches() as apply:
            for part, names in parts.items():
                for name in names:
                    place, _, thread = name.partition("/")
                    for owner, attribute in functions(place):
                        apply(owner, attribute, self._timed(getattr(owner, attribute), part, bool(thread)))
            self.spent.clear()
            self._since = time.process_time()
            yield
            self._switched(REST)

    def _timed(self, function: Callable[..., Any], part: str, of_thread: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if of_thread:
                with patch.object(Ahead, "advance", self._timed(Ahead.advance, part, False)):
                    return function(*args, **kwargs)
            with self.running(part):
                return function(*args, **kwargs)

        return measured


@contextmanager
def patches() -> Iterator[Callable[[Any, str, Any], None]]:
    """Lend a function that replaces attributes for the duration of the block."""
    replaced: list[tuple[Any, str, Any]] = []

    def apply(owner: Any, attribute: str, value: Any) -> None:
        replaced.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, value)

    try:
        yield apply
    finally:
        for owner, attribute, value in reversed(replaced):
            setattr(owner, attribute, value)


def functions(name: str) -> Iterator[tuple[Any, str]]:
    """Yield where a function stands, or each public method of a class."""
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    item = getattr(owner, last)
    if not isinstance(item, type):
        yield owner, last
        return
    for method, value in vars(item).items():
        if callable(value) and not method.startswith("_"):
            yield item, method


class Products(TorchDispatchMode):
    """Multiplications of products of two matrices by dtype: those with a weight, and none of attention's."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.flops[str(left.dtype).removeprefix("torch.")] += left.shape[0] * right.numel()
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Products]:
    """Count the products of a block, those of the control's thread, too."""
    products, run = Products(), Ahead._run

    def counted_run(self: Ahead) -> None:
        with products:
            run(self)

    with patch.object(Ahead, "_run", counted_run), products:
        yield products


def save(folder: Path, shape: Mapping[str, Any], num_layers: int, dtype: str) -> None:
    """Write a checkpoint of a shape."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **shape, num_hidden_layers=num_layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_lively(model, seed=0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)


class PlainForward:
    """HF's forward over the tokens of the check: the unit."""

    def __init__(self, folder: Path, dtype: str, ids: list[int]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._ids = torch.tensor([ids])

    @torch.no_grad()
    def seconds(self, times: int = 3) -> float:
        """Return the CPU seconds of the shortest of some forwards."""
        taken = []
        for _ in range(times):
            begin = time.process_time()
            self._model(input_ids=self._ids, use_cache=False)
            taken.append(time.process_time() - begin)
        return min(taken)

    @torch.no_grad()
    def flops(self) -> int:
        """Return the multiplications of one forward."""
        with Products() as products:
            self._model(input_ids=self._ids, use_cache=False)
        return sum(products.flops.values())


def check(folder: Path, dtype: str, ids: list[int], num_new: int) -> str:
    """Run one check and return its outcome."""
    plan = plan_request(
        model=str(folder), engine="hf", dtype=dtype, device="cpu", requests=[RequestSpec(token_ids=ids)],
        max_new_tokens=num_new, schedules=["plain"], local_files_only=True,
    )  # fmt: skip
    return run_check(plan).runs[0].outcome.value


def main() -> None:
    """Measure, print the tables, and compare the counts with the gate if it is asked for."""
    options = parsed()
    torch.set_num_threads(1)
    collect_rarely()  # as the command does
    num_layers, num_tokens = (2, 256) if options.small else (options.layers, options.tokens)
    shape = SMALL if options.small else SHAPE
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randint(3, shape["vocab_size"], (2, num_tokens), generator=generator).tolist()
    prompts = dict(zip(GATE, (first, second, first), strict=True))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        save(folder / "model", shape, num_layers, options.dtype)
        save(folder / "first", SMALL, 1, options.dtype)
        with patch.dict(os.environ, HARNESS_CACHE=str(folder / "first-cache")):  # imports and what runs once a process
            check(folder / "first", options.dtype, [3, 5, 7], 2)
        plain = PlainForward(folder / "model", options.dtype, first)
        timed = [measure(folder, options.dtype, prompts, options.new, plain, at) for at in range(options.times)]
        counts = count(folder, options.dtype, prompts, options.new, plain)
    sys.stdout.write(times_table(timed) + "\n\n" + counts_table(counts) + "\n")
    above = [
        f"{how}: {dtype} products of {value:.3f} plain forwards, gate {GATE[how].get(dtype, 0.0):.3f}"
        for how, products in counts.items()
        for dtype, value in products.items()
        if value > GATE[how].get(dtype, 0.0) + 5e-4
    ]
    if options.gate and above:
        sys.exit("\n".join(above))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.check_cost")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="two small layers and 256 tokens: counts that `GATE` has")
    parser.add_argument("--gate", action="store_true", help="fail if a count is above that of `GATE`")
    parser.add_argument("--folder", default=None, help="where the checkpoint and the cache are written")
    return parser.parse_args()


def with_one_cache(folder: Path, name: str, prompts: Mapping[str, list[int]]) -> Iterator[tuple[str, list[int]]]:
    """Yield the kinds of check with their prompts, each with what those before it left in the cache."""
    with patch.dict(os.environ, HARNESS_CACHE=str(folder / f"cache-{name}")):
        yield from prompts.items()


def measure(
    folder: Path, dtype: str, prompts: Mapping[str, list[int]], num_new: int, plain: PlainForward, at: int
) -> dict[str, dict[str, float]]:
    """Return the parts of each kind of check in plain forwards."""
    spent: dict[str, dict[str, float]] = {}
    for how, ids in with_one_cache(folder, str(at), prompts):
        watch, unit = Stopwatch(), plain.seconds()
        with watch.on(PARTS):
            outcome = check(folder / "model", dtype, ids, num_new)
        unit = min(unit, plain.seconds())
        spent[how] = {part: seconds / unit for part, seconds in watch.spent.items()}
        sys.stderr.write(f"{how}: {outcome}, plain {unit:.3f} s, all but the engine {total(spent[how]):.2f}\n")
    return spent


def total(parts: Mapping[str, float]) -> float:
    return sum(value for part, value in parts.items() if part not in NOT_COUNTED)


def count(
    folder: Path, dtype: str, prompts: Mapping[str, list[int]], num_new: int, plain: PlainForward
) -> dict[str, dict[str, float]]:
    """Return what is multiplied in each kind of check, but for the engine, in products of a plain forward by dtype."""
    result, unit = {}, plain.flops()
    for how, ids in with_one_cache(folder, "count", prompts):
        with counted() as products, patches() as apply:
            for part in NOT_COUNTED:
                for name in PARTS[part]:
                    for owner, attribute in functions(name):
                        apply(owner, attribute, uncounted(getattr(owner, attribute), products))
            check(folder / "model", dtype, ids, num_new)
        result[how] = {name: flops / unit for name, flops in sorted(products.flops.items())}
    return result


def uncounted(function: Callable[..., Any], products: Products) -> Callable[..., Any]:
    """Return a function whose products are not counted."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = products.flops.copy()
        try:
            return function(*args, **kwargs)
        finally:
            products.flops = before

    return run


def times_table(timed: list[dict[str, dict[str, float]]]) -> str:
    """Return the table of times: medians, with the smallest and the largest."""
    rows = [[part, *(spread([run[how].get(part, 0.0) for run in timed]) for how in GATE)] for part in (*PARTS, REST)]
    names = ", ".join(NOT_COUNTED)
    rows.append([f"all but: {names}", *(spread([total(run[how]) for run in timed]) for how in GATE)])
    return tabulate(rows, ("part, in plain forwards", *GATE), tablefmt="github", disable_numparse=True)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def counts_table(counts: Mapping[str, Mapping[str, float]]) -> str:
    dtypes = sorted({dtype for products in counts.values() for dtype in products})
    rows = [[f"{dtype} products", *(f"{counts[how].get(dtype, 0.0):.3f}" for how in counts)] for dtype in dtypes]
    return tabulate(rows, ("in those of a plain forward", *counts), tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    main()
