"""SGLang without its kernels on a CPU: every tap passes under six schedules, and bugs put into it are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.vllm_families import write_checkpoint

pytest.importorskip("sglang", reason="needs SGLang: docs/adapters/README.md")

pytestmark = pytest.mark.slow
ADAPTERS = Path(__file__).parents[2] / "docs" / "adapters" / "sglang"
PROGRAM = """
import os, sys
from pathlib import Path
import harness
from engine import open_engine
{bug}
result = harness.check(
    open_engine(Path({model!r}), dtype={dtype!r}, device="cpu", options={{}}), model={model!r}, dtype={dtype!r},
    prompts=[list(range(3, 50)), list(range(60, 71)), list(range(100, 142))], max_new_tokens=30,
    schedules={schedules!r},
)
for run in result.runs:
    first = run.first_divergence
    print(run.schedule, run.outcome, run.coverage.missing, *run.coverage.not_offered, "", sep="|")
    print("" if first is None else f"{{first.tap}}: {{first.explanation.cause}}")
sys.stdout.flush()
os._exit(0)  # a process that served Gemma 3 never ends by itself
"""
"""In a process of its own: SGLang's configuration and groups are of the whole process."""
EVERY = ["plain", "chunked", "batched", "mixed", "prefix-hit", "preempted"]


def check(model, *, dtype="float32", bug="", schedules=("plain",)):
    """Return what is printed of each run: its outcome, and its first divergence."""
    program = PROGRAM.format(model=str(model), dtype=dtype, bug=bug, schedules=list(schedules))
    done = subprocess.run([sys.executable, "-c", program], cwd=ADAPTERS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-2 * len(schedules) :]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("qwen3-tiny", "float32"), ("qwen3-tiny", "float16"), ("qwen2-tiny", "float32"), ("gemma3-tiny", "float32")],
)
def test_sglang_passes_with_every_tap(checkpoints, model, dtype):
    lines = check(checkpoints / model, dtype=dtype, schedules=EVERY)
    assert lines[::2] == [f"{schedule}|pass|0|" for schedule in EVERY]


def test_granite_passes_with_every_tap(tmp_path):
    write_checkpoint("granite", tmp_path)
    outcome, _ = check(tmp_path, dtype="bfloat16")
    assert outcome == "plain|pass|0|"


def test_the_soft_cap_of_gemma2_is_left_out_on_a_cpu(tmp_path):
    """SGLang 0.5.23: its backend `torch_native` never reads `logit_cap`; reports/cpu/sglang.md."""
    write_checkpoint("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": config["hidden_activation"]}))
    outcome, first = check(tmp_path)
    assert outcome == "plain|mismatch|0|"
    assert first == "model.layers.0.attention: the soft cap of the scores is left out"


def test_the_tied_head_of_a_mixture_is_not_loaded(checkpoints):
    """A bug of SGLang 0.5.23, which reports/cpu/sglang_tied_head.py shows without the harness."""
    outcome, first = check(checkpoints / "qwen3-moe-tiny")
    assert outcome.startswith("plain|mismatch|")
    assert first.startswith("lm_head: ")  # not loaded: zeros, or what the memory holds


ROTARY = """
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
forward = RotaryEmbedding.forward_native
RotaryEmbedding.forward_native = lambda self, positions, *rest, **named: forward(
    self, positions + (len(positions) == 1), *rest, **named)
"""
SCALE = """
from sglang.srt.layers.radix_attention import RadixAttention
build = RadixAttention.__init__
def wrong(self, num_heads, head_dim, scaling, *rest, **named):
    build(self, num_heads, head_dim, (num_heads * head_dim) ** -0.5, *rest, **named)
RadixAttention.__init__ = wrong
"""


@pytest.mark.parametrize(
    ("bug", "tap", "cause"),
    [
        (ROTARY, "model.layers.0.q_rope", "position off by one (+1)"),
        (SCALE, "model.layers.0.attention", "softmax scale is 0.0721688 instead of 0.176777"),
    ],
    ids=["rotary-position", "softmax-scale"],
)
def test_a_bug_in_sglang_is_found_and_named(checkpoints, bug, tap, cause):
    outcome, first = check(checkpoints / "qwen3-tiny", bug=bug)
    assert outcome.startswith("plain|mismatch|")
    assert first.startswith(f"{tap}: ")
    assert cause in first
