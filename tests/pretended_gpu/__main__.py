"""python -m tests.pretended_gpu ARGUMENTS: a command of the harness, or `generate`, on the pretended device."""

import os
import sys
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

from .device import install

if __name__ == "__main__":
    install()
    import reference_engine.cli
    from harness.cli.main import run
    from harness.profiling import profile
    from harness.profiling.roofline import measure_ceilings

    # The roofs of a GPU are measured on tensors that a CPU takes minutes for.
    profile.measure_ceilings = partial(measure_ceilings, num_bytes=1 << 20, matrix_size=64)  # type: ignore[attr-defined]
    run_command = reference_engine.cli.run if sys.argv[1] == "generate" else run
    run_command(sys.argv[1:])
