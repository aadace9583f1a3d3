"""python -m tests.pretended_gpu ARGUMENTS: a command of the harness on the pretended device."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from .device import install

if __name__ == "__main__":
    install()
    from harness.cli.main import run

    run(sys.argv[1:])
