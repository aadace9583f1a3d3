"""Engines whose adapters learn their taps and run their own schedulers: sound, and with bugs planted.

    python -m tests.benchmarks.engines_by_content nano_vllm [--model PATH] [--dtype float32] [--fault NAME]

Prints a line for each dtype, fault and schedule, each fault in a separate process: the taps that are not shown, and the
first divergence. `tests.benchmarks.vllm_verdicts` does the same with vLLM.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import harness
from harness.api.reports import CheckReport
from harness.base.files import scratch_folder
from harness.engines import Engine
from harness.extensions.llamacpp.engine.options import parse_llamacpp_options
from harness.extensions.llamacpp.gguf import open_gguf
from harness.extensions.llamacpp.gguf.writer import write_gguf

ROOT = Path(__file__).parents[2]
PROMPTS = [list(range(3, 50)), list(range(60, 71)), list(range(100, 142))]
ENGINES = ("nano_vllm", "sglang")
"""Folders of docs/adapters."""
LLAMACPP = "harness.extensions.llamacpp.engine.by_content"
IN_FLOAT32 = {"cache_type": "F32", "flash_attention": "off"}
"""Options of llama.cpp with which attention is in float32."""


def rotary(model: Any) -> None:
    """Turn queries and keys as at the position after theirs."""
    module = model.layers[0].self_attn.rotary_emb  # nano-vllm has one for all models of a process
    if not hasattr(module, "is_turned"):
        module.is_turned, module.cos_sin_cache.data = True, module.cos_sin_cache.data.roll(-1, 0)


def scale(model: Any) -> None:
    """Take half of the softmax's scale."""
    for layer in model.layers:
        attention = getattr(layer.self_attn.attn, "impl", layer.self_attn.attn)
        name = "scaling" if hasattr(attention, "scaling") else "scale"
        setattr(attention, name, getattr(attention, name) * 0.5)


def eps(model: Any) -> None:
    """Take another eps in one norm."""
    norm = model.layers[1].post_attention_layernorm
    setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.5)


def swap(model: Any) -> None:
    """Swap gate and up."""
    weight = model.layers[1].mlp.gate_up_proj.weight
    weight.data = torch.cat([*reversed(weight.data.chunk(2))])


def heads(model: Any) -> None:
    """Read the context from another head."""
    weight = model.layers[2].self_attn.o_proj.weight
    weight.data = weight.data.roll(32, 1)


def norm(model: Any) -> None:
    """Take the final norm's weight as 1 + weight."""
    model.norm.weight.data += 1


def fixed(_model: Any) -> None:
    """Mend nano-vllm's norm, which in float32 writes into its own input and residual."""
    layernorm = importlib.import_module("nanovllm.layers.layernorm").RMSNorm
    for name in ("rms_forward", "add_rms_forward"):
        forward = getattr(layernorm, name)
        setattr(layernorm, name, _on_copies(forward))


def _on_copies(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def copied(self: Any, *tensors: torch.Tensor) -> Any:
        if tensors[0].dtype is not torch.float32:
            return forward(self, *tensors)
        made = forward(self, *(item.double() for item in tensors))
        return tuple(item.float() for item in made) if isinstance(made, tuple) else made.float()

    return copied


FAULTS = {item.__name__: item for item in (rotary, scale, eps, swap, heads, norm)}


class Rows:
    """A recording's writer that keeps a copy of each row."""

    def __init__(self, writer: Any, kept: dict[tuple[str, int, int], torch.Tensor]) -> None:
        """Take a writer, and what gets the rows by tap, request and position."""
        self._writer, self._kept = writer, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def begin_step(self, **rows: Any) -> None:
        """Begin a step of the writer's."""
        self._at = [*zip(rows["request"], rows["position"], strict=True)]
        self._partial = rows.get("partial_rows") or {}
        self._writer.begin_step(**rows)

    def tap(self, name: str, value: torch.Tensor) -> None:
        """Write rows, and keep them."""
        rows = self._partial.get(name, range(len(self._at)))
        for row, item in zip(rows, value, strict=True):
            self._kept[name, *self._at[row]] = item.detach().clone().flatten()
        self._writer.tap(name, value)


def rows_of(engine: Engine, folder: Path, dtype: str) -> tuple[dict[tuple[str, int, int], torch.Tensor], CheckReport]:
    """Check an engine, and return its rows by tap, request and position, and the report."""
    kept: dict[tuple[str, int, int], torch.Tensor] = {}
    run = engine.run
    engine.run = lambda workload, writer: run(workload, Rows(writer, kept))  # type: ignore[method-assign]
    return kept, harness.check(engine, model=folder, dtype=dtype, prompts=PROMPTS, max_new_tokens=6)


def llamacpp_by_content(folder: Path, right: Path) -> Engine:
    """Open llama.cpp without its table on a checkpoint of which a GGUF file is made; the truth is another one."""
    content = importlib.import_module(LLAMACPP)
    with scratch_folder("harness-") as made:
        file = open_gguf(write_gguf(folder, made / "model.gguf"))
        engine: Engine = content.open_by_content(file, right, parse_llamacpp_options(IN_FLOAT32))
        return engine


def lines_of(engine: str, folder: Path, dtype: str, fault: str) -> Iterator[str]:
    """Check an engine with a fault, and yield a line for each schedule; only a sound one runs all of its schedules."""
    sys.path.insert(0, str(ROOT / "docs" / "adapters" / engine))
    subject = importlib.import_module("engine").open_engine(folder, dtype=dtype, device="cpu", options={})
    if engine == "nano_vllm" and dtype == "float32" and fault != "as it is":
        fixed(None)
    if fault in FAULTS:
        FAULTS[fault]((subject.nano if engine == "nano_vllm" else subject.runner).model.model)
    schedules = subject.capabilities.schedules if fault == "sound" else ("plain",)
    report = harness.check(
        subject, model=folder, dtype=dtype, prompts=PROMPTS, schedules=schedules,
        max_new_tokens=30 if fault == "sound" else 6,
    )  # fmt: skip
    for run in report.runs:
        first, coverage = run.first_divergence, run.coverage
        told = run.outcome.value if first is None else f"{first.tap}: {first.explanation.cause}"
        yield f"| {dtype} | {fault} | {run.schedule} | {', '.join(coverage.not_offered) or '-'} | {told} |"


def main() -> None:
    """Run one case, or every one in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, default=ROOT / "cases" / "checkpoints" / "qwen3-tiny")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--fault")
    options = parser.parse_args()
    if options.fault is not None and len(options.dtype or ()) == 1:
        for line in lines_of(options.engine, options.model, options.dtype[0], options.fault):
            print(line, flush=True)
        os._exit(0)  # threads of SGLang may not end
    print("| dtype | fault | schedule | not shown | first divergence |")
    print("|---|---|---|---|---|")
    for dtype in options.dtype or ("float32", "bfloat16"):
        for fault in [options.fault] if options.fault else ["sound", "as it is", *FAULTS]:
            if fault == "as it is" and (options.engine, dtype) != ("nano_vllm", "float32"):
                continue
            command = [sys.executable, "-m", "tests.benchmarks.engines_by_content", options.engine]
            command += ["--model", str(options.model), "--dtype", dtype, "--fault", fault]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            print(done.stdout or f"| {dtype} | {fault} | {done.stderr.strip().splitlines()[-1]} |", end="", flush=True)


if __name__ == "__main__":
    main()
