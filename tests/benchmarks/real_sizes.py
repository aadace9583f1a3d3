"""Check HF itself, and the reference engine where it serves the family, at published shapes with seeded random weights.

Printed, one line a check: the verdict, the largest share of a bound, what each phase took, what that is in plain
forwards of the same model on the same machine, and the largest memory of the host that is not mapped from a file.

    python -m tests.benchmarks.real_sizes [--shapes NAME;...] [--dtypes float32,...] [--tokens 256] [--folder DIR]
    python -m tests.benchmarks.real_sizes --device cuda --shapes "Qwen3-8B, 8 layers" --engines triton ...

`profile` after the options writes a profile of the first shape instead, and reads its trace and snapshot back.
"""

import argparse
import json
import os
import shutil
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
from harness.extensions.faults.zoo.lively import make_lively
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.oracle import make_golden, precision
from harness.plan import plan_request
from harness.results.check import Outcome

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
    "Qwen3-8B, 8 layers": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": False, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "tiny": {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
        "tie_word_embeddings": False, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "Qwen3-30B-A3B, 2 layers": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
}  # fmt: skip
ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "hf": ("hf", {}), "hf, eager": ("hf", {"attention": "eager"}), "reference": ("reference", {}),
    "triton": ("reference", {"attention_backend": "triton"}),
}  # fmt: skip
SERVED = ("llama", "mistral", "qwen2", "qwen3")
PUBLISHED = tuple(name for name in SHAPES if name not in ("tiny", "Qwen3-8B, 8 layers"))
COLUMNS = (
    "shape", "dtype", "engine", "products", "verdict", "alarms", "largest share", "plain s", "golden s", "engine s",
    "compare s", "all s", "golden + compare / plain", "peak GiB",
)  # fmt: skip


def main() -> None:
    """Check every shape in every dtype with every engine, each in a separate process."""
    options = parsed()
    if options.part:
        sys.stdout.write(json.dumps(PARTS[options.part](options)) + "\n")
        return
    rows = []
    for shape in options.shapes.split(";"):
        for dtype in options.dtypes.split(","):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                at = {"shapes": shape, "dtypes": dtype, "folder": folder}
                child(options, "save", **at)
                if options.what == "profile":
                    show_profile(options, Path(folder) / "model", dtype)
                    return
                plain = child(options, "plain", **at)["seconds"]
                for engine in options.engines.split(";"):
                    if ENGINES[engine][0] == "reference" and SHAPES[shape]["model_type"] not in SERVED:
                        continue
                    for products in options.products.split(",") if dtype != "float32" else ["as usual"]:
                        measured = child(options, "check", engines=engine, products=products, **at)
                        rows.append(row(shape, dtype, engine, products, plain, measured))
                        sys.stderr.write("\n".join([str(rows[-1]), *measured["alarms"][:5], ""]))
    sys.stdout.write(tabulate(rows, COLUMNS, tablefmt="github", disable_numparse=True) + "\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.real_sizes")
    parser.add_argument("what", nargs="?", choices=["check", "profile"], default="check")
    parser.add_argument("--shapes", default=";".join(PUBLISHED), help="separated by semicolons")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--engines", default="hf;hf, eager;reference", help=f"of {'; '.join(ENGINES)}")
    parser.add_argument("--schedules", default="plain")
    parser.add_argument("--products", default="as usual", help="of the truth of 16 bits; also float32")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=None, help="where the checkpoints are written; up to 11 GB at a time")
    parser.add_argument("--out", default="out/profile", help="folder of the profile")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def program(*arguments: str) -> list[str]:
    """Return a command that runs a module in a process with the same device, pretended or not."""
    via = ["tests.pretended_gpu"] if "tests.pretended_gpu.device" in sys.modules else []
    return [sys.executable, *(word for name in via for word in ("-m", name)), *arguments[bool(via) and 1 :]]


def child(options: argparse.Namespace, part: str, **changed: str) -> Any:
    """Run one part in a separate process, and return what it printed."""
    settings = {name: value for name, value in (vars(options) | changed | {"part": part}).items() if name != "what"}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    ran = subprocess.run(program("-m", "tests.benchmarks.real_sizes", *words), stdout=subprocess.PIPE, text=True)
    ran.check_returncode()
    return json.loads(ran.stdout.splitlines()[-1])


def token_ids(vocab_size: int, count: int) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def save(options: argparse.Namespace) -> dict[str, Any]:
    """Write a checkpoint of a shape."""
    settings = dict(SHAPES[options.shapes])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_lively(model, seed=0)
    model.to(getattr(torch, options.dtypes)).save_pretrained(Path(options.folder) / "model")
    return {}


def plain_seconds(options: argparse.Namespace) -> dict[str, Any]:
    """Return the shortest of five plain forwards."""
    folder, dtype = Path(options.folder) / "model", getattr(torch, options.dtypes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device)
    ids = torch.tensor([token_ids(model.config.vocab_size, options.tokens)], device=options.device)
    seconds = []
    with torch.no_grad():
        for _ in range(5):
            begin = time.perf_counter()
            model(input_ids=ids, use_cache=False).logits[0, -1, 0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - begin)
    return {"seconds": min(seconds)}


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Run one check; the golden is made in the first of a checkpoint and read in the others."""
    os.environ["HARNESS_CACHE"] = str(Path(options.folder) / "cache")
    if options.products == "float32":
        precision.has_wide_products = make_golden.has_wide_products = lambda *_: False  # type: ignore[assignment]
    name, engine_options = ENGINES[options.engines]
    model = Path(options.folder) / "model"
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with watched_memory() as peak:
        begin = time.perf_counter()
        plan = plan_request(
            model=str(model),
            engine=name,
            engine_options=engine_options,
            dtype=options.dtypes,
            device=options.device,
            requests=[RequestSpec(token_ids=token_ids(vocab_size, options.tokens))],
            max_new_tokens=4,
            schedules=options.schedules.split(","),
            local_files_only=True,
        )
        result = run_check(plan)
        seconds = time.perf_counter() - begin
    runs = result.runs
    return {
        "verdict": next((run.outcome.value for run in runs if run.outcome is not Outcome.PASS), Outcome.PASS.value),
        "alarms": [finding.message for run in runs for finding in run.findings],
        "share": max(tap.local_bound_share_max or 0.0 for run in runs for tap in run.taps),
        "golden": result.golden_s,
        "engine": sum(run.engine_s or 0.0 for run in runs),
        "compare": sum(run.compare_s or 0.0 for run in runs),
        "all": seconds,
        "peak": max(peak) / 2**30,
    }


PARTS = {"save": save, "plain": plain_seconds, "check": check}


def show_profile(options: argparse.Namespace, model: Path, dtype: str) -> None:
    """Profile a step of the engine, and read what that wrote as any other program's trace and snapshot."""
    out, (_, engine_options) = Path(options.out), ENGINES[options.engines.split(";")[0]]
    shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off
    named = [word for name, value in engine_options.items() for word in ("--engine-option", f"{name}={value}")]
    size = ["--prompt-tokens", str(options.tokens), "--max-new-tokens", "8", "--quick"]
    run_harness("profile", "--model", model, "--dtype", dtype, "--device", options.device, *named, *size, "--out", out)
    for trace in sorted(out.glob("trace/*.json.gz")):
        run_harness("trace", "summary", trace)
    for snapshot in sorted(out.glob("memory/*.pickle")):
        run_harness("trace", "memory", snapshot)


def run_harness(*arguments: str | Path) -> None:
    sys.stdout.flush()
    subprocess.run(program("-m", "harness", *map(str, arguments)), check=True)


def row(shape: str, dtype: str, engine: str, products: str, plain: float, measured: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    return [
        shape,
        dtype,
        engine,
        products,
        measured["verdict"],
        str(len(measured["alarms"])),
        f"{measured['share']:.2f}",
        f"{plain:.4g}",
        *(f"{measured[name]:.1f}" for name in ("golden", "engine", "compare", "all")),
        f"{(measured['golden'] + measured['compare']) / plain:.1f}",
        f"{measured['peak']:.2f}",
    ]


if __name__ == "__main__":
    main()
