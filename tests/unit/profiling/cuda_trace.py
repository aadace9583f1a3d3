"""A trace of a GPU, built by hand from the schema that torch.profiler (Kineto) writes: no GPU has made it.

Times are microseconds. Stream 7 computes, stream 20 communicates. Each entry of `KERNELS` is a launching call and its
kernel, so that every figure of the tests can be checked by eye.
"""

import gzip
import json
from pathlib import Path
from typing import Any

LAUNCH_US = 5.0
KERNELS = (
    # correlation, name, launch begins, stream, kernel begins, kernel takes
    (1, "ampere_sgemm_128x64_tn", 30.0, 7, 40.0, 50.0),
    (2, "ampere_sgemm_128x64_tn", 220.0, 7, 230.0, 100.0),  # launched 130 us after the one before it has ended
    (3, "elementwise_kernel", 240.0, 7, 330.02, 50.0),  # queued, 20 ns later
    (4, "elementwise_kernel", 250.0, 7, 400.0, 4.0),  # queued, 19.98 us later: it waits for something
    (5, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 260.0, 20, 300.0, 60.0),
)
MODULES = (("Model_0", 0.0, 1000.0), ("Linear_0", 10.0, 100.0), ("Linear_1", 200.0, 200.0))


def cuda_trace(rank: int = 0, *, shift_us: float = 0.0, kernels: Any = KERNELS) -> dict[str, Any]:
    """Return the document of one rank; `shift_us` makes the kernels of communication end so much later."""
    process = 100 + rank
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#3",
            "pid": process,
            "tid": 1,
            "ts": 0.0,
            "dur": 990.0,
        }
    ]
    for name, begin, duration in MODULES:
        python_call = {"ph": "X", "cat": "python_function", "name": f"nn.Module: {name}", "pid": process, "tid": 1}
        events.append(python_call | {"ts": begin, "dur": duration, "args": {"Python id": len(events)}})
    for begin in (20.0, 210.0):
        operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": process, "tid": 1, "ts": begin, "dur": 80.0}
        events.append(operator | {"args": {"Input Dims": [[128, 256], [256, 512]], "External id": len(events)}})
    for correlation, name, launched, stream, begin, duration in kernels:
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": process, "tid": 1}
        events.append(call | {"ts": launched, "dur": LAUNCH_US, "args": {"correlation": correlation}})
        longer = shift_us if "nccl" in name else 0.0
        where = {"device": rank, "stream": stream, "correlation": correlation}
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": stream}
        events.append(kernel | {"ts": begin, "dur": duration + longer, "args": where})
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "built by hand"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    }


def write_ranks(folder: Path) -> list[Path]:
    """Write the traces of two ranks, the second of which communicates 30 us longer."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in (0, 1):
        path = folder / f"rank{rank}.pt.trace.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump(cuda_trace(rank, shift_us=30.0 * rank), file)
        paths.append(path)
    return paths
