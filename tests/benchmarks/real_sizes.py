"""Check HF itself, and the reference engine where it serves the family, at published shapes with seeded random weights.

Printed, one line a check: the verdict, the largest share of a bound, what each phase took, what that is in plain
forwards of the same model on the same machine, and the largest memory that is not mapped from a file.

    python -m tests.benchmarks.real_sizes [--shapes NAME;...] [--dtypes float32,...] [--tokens 256] [--folder DIR]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from transformers import AutoConfig, AutoModelForCausalLM

from harness.base.memory import watched_memory
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request

from ..families.lively import make_lively

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    },
    "Gemma-3-1B": {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "query_pre_attn_scalar": 256, "sliding_window": 512, "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B, 2 layers": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
}  # fmt: skip
ENGINES = {"hf": ("hf", {}), "hf, eager": ("hf", {"attention": "eager"}), "reference": ("reference", {})}
SERVED = ("llama", "mistral", "qwen2", "qwen3")
COLUMNS = (
    "shape", "dtype", "engine", "verdict", "alarms", "largest share", "plain s", "golden s", "engine s", "compare s",
    "golden + compare / plain", "peak GiB",
)  # fmt: skip


def main() -> None:
    """Check every shape in every dtype with every engine, each in a separate process."""
    options = parsed()
    rows = []
    for shape in options.shapes.split(";"):
        for dtype in options.dtypes.split(","):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                child("save", shape, dtype, folder)
                plain = child("plain", shape, dtype, folder)["seconds"]
                for engine in ENGINES:
                    if engine == "reference" and SHAPES[shape]["model_type"] not in SERVED:
                        continue
                    measured = child("check", shape, dtype, folder, engine)
                    rows.append(row(shape, dtype, engine, plain, measured))
                    sys.stderr.write("\n".join([str(rows[-1]), *measured["alarms"][:5], ""]))
    sys.stdout.write(tabulate(rows, COLUMNS, tablefmt="github", disable_numparse=True) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.real_sizes")
    parser.add_argument("--shapes", default=";".join(SHAPES), help="separated by semicolons")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--folder", default=None, help="where the checkpoints are written; up to 8 GB at a time")
    options = parser.parse_args()
    os.environ["REAL_SIZES_TOKENS"] = str(options.tokens)
    return options


def child(*arguments: str) -> Any:
    """Run one part in a separate process, and return what it printed."""
    command = [sys.executable, "-c", f"from {__spec__.name} import part; part({list(arguments)!r})"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def part(arguments: list[str]) -> None:
    """Run one part and print what it measured."""
    what, shape, dtype, folder, *engine = arguments
    measured: dict[str, Any] = {}
    if what == "save":
        save(shape, dtype, Path(folder))
    elif what == "plain":
        measured = {"seconds": plain_seconds(dtype, Path(folder))}
    else:
        measured = check(dtype, Path(folder), engine[0])
    sys.stdout.write(json.dumps(measured) + "\n")


def token_ids(vocab_size: int) -> list[int]:
    count = int(os.environ["REAL_SIZES_TOKENS"])
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def save(shape: str, dtype: str, folder: Path) -> None:
    """Write a checkpoint of a shape."""
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_lively(model, seed=0)
    model.to(getattr(torch, dtype)).save_pretrained(folder / "model")


def plain_seconds(dtype: str, folder: Path) -> float:
    """Return the shortest of five plain forwards."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype))
    ids = torch.tensor([token_ids(model.config.vocab_size)])
    seconds = []
    with torch.no_grad():
        for _ in range(5):
            begin = time.perf_counter()
            model(input_ids=ids, use_cache=False)
            seconds.append(time.perf_counter() - begin)
    return min(seconds)


def check(dtype: str, folder: Path, engine: str) -> dict[str, Any]:
    """Run one check; the golden is made in the first of a checkpoint and read in the others."""
    os.environ["HARNESS_CACHE"] = str(folder / "cache")
    name, engine_options = ENGINES[engine]
    vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    with watched_memory() as peak:
        plan = plan_request(
            model=str(folder / "model"),
            engine=name,
            engine_options=engine_options,
            dtype=dtype,
            device="cpu",
            requests=[RequestSpec(token_ids=token_ids(vocab_size))],
            max_new_tokens=4,
            schedules=["plain"],
            local_files_only=True,
        )
        result = run_check(plan)
    (run,) = result.runs
    return {
        "verdict": run.outcome.value,
        "alarms": [finding.message for finding in run.findings],
        "share": max(tap.local_bound_share_max or 0.0 for tap in run.taps),
        "golden": result.golden_s,
        "engine": run.engine_s,
        "compare": run.compare_s,
        "peak": max(peak) / 2**30,
    }


def row(shape: str, dtype: str, engine: str, plain: float, measured: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    is_made = engine == "hf"
    seconds = measured["golden"] + measured["compare"] if is_made else measured["compare"]
    return [
        shape,
        dtype,
        engine,
        measured["verdict"],
        str(len(measured["alarms"])),
        f"{measured['share']:.2f}",
        f"{plain:.2f}",
        f"{measured['golden']:.1f}" if is_made else "as above",
        f"{measured['engine']:.1f}",
        f"{measured['compare']:.1f}",
        f"{seconds / plain:.1f}",
        f"{measured['peak']:.2f}",
    ]


if __name__ == "__main__":
    main()
