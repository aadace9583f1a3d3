"""The steps, in the order of their worth: what a call has no time for is what comes last."""

import sys
from dataclasses import dataclass

PYTHON = (sys.executable,)
_PYTEST = (
    "-q", "-p", "no:cacheprovider",
    # Whatever plugins the machine has, and whatever they warn of, the tests are to run.
    "-p", "no:benchmark", "-o", "filterwarnings=default", "--continue-on-collection-errors",
)  # fmt: skip
TRITON = ("--engine-option", "attention_backend=triton")
WATCHED = (*TRITON, "--engine-option", "watch_graphs=true")
GPU = ("--device", "cuda")
SCHEDULES = "plain,chunked,batched,mixed,prefix-hit,forked,preempted,rewound,speculative"
DTYPES = ("float32", "bfloat16", "float16")
_KERNEL_TESTS = "tests/unit/reference_engine/fast/kernels"
_GRAPH_TESTS = "tests/unit/reference_engine/fast/test_graphs.py"

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


def _harness(*words: str) -> Command:
    return (*PYTHON, "-c", "from harness.cli import main; main()", *words)


def _pytest(*words: str) -> Command:
    return (*PYTHON, "-m", "pytest", *_PYTEST, *words)


def _check(*words: str) -> Command:
    return _harness("check", *GPU, *words)


def _bench(*words: str) -> Command:
    return _harness("bench", "engine", *GPU, "--dtype", "bfloat16", *TRITON, "--format", "json", *words)


def _real_size(*words: str) -> Command:
    return (*PYTHON, "-m", "tests.benchmarks.real_sizes", *GPU, "--engines", "triton", *words)


def _sanitizer(tool: str, file: str) -> Command:
    """Watch a file of the kernels' tests, but for those of large caches: a sanitizer slows a kernel hundredfold."""
    tests = _pytest("-n", "0", "-x", "-m", "gpu and not slow", f"{_KERNEL_TESTS}/{file}")
    return ("compute-sanitizer", "--tool", tool, "--target-processes", "all", *tests)


STEPS = (
    Step(name="machine", usual_s=5, limit_s=30, needs="nvidia-smi", fills="the head of every page", commands=(
        ("nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC,MEMORY"), (*PYTHON, "-m", "pip", "list"), ("lscpu",),
    )),
    Step(name="decode", usual_s=60, limit_s=90, fills="engine.md", commands=((
        *PYTHON, "-m", "tests.benchmarks.gpu_steps", 'decode("qwen3-8b", [1, 16])', 'kernels("qwen3-8b")',
        'decode("qwen3-8b", [1, 16], async_scheduling=True)',
        'decode("qwen3-0.6b", [1, 16, 256])', 'host("qwen3-0.6b", 1)', 'host("qwen3-0.6b", 256)',
    ),)),
    Step(name="peers", usual_s=150, limit_s=240, fills="engine.md", commands=(
        # Compiling 36 layers for each shape takes most of it: the other peers have a step of their own below.
        _bench("--shape", "qwen3-8b", "--repeats", "1", "--requests", "2", "--prompt-tokens", "128",
               "--peer", "gpt-fast"),
    )),
    Step(name="real-size", usual_s=90, limit_s=120, fills="checks.md", commands=(
        _real_size("--shapes", "Qwen3-8B, 8 layers", "--dtypes", "bfloat16,float32", "--tokens", "512",
                   "--schedules", "plain,chunked,batched", "--products", "as usual,float32"),
    )),
    Step(name="graphs", usual_s=40, limit_s=60, is_timed=False, fills="checks.md", commands=(
        _pytest("-n", "0", "-m", "gpu", _GRAPH_TESTS),
        *(_check("--dtype", dtype, *TRITON, "--taps", "logits", "--schedule", SCHEDULES) for dtype in DTYPES),
        *(_check("--dtype", dtype, *WATCHED, "--schedule", SCHEDULES) for dtype in DTYPES),
    )),
    Step(name="fuzz", usual_s=40, limit_s=60, is_timed=False, fills="checks.md", commands=(
        _harness("fuzz", "run", *GPU, "--dtype", "bfloat16", "--seconds", "30", *TRITON),
        _harness("fuzz", "invariance", *GPU, "--dtype", "bfloat16", "--seconds", "30", *TRITON),
    )),
    Step(name="sanitizer", usual_s=45, limit_s=60, needs="compute-sanitizer", is_timed=False, fills="checks.md",
         commands=tuple(
        _sanitizer(tool, file) for tool in ("racecheck", "memcheck")
        for file in ("test_paged_decode.py", "test_paged_prefill.py", "test_fused_kernels.py", "test_row_product.py")
    )),
    Step(name="profile", usual_s=45, limit_s=60, fills="profiles.md", commands=(
        _real_size("profile", "--shapes", "Qwen3-8B, 8 layers", "--dtypes", "bfloat16", "--tokens", "512",
                   "--out", "{out}/profile"),
    )),
    Step(name="checks", usual_s=60, limit_s=190, is_timed=False, fills="checks.md", commands=tuple(
        _check("--dtype", dtype, "--schedule", SCHEDULES, "--engine-option", f"attention_backend={backend}")
        for dtype in DTYPES for backend in ("paged", "triton")
    )),
    Step(name="tests", usual_s=120, limit_s=190, is_timed=False, fills="checks.md", commands=(
        _pytest("-n", "6", "-m", "gpu and not slow", "tests/unit/reference_engine", "tests/integration"),
    )),
    Step(name="other-peers", usual_s=150, limit_s=400, fills="engine.md", commands=(
        _bench("--shape", "qwen3-8b", "--repeats", "1", "--requests", "2", "--prompt-tokens", "128",
               "--peer", "hf-static", "--peer", "hf-generate"),
    )),
    Step(name="other-engines", usual_s=60, limit_s=190, is_timed=False, fills="checks.md", commands=(
        _check("--dtype", "bfloat16", "--schedule", "tensor-parallel", *TRITON),
        (*PYTHON, "-m", "tests.benchmarks.gpu_steps", "one_rank()"),
        *(_check("--engine", "hf", "--dtype", dtype) for dtype in DTYPES),
    )),
    Step(name="faults", usual_s=90, limit_s=190, is_timed=False, fills="checks.md", commands=(
        _harness("faults", *GPU, "--category", "cache", "--engine", "reference", "--format", "json"),
    )),
    Step(name="other-steps", usual_s=60, limit_s=150, fills="engine.md", commands=((
        *PYTHON, "-m", "tests.benchmarks.gpu_steps", 'decode("qwen3-8b", [1], fused_kernels=False)',
        'decode("qwen3-8b", [1, 16], kv_cache_dtype="float8_e4m3fn")', 'workload("qwen3-0.6b")',
        'decode("qwen3-8b", [1], attention_backend="paged")', 'decode("qwen3-0.6b", [1, 16], compile_layers=True)',
    ),)),
    Step(name="float8", usual_s=150, limit_s=300, fills="engine.md", commands=(
        _bench("--shape", "qwen3-8b", "--repeats", "1", "--requests", "2", "--float8-weights", "--peer", "reference"),
    )),
    Step(name="bench", usual_s=40, limit_s=120, fills="engine.md", commands=(
        _bench("--shape", "142m", "--peer", "hf-generate", "--peer", "hf-continuous"),
    )),
    Step(name="kernels", usual_s=60, limit_s=120, fills="engine.md", commands=(
        (*PYTHON, "tests/benchmarks/gpu_kernels.py", "roofs", "products", "fused", "decode", "prefill"),
    )),
)  # fmt: skip


def _pretended(*words: str) -> Command:
    return (*PYTHON, "-m", "tests.pretended_gpu", *words)


def _pretended_pytest(*words: str) -> Command:
    return _pytest("-n", "0", "-p", "tests.pretended_gpu.plugin", "-m", "gpu", *words)


def _pretended_real_size(*words: str) -> Command:
    return _pretended("tests.benchmarks.real_sizes", *GPU, "--shapes", "tiny", "--tokens", "12", *words)


_SMALL = ("--schedule", "plain", "--model", "llama-tiny", "--token-ids", "5,6,7", "--max-new-tokens", "2")
_SMALL_ENGINE = "max_model_len=32, max_num_seqs=2, num_blocks=16"
PRETENDED_STEPS = (
    Step(name="machine", usual_s=1, limit_s=60, commands=((*PYTHON, "-m", "pip", "--version"),)),
    Step(name="decode", usual_s=1, limit_s=400, commands=((
        *_pretended("tests.benchmarks.gpu_steps"), "sizes(prompt_len=9, num_tokens=4)",
        f'decode("tiny", [1, 2], {_SMALL_ENGINE})', f'decode("tiny", [1, 2], async_scheduling=True, {_SMALL_ENGINE})',
        f'host("tiny", 1, {_SMALL_ENGINE})',
    ),)),
    Step(name="peers", usual_s=1, limit_s=600, commands=(
        _pretended("bench", "engine", *GPU, "--shape", "tiny", "--peer", "gpt-fast", "--peer", "hf-static", "--repeats",
                   "1", "--requests", "1", "--batch-size", "2", "--prompt-tokens", "9", "--dtype", "bfloat16", *TRITON),
    )),
    Step(name="real-size", usual_s=1, limit_s=600, commands=(
        _pretended_real_size("--engines", "triton", "--dtypes", "bfloat16,float32", "--schedules", "plain,chunked"),
    )),
    Step(name="graphs", usual_s=1, limit_s=600, is_timed=False, commands=(
        _pretended_pytest(_GRAPH_TESTS),
        _pretended("check", *GPU, *_SMALL, "--dtype", "float32", *TRITON, "--taps", "logits"),
        _pretended("check", *GPU, *_SMALL, "--dtype", "float32", *WATCHED),
    )),
    Step(name="fuzz", usual_s=1, limit_s=400, is_timed=False, commands=(
        _pretended("fuzz", "run", *GPU, "--dtype", "float32", "--seconds", "40"),
    )),
    Step(name="sanitizer", usual_s=1, limit_s=60, needs="compute-sanitizer", is_timed=False, commands=(("true",),)),
    Step(name="profile", usual_s=1, limit_s=600, commands=(
        _pretended_real_size("profile", "--engines", "reference", "--dtypes", "bfloat16", "--out", "{out}/profile"),
    )),
    Step(name="checks", usual_s=1, limit_s=400, is_timed=False, commands=tuple(
        _pretended("check", *GPU, *_SMALL, "--dtype", "float32", "--engine-option", f"attention_backend={backend}")
        for backend in ("paged", "triton")
    )),
    Step(name="tests", usual_s=1, limit_s=400, is_timed=False, commands=(
        _pretended_pytest("tests/unit/reference_engine/test_engine.py"),
    )),
)  # fmt: skip
"""The same run on a device that is not there, on small shapes: what it shows is that the run itself works."""
