"""Engines whose taps are found by content, against their adapters' tables: sound, and with bugs planted.

    python -m tests.benchmarks.engines_by_content nano_vllm [--model PATH] [--dtype float32] [--fault NAME]

Prints a line for each dtype and fault, each of a separate process: the taps that the table shows, those of them that
the map shows, the taps whose rows are not the table's bit for bit (false matches), and the first divergence of both.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

import harness
from harness.api.reports import CheckReport
from harness.base.files import scratch_folder
from harness.engines import Engine
from harness.engines.by_content.columns import relative_error
from harness.extensions.llamacpp.engine.options import parse_llamacpp_options
from harness.extensions.llamacpp.gguf import open_gguf
from harness.extensions.llamacpp.gguf.writer import write_gguf

ROOT = Path(__file__).parents[2]
PROMPTS = [list(range(3, 50)), list(range(60, 71)), list(range(100, 142))]
ENGINES = {"nano_vllm": "NanoVllm", "sglang": "SGLang", "vllm": "Vllm", "llamacpp": "LlamaCppStepper"}
"""Folders of docs/adapters, and the classes of their `by_content.py`; that of llama.cpp is the package's."""
TABLES = {"vllm": "harness.extensions.vllm", "llamacpp": "harness.extensions.llamacpp.engine.engine"}
"""Modules of engines of the package; each opens a model for itself."""
LLAMACPP = "harness.extensions.llamacpp.engine.by_content"
IN_FLOAT32 = {"cache_type": "F32", "flash_attention": "off"}
"""Options of llama.cpp with which attention is in float32."""
LIMITS = {"llamacpp": 1e-4}
"""Relative error of rows that are the same: llama.cpp's attention adds in an order that depends on the cache's size."""


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


def told(report: CheckReport) -> str:
    """Return the outcome and the first divergence with its cause."""
    first = report.runs[0].first_divergence
    return "pass" if first is None else f"{first.tap}: {first.explanation.cause}"


def plant_before_packing(plant: Callable[[Any], None]) -> None:
    """Change each model that vLLM loads, before its weights are brought into the forms of kernels."""
    loader = importlib.import_module("vllm.model_executor.model_loader.base_loader")
    pack = loader.process_weights_after_loading

    def planted(model: Any, *arguments: Any) -> None:
        plant(model.model)
        pack(model, *arguments)

    loader.process_weights_after_loading = planted


def case(engine: str, folder: Path, dtype: str, fault: str) -> str:
    """Run an engine by content and by its table, and return what came of it."""
    sys.path.insert(0, str(ROOT / "docs" / "adapters" / engine))
    content = importlib.import_module(LLAMACPP if engine == "llamacpp" else "by_content")
    table = importlib.import_module(TABLES.get(engine, "engine"))
    if engine == "sglang":  # its settings are of the process: one engine for both
        content.Engine = built = cache(table.Engine)
        table.open_engine = lambda folder, *, dtype, **_options: built(folder, dtype)
    if engine == "nano_vllm" and dtype == "float32" and fault != "as it is":
        fixed(None)
    plant = FAULTS.get(fault, lambda _model: None)
    if engine == "vllm":
        plant_before_packing(plant)

    def opened(build: Callable[..., Any]) -> Callable[..., Any]:
        if engine in TABLES:
            return build

        def with_fault(*args: Any, **named: Any) -> Any:
            made = build(*args, **named)
            model = made.model if hasattr(made, "model") else made.runner.model
            if not getattr(model, "has_fault", False):
                model.has_fault = True
                plant(model.model)
            return made

        return with_fault

    setattr(content, ENGINES[engine], opened(getattr(content, ENGINES[engine])))
    arguments = {"dtype": dtype, "device": "cpu", "options": IN_FLOAT32 if engine == "llamacpp" else {}}
    known, by_table = rows_of(opened(table.open_engine)(folder, **arguments), folder, dtype)
    by_content = (
        llamacpp_by_content(folder, folder) if engine == "llamacpp" else content.open_engine(folder, **arguments)
    )
    live, report = rows_of(by_content, folder, dtype)
    shown, there = {tap for tap, *_ in live}, {tap for tap, *_ in known}
    false = {
        key[0] for key in live.keys() & known.keys() if relative_error(live[key], known[key]) > LIMITS.get(engine, 0)
    }
    lost = ", ".join(sorted(there - shown)) or "-"
    same = "the same" if told(report) == told(by_table) else told(by_table)
    return (
        f"| {len(shown & there)} of {len(there)} | {lost} | {', '.join(sorted(false)) or 0} | {told(report)} | {same} |"
    )


def main() -> None:
    """Run one case, or every one in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", type=Path, default=ROOT / "cases" / "checkpoints" / "qwen3-tiny")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--fault")
    options = parser.parse_args()
    if options.fault is not None and len(options.dtype or ()) == 1:
        print(case(options.engine, options.model, options.dtype[0], options.fault), flush=True)
        os._exit(0)  # threads of SGLang may not end
    print("| dtype | fault | taps found | not found | false | first divergence | the table's |")
    print("|---|---|---:|---|---|---|---|")
    for dtype in options.dtype or ("float32", "bfloat16"):
        faults = {} if options.engine == "llamacpp" else FAULTS
        for fault in [options.fault] if options.fault else ["sound", "as it is", *faults]:
            if fault == "as it is" and (options.engine, dtype) != ("nano_vllm", "float32"):
                continue
            command = [sys.executable, "-m", "tests.benchmarks.engines_by_content", options.engine]
            command += ["--model", str(options.model), "--dtype", dtype, "--fault", fault]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            line = done.stdout.splitlines()[-1:] or [f"| {done.stderr.strip().splitlines()[-1]} |"]
            print(f"| {dtype} | {fault} {line[0]}", flush=True)


if __name__ == "__main__":
    main()
