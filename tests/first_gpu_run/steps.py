"""The steps, in the order of their worth: what a call has no time for is what comes last."""

import sys
from dataclasses import dataclass

PYTHON = (sys.executable,)
HARNESS = (*PYTHON, "-c", "from harness.cli import main; main()")
PYTEST = (
    *PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider",
    # Whatever plugins the machine has, and whatever they warn of, the tests are to run.
    "-p", "no:benchmark", "-o", "filterwarnings=default", "--continue-on-collection-errors",
)  # fmt: skip
TRITON = ("--engine-option", "attention_backend=triton")
GPU = ("--device", "cuda")
CHECK = (*HARNESS, "check", *GPU)
BENCH = (*HARNESS, "bench", "engine", *GPU, "--dtype", "bfloat16", *TRITON, "--format", "json")
SCHEDULES = "plain,chunked,batched,mixed,prefix-hit,forked,preempted,rewound,speculative"
DTYPES = ("float32", "bfloat16", "float16")
_STEPS = "tests/benchmarks/gpu_steps.py"

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Commands that run side by side, each into a file of its own; `{out}` in them is the folder of results.

    Steps that time nothing run beside their neighbours of the same kind, too: one GPU serves many processes.
    """

    name: str
    usual_s: int
    """The step begins only where so many seconds are left."""
    limit_s: int
    """It is ended after so many."""
    commands: tuple[Command, ...]
    needs: str = ""
    """Program without which the step is left out."""
    is_timed: bool = True
    fills: str = ""
    """Page of the GPU's folder in reports/ that takes the figures."""


STEPS = (
    Step(name="machine", usual_s=5, limit_s=30, needs="nvidia-smi", fills="the head of every page", commands=(
        ("nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC,MEMORY"), (*PYTHON, "-m", "pip", "list"), ("lscpu",),
    )),
    Step(name="checks", usual_s=60, limit_s=190, is_timed=False, fills="checks.md", commands=tuple(
        (*CHECK, "--dtype", dtype, "--schedule", SCHEDULES, "--engine-option", f"attention_backend={backend}")
        for dtype in DTYPES for backend in ("paged", "triton")
    )),
    Step(name="tests", usual_s=120, limit_s=190, is_timed=False, fills="checks.md", commands=(
        (*PYTEST, "-n", "6", "-m", "gpu and not slow", "tests/unit/reference_engine", "tests/integration"),
    )),
    Step(name="other-engines", usual_s=60, limit_s=190, is_timed=False, fills="checks.md", commands=(
        (*CHECK, "--dtype", "bfloat16", "--schedule", "tensor-parallel", *TRITON),
        *((*CHECK, "--engine", "hf", "--dtype", dtype) for dtype in DTYPES),
        (*HARNESS, "fuzz", "invariance", *GPU, "--dtype", "bfloat16", "--seconds", "40", *TRITON),
    )),
    Step(name="faults", usual_s=90, limit_s=190, is_timed=False, fills="checks.md", commands=(
        (*HARNESS, "faults", *GPU, "--category", "cache", "--format", "json"),
    )),
    Step(name="decode-8b", usual_s=60, limit_s=150, fills="engine.md", commands=((
        *PYTHON, _STEPS, 'decode("qwen3-8b", [1, 16])', 'kernels("qwen3-8b")',
        'decode("qwen3-8b", [1], fused_kernels=False)', 'decode("qwen3-8b", [1], attention_backend="paged")',
    ),)),
    Step(name="decode-0.6b", usual_s=40, limit_s=120, fills="engine.md", commands=((
        *PYTHON, _STEPS, 'decode("qwen3-0.6b", [1, 16, 256])', 'hf_generate("qwen3-0.6b", [1, 16])',
        'workload("qwen3-0.6b")',
    ),)),
    Step(name="bench", usual_s=40, limit_s=120, fills="engine.md", commands=(
        (*BENCH, "--shape", "142m", "--peer", "hf-generate", "--peer", "hf-continuous"),
    )),
    Step(name="profile", usual_s=60, limit_s=150, fills="profiles.md", commands=(
        (*HARNESS, "profile", *GPU, "--dtype", "bfloat16", *TRITON, "--out", "{out}/profile"),
    )),
    Step(name="kernels", usual_s=60, limit_s=120, fills="engine.md", commands=(
        (*PYTHON, "tests/benchmarks/gpu_kernels.py", "roofs", "products", "fused", "decode", "prefill"),
    )),
    Step(name="sanitizer", usual_s=60, limit_s=90, needs="compute-sanitizer", is_timed=False, fills="checks.md",
         commands=tuple(
        ("compute-sanitizer", "--tool", tool, "--target-processes", "all", *PYTEST, "-n", "0", "-x", "-m", "gpu",
         "tests/unit/reference_engine/fast/kernels/test_paged_decode.py")
        for tool in ("memcheck", "initcheck")
    )),
)  # fmt: skip

_PRETENDED = (*PYTHON, "-m", "tests.pretended_gpu")
_SMALL = ("--dtype", "float32", "--schedule", "plain", "--model", "llama-tiny", "--token-ids", "5,6,7")
_PLUGIN = ("-n", "0", "-p", "tests.pretended_gpu.plugin", "-m", "gpu")
PRETENDED_STEPS = (
    Step(name="machine", usual_s=1, limit_s=60, commands=((*PYTHON, "-m", "pip", "--version"),)),
    Step(name="tests", usual_s=1, limit_s=400, commands=(
        (*PYTEST, *_PLUGIN, "tests/unit/reference_engine/test_engine.py"),
    )),
    Step(name="checks", usual_s=1, limit_s=400, commands=tuple(
        (*_PRETENDED, "check", *GPU, *_SMALL, "--max-new-tokens", "2",
         "--engine-option", f"attention_backend={backend}")
        for backend in ("paged", "triton")
    )),
    Step(name="profile", usual_s=1, limit_s=400, commands=((
        *_PRETENDED, "profile", *GPU, "--model", "llama-tiny", "--prompt-tokens", "4", "--max-new-tokens", "2",
        "--quick", "--out", "{out}/profile",
    ),)),
    Step(name="sanitizer", usual_s=1, limit_s=60, needs="compute-sanitizer", commands=(("true",),)),
)  # fmt: skip
"""The same run on a device that is not there, on small shapes: what it shows is that the run itself works."""
