"""Measure `harness diff` on recordings of at least 2 GB, beside a plain read of the files and one pass over the data.

    python tests/benchmarks/diff_speed.py [--gigabytes 2] [--folder /dev/shm] [--dtype float32]

The peak memory is the diff's own: the maximal resident size of a child process, less what it held before it opened the
recordings.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from harness.formats.recording import ModelInfo, Producer, RecordingWriter, RequestInfo, RunInfo

HIDDEN, ROWS, NUM_LAYERS = 2048, 512, 24
SITES = ("input_layernorm", "self_attn.o_proj", "attn_residual", "post_attention_layernorm", "mlp.down_proj", "output")


def write(folder: Path, num_steps: int, dtype: torch.dtype, noise: float) -> int:
    """Write a recording of `num_steps` steps of ROWS rows; return its bytes."""
    tokens = [0] * (num_steps * ROWS)
    writer = RecordingWriter(
        folder,
        RunInfo(
            producer=Producer(name="diff_speed", version="0"),
            model=ModelInfo(id="random", revision=None, config_hash=None, weights_hash=None),
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
        ),
        [RequestInfo(id=0, token_ids=tokens, prompt_length=ROWS)],
    )
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(ROWS, HIDDEN, generator=generator)
    with writer:
        for step in range(num_steps):
            positions = range(step * ROWS, (step + 1) * ROWS)
            writer.begin_step(phase="decode" if step else "prefill", request=[0] * ROWS, position=positions)
            for layer in range(NUM_LAYERS):
                for site in SITES:
                    tensor = base * (1 + noise * torch.randn(ROWS, 1, generator=generator))
                    writer.tap(f"model.layers.{layer}.{site}", tensor.to(dtype))
            writer.end_step()
    return sum(file.stat().st_size for file in folder.iterdir())


def baseline(expected: Path, actual: Path, dtype: torch.dtype) -> tuple[float, float]:
    """Return the seconds of a plain read of both recordings, and of one pass (a sum of squares) over what was read."""
    read = one_pass = total = 0.0
    for file in sorted(expected.glob("*.safetensors")):
        begin = time.perf_counter()
        data = [bytearray(side.stat().st_size) for side in (file, actual / file.name)]
        for buffer, side in zip(data, (file, actual / file.name), strict=True):
            with side.open("rb", buffering=0) as opened:
                opened.readinto(buffer)
        read += time.perf_counter() - begin
        begin = time.perf_counter()
        num_elements = len(data[0]) // dtype.itemsize
        ours, theirs = (torch.frombuffer(side, dtype=dtype, count=num_elements) for side in data)
        for a, b in zip(ours.split(1 << 16), theirs.split(1 << 16), strict=True):
            total += float((a.to(torch.float64) - b.to(torch.float64)).square().sum())
        one_pass += time.perf_counter() - begin
    return read, read + one_pass


CHILD = """
import json, sys, time
from pathlib import Path
import torch
from harness.judge.jobs.diff import run_diff
def peak():  # getrusage would count the parent's peak as well
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
before, begin = peak(), time.perf_counter()
result = run_diff(Path(sys.argv[1]), Path(sys.argv[2]))
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "peak_bytes": peak() - before, "outcome": result.outcome}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    per_step = ROWS * HIDDEN * dtype.itemsize * NUM_LAYERS * len(SITES)
    num_steps = max(2, -(-int(arguments.gigabytes * 1e9) // per_step))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        expected, actual = Path(root) / "expected", Path(root) / "actual"
        num_bytes = write(expected, num_steps, dtype, 0.0) + write(actual, num_steps, dtype, 1e-6)
        print(f"two recordings, {num_bytes / 1e9:.2f} GB together, {num_steps} steps, {arguments.dtype}")
        for _ in range(arguments.repeats):
            read, with_pass = baseline(expected, actual, dtype)
            child = subprocess.run(
                [sys.executable, "-c", CHILD, expected, actual], capture_output=True, text=True, check=True
            )
            figures = json.loads(child.stdout)
            print(
                f"read {num_bytes / read / 1e9:.2f} GB/s, read + one pass {num_bytes / with_pass / 1e9:.2f} GB/s, "
                f"diff {num_bytes / figures['seconds'] / 1e9:.2f} GB/s = {with_pass / figures['seconds']:.2f} of it, "
                f"peak above start {figures['peak_bytes'] / 1e6:.0f} MB, {figures['outcome']}"
            )


if __name__ == "__main__":
    main()
