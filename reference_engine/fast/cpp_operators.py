"""The C++ kernels as operators of torch: `reference_engine_cpu::paged_decode` and so on, compiled once a machine.

The operators and their arguments are those of `triton_operators`, so that one decoder reads either. Compiling takes
some five seconds; the library is kept in the user's cache folder under a name that says what it was made of. Compiled
and loaded when the backend `cpp` is opened, not before.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch

from reference_engine.errors import DeviceError

__all__ = ["cache_folder", "find_compiler", "load_operators"]

SOURCE = Path(__file__).parent / "kernels" / "cpu.cpp"
HEADERS = SOURCE.with_suffix("")
"""The folder of what it includes."""
NAMES = ("rms_norm", "add_norm", "norm_rotate", "silu_mul", "linear", "store_kv", "paged_decode", "decode_layers")
OPTIONS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fopenmp-simd")
"""The last one allows the loops that say so to become vectors; no other threads than torch's are started."""
EXACTNESS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""A product is rounded before it is added, as torch's operations do; nobody reads errno or floating-point traps."""
VECTORS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
}
"""By torch's own choice of instructions, which the variable ATEN_CPU_CAPABILITY can lower; others: the compiler's."""
TIME_LIMIT_S = 600
HINT = "Set the variable CXX to a compiler for C++20, or choose attention_backend=paged."


def cache_folder() -> Path:
    """Return where this package keeps what it has made for the machine; it need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reference_engine"


def find_compiler() -> list[str]:
    """Return the command that compiles C++: that of the variable CXX, or the system's; empty if there is none."""
    command = shlex.split(os.environ.get("CXX", ""))
    for name in command[:1] or ["c++", "g++", "clang++"]:
        if shutil.which(name) is not None:
            return command or [name]
    return []


@cache
def load_operators() -> SimpleNamespace:
    """Return the operators by name, after compiling them if this machine has not done so yet.

    Raises:
        DeviceError: there is no compiler, or it failed.
    """
    torch.ops.load_library(_compiled())
    operators = {name: getattr(torch.ops.reference_engine_cpu, name).default for name in NAMES}
    for name in ("store_kv", "paged_decode"):  # so that compiled layers can call them
        torch.library.register_fake(f"reference_engine_cpu::{name}", lambda *args, **kwargs: None)
    return SimpleNamespace(**operators)


def _compiled() -> Path:
    """Return the compiled library, from the cache if it is there."""
    compiler = find_compiler()
    if not compiler:
        raise DeviceError("there is no C++ compiler", hint=HINT)
    torch_folder = Path(torch.__file__).parent
    include, libraries = torch_folder / "include", torch_folder / "lib"
    vectors = VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())
    command = [
        *compiler, *OPTIONS, *EXACTNESS, *vectors, f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        str(SOURCE), f"-L{libraries}", "-ltorch", "-ltorch_cpu",
    ]  # fmt: skip
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *sorted(HEADERS.glob("*.h")))]
    made_of = "\n".join([*sources, torch.__version__, *command])
    library = cache_folder() / f"kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.is_file():
        try:
            _compile(command, library)
        except (OSError, subprocess.SubprocessError) as error:
            raise DeviceError(
                "the C++ kernels could not be compiled",
                where=command[0],
                actual=(getattr(error, "stderr", None) or str(error)).strip()[-1000:],
                hint=HINT,
            ) from error
    return library


def _compile(command: list[str], library: Path) -> None:
    """Write the library in one go: other processes may be doing the same."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=TIME_LIMIT_S)
        made.replace(library)
