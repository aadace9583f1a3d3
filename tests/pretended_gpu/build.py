"""Compiles the device for the torch that is installed: a minute, once for each torch and source."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")


def library() -> Path:
    """Return the compiled device, from the cache where it is there.

    Raises:
        RuntimeError: there is no g++, or it fails; the message is the compiler's.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    made = Path(os.environ.get("HARNESS_CACHE", Path.home() / ".cache" / "inference-harness")) / f"gpu-{digest}.so"
    if not made.exists():
        compile_into(made)
    return made


def compile_into(made: Path) -> None:
    """Compile into a file of another name first: another process may be about it, too."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the pretended GPU is compiled, and there is no g++: install it")
    torch_folder = Path(torch.__file__).parent
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        part = Path(folder) / made.name
        includes = [f"-I{torch_folder}/include", f"-I{torch_folder}/include/torch/csrc/api/include"]
        libraries = [f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
        flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
        command = [compiler, *flags, *includes, str(SOURCE), "-o", str(part), *libraries]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the pretended GPU does not compile:\n{done.stderr[-3000:]}")
        part.rename(made)
