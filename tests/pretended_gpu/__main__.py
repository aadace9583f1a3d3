"""python -m tests.pretended_gpu ARGUMENTS: a command on the pretended device.

A command of the harness, `generate` of the reference engine, or a module by its dotted name with arguments of its own.
"""

import os
import runpy
import sys
from functools import partial

os.environ["TRITON_INTERPRET"] = os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled for the device

from .device import install

if __name__ == "__main__":
    install()
    import reference_engine.cli
    from harness.cli.main import run
    from harness.extensions.bench import run as bench
    from harness.profiling import profile
    from harness.profiling.roofline import measure_ceilings

    # The roofs of a GPU are measured on tensors that a CPU takes minutes for.
    small = partial(measure_ceilings, num_bytes=1 << 20, matrix_size=64)
    profile.measure_ceilings = bench.measure_ceilings = small  # type: ignore[attr-defined]
    bench.read_bandwidth = partial(bench.read_bandwidth, num_bytes=1 << 20)
    del sys.argv[0]
    if "." in sys.argv[0]:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        run_command = reference_engine.cli.run if sys.argv[0] == "generate" else run
        sys.exit(run_command(sys.argv if sys.argv[0] != "harness" else sys.argv[1:]))
