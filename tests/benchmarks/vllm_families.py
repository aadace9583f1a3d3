"""Every family that vLLM serves, tiny and with seeded weights, through schedules and dtypes: which verdicts are there?

    VLLM_CPU_KVCACHE_SPACE=1 python -m tests.benchmarks.vllm_families --out families.jsonl
    python -m tests.benchmarks.vllm_families --table families.jsonl

Families are those of transformers (tests/families) whose class vLLM's registry knows. One process serves one family
after the other; where it dies or hangs, a new one goes on with the next. A line of the file is one family in one dtype.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

SCHEDULES = ("plain", "chunked", "batched", "mixed", "prefix-hit", "preempted")
DTYPES = ("float32", "bfloat16", "float16")
PROMPTS = [list(range(3, 50)), list(range(60, 71)), list(range(100, 142))]
"""Beyond a block of 32, short, and beyond a block by what is made."""
SIZES = {
    **dict.fromkeys(("hidden_size", "hidden_size_global", "n_embd", "d_model", "lru_width"), 128),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels", "swa_head_dim", "query_pre_attn_scalar"), 32),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32),
    "rotary_dim": 16, "mamba_d_head": 32, "mamba_head_dim": 32, "mamba_n_groups": 1, "n_groups": 1,
}  # fmt: skip
"""vLLM's kernels on a CPU take heads of 32, 64, 80, ... elements. Of several groups of a state vLLM normalises
each, and HF all together."""
SECONDS = 600
"""Longest time for a family in one dtype."""


def main() -> None:
    """Parse the options; run, or print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="by default all")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--new-tokens", type=int, default=30)
    parser.add_argument(
        "--out", type=Path, help="gets a line for each family and dtype; what it holds is not run again"
    )
    parser.add_argument("--table", type=Path, help="print such a file as a table")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table is not None:
        print("\n".join(table(lines_of(options.table))))
    elif options.serve:
        serve(options)
    else:
        run_all(options)


def run_all(options: argparse.Namespace) -> None:
    """Run each family in each dtype in a process that serves several of them."""
    jobs = [(family, dtype) for family in options.families or served() for dtype in options.dtypes.split(",")]
    while left := [job for job in jobs if job not in done(options.out)]:
        watch(options, left)


def watch(options: argparse.Namespace, left: Sequence[tuple[str, str]]) -> None:
    """Run a process over what is left until it ends or hangs; then the one that it was at gets a line that says so."""
    command = [sys.executable, "-m", "tests.benchmarks.vllm_families", "--serve", "--out", str(options.out)]
    command += ["--schedules", options.schedules, "--new-tokens", str(options.new_tokens)]
    process = subprocess.Popen([*command, *(f"{family}:{dtype}" for family, dtype in left)])
    num_done, since = len(done(options.out)), time.monotonic()
    while process.poll() is None:
        time.sleep(1)
        if (now := len(done(options.out))) > num_done:
            num_done, since = now, time.monotonic()
        if time.monotonic() - since > SECONDS:
            process.kill()
            process.wait()
    missing = next((job for job in left if job not in done(options.out)), None)
    if missing is not None:
        family, dtype = missing
        write(options.out, {"family": family, "dtype": dtype, "error": f"the process ended: {process.returncode}"})


def done(path: Path) -> set[tuple[str, str]]:
    """Return the families and dtypes that a file holds."""
    return {(line["family"], line["dtype"]) for line in lines_of(path)}


def serve(options: argparse.Namespace) -> None:
    """Check families one after the other; of what an engine leaves, collect between families only.

    vLLM collects nine times for each engine, over every object of the process: three fifths of a family's time.
    """
    import harness.extensions.vllm  # noqa: F401

    collect = gc.collect
    gc.collect, gc.unfreeze = lambda *_: 0, lambda: None
    for job in options.families:
        collect()
        gc.freeze()
        family, dtype = job.split(":")
        line = {"family": family, "dtype": dtype}
        begin = time.process_time()
        try:
            line |= checked(family, dtype, options.schedules.split(","), options.new_tokens)
        except Exception as error:
            line |= {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:1500]}
        write(options.out, line | {"cpu_s": round(time.process_time() - begin)})


def served() -> list[str]:
    """Return the families of transformers whose class vLLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    from tests.families.architectures import architectures

    known = ModelRegistry.get_supported_archs()
    return [family for family in architectures() if NAMES[family] in known]


def checked(family: str, dtype: str, schedules: Sequence[str], new_tokens: int) -> dict[str, Any]:
    """Check vLLM on one family; return what is put into the file."""
    from harness.formats.case import RequestSpec
    from harness.judge.jobs.check import run_check
    from harness.plan import plan_request

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(family, Path(folder))
        plan = plan_request(
            model=folder, engine="vllm", isolate=changes_transformers(family), dtype=dtype, schedules=schedules,
            max_new_tokens=new_tokens,
            requests=[RequestSpec(token_ids=ids) for ids in PROMPTS],
        )  # fmt: skip
        result = run_check(plan)
    return {"runs": {str(run.schedule): summary(run) for run in result.runs}, "notes": list(result.notes)}


def changes_transformers(family: str) -> bool:
    """Whether vLLM runs HF's own classes, which it changes for all of its process: no oracle can be there."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    return "transformers" in ModelRegistry.models[NAMES[family]].module_name.rpartition(".")[2]


def write_checkpoint(family: str, folder: Path) -> None:
    """Write a tiny model whose sizes vLLM's kernels take."""
    import torch
    from transformers import AutoModelForCausalLM

    from harness.extensions.faults.zoo.lively import make_lively
    from harness.extensions.faults.zoo.quiet import quiet
    from harness.extensions.faults.zoo.tiny_config import tiny_config

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_config(family, SIZES | CHANGES.get(family, {}))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        make_lively(model, 0)
        model.save_pretrained(folder)


CHANGES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"swiglu_limit": 7.0},  # vLLM has this limit in its code
    "mamba2": {
        "hidden_size": 64,
        "mamba_head_dim": 16,
    },  # its sizes are given in harness/extensions/faults/zoo/sizes.py
    "falcon_h1": {"mamba_d_head": 16},
}
"""What a family needs besides."""


def summary(run: Any) -> dict[str, Any]:
    """Return what the table shows of a run."""
    shares = [tap.local_bound_share_max for tap in run.taps if tap.local_bound_share_max is not None]
    judged = sum(tap.judged_by != "none" for tap in run.taps)
    return {
        "outcome": str(run.outcome.value),
        "findings": [f"{finding.code} {finding.message}"[:300] for finding in run.findings][:6],
        "judged": judged,
        "not_offered": list(run.coverage.not_offered),
        "rows": [run.coverage.recorded, run.coverage.expected],
        "share": max(shares, default=None),
        "tokens": [run.tokens.equal, run.tokens.ties, run.tokens.compared],
    }


def table(lines: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| family | dtype | verdict | taps judged | not shown | largest share of a bound | tokens equal |"
    yield "|---|---|---|---|---|---|---|"
    for line in sorted(lines, key=lambda line: (line["family"], DTYPES.index(line["dtype"]))):
        yield f"| {line['family']} | {line['dtype']} | {' | '.join(cells(line))} |"


def cells(line: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells after a line's names."""
    if "error" in line:
        return line["error"].replace("|", "/")[:240], "", "", "", ""
    runs = line["runs"]
    failed = {name: run["findings"][:1] for name, run in runs.items() if run["outcome"] != "pass"}
    verdict = f"pass in {len(runs)} of {len(runs)}" if not failed else f"{failed}"[:300]
    shares = [run["share"] for run in runs.values() if run["share"] is not None]
    equal, ties, compared = (sum(run["tokens"][at] for run in runs.values()) for at in range(3))
    shown = {run["judged"] for run in runs.values()}
    lacking = sorted({name for run in runs.values() for name in run["not_offered"]})
    return (
        verdict, f"{min(shown)}", ", ".join(lacking) or "-", f"{max(shares):.2f}" if shares else "-",
        f"{equal} + {ties} ties of {compared}",
    )  # fmt: skip


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, line: dict[str, Any]) -> None:
    """Append a line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    main()
