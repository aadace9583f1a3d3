"""llama.cpp over families of transformers: tiny random checkpoints, converted by its own converter, found by content.

    python -m tests.benchmarks.llamacpp_families LLAMA_CPP_CHECKOUT [FAMILY ...]

Prints a line for each family: taps found, taps that are not shown, and the verdict or the reason why there is none.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import harness
from harness.extensions.faults.zoo.models import save
from harness.extensions.faults.zoo.quiet import quiet
from tests.benchmarks.engines_by_content import IN_FLOAT32
from tests.llamacpp_files import convert

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "gemma", "gemma2", "gemma3_text", "phi",
    "phi3", "olmo", "olmo2", "olmoe", "gpt2", "gpt_neox", "gpt_oss", "falcon", "bloom", "mpt", "stablelm",
    "starcoder2", "cohere", "cohere2", "granite", "granitemoe", "granitemoehybrid", "deepseek_v2", "deepseek_v3",
    "glm", "glm4", "glm4_moe", "mixtral", "mistral", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba",
    "nemotron", "nemotron_h", "exaone4", "smollm3", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "lfm2", "arcee",
    "dbrx", "bitnet", "seed_oss", "minicpm",
)  # fmt: skip
PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)], [*range(20, 56)]]


def case(checkout: Path, family: str, scratch: Path) -> str:
    """Return the line of a family."""
    folder, file = scratch / family, scratch / f"{family}.gguf"
    with quiet():
        save(family, folder)
    done = convert(checkout, folder, file)
    if done.returncode:
        return f"| {family} | | | not converted: {_brief(done.stderr)} |"
    with quiet():
        report = harness.check(
            "llamacpp", model=folder, dtype="float32", engine_options=IN_FLOAT32 | {"gguf": str(file)}, prompts=PROMPTS,
            max_new_tokens=5, schedules=["plain", "chunked:5"],
        )  # fmt: skip
    num_taps = next((item for note in report.notes for item in re.findall(r"(\d+) taps were found", note)), "?")
    lacking = {tap for run in report.runs for tap in run.coverage.not_offered}
    first = next((run.first_divergence for run in report.runs if run.first_divergence is not None), None)
    said = report.outcome.value if first is None else f"{first.tap}: {first.explanation.cause}"
    left = ", ".join(sorted(lacking)) or "-"
    return f"| {family} | {num_taps} | {left} | {said} |"


def _brief(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1][:160].replace("|", "/")


def main() -> None:
    """Run one family, or each in a separate process: llama.cpp may end it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if len(options.families) == 1:
        with tempfile.TemporaryDirectory() as scratch:
            print(case(options.checkout, options.families[0], Path(scratch)), flush=True)
        return
    print("| family | taps found | not shown | verdict |\n|---|---:|---|---|", flush=True)
    for family in options.families:
        command = [sys.executable, "-m", "tests.benchmarks.llamacpp_families", str(options.checkout), family]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
        except subprocess.TimeoutExpired:
            print(f"| {family} | | | not ended in 400 s |", flush=True)
            continue
        line = f"| {family} | | | {_brief(done.stderr)} |" if done.returncode else done.stdout.splitlines()[-1]
        print(line, flush=True)


if __name__ == "__main__":
    main()
