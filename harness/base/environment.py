"""The conditions that figures depend on besides inputs: the machine, threads, versions, the revision of the code, CI.

The light recorder imports this module, where only numpy may be installed.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.version import __version__

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
SWITCHES = (
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables that change the kernels torch runs: on a GPU, and on a CPU by hiding instructions."""
PACKAGES = ("torch", "transformers", "triton", "llama-cpp-python")


def environment() -> dict[str, str | int]:
    """Return the conditions that a recording stores: versions, and torch's settings if torch is imported."""
    conditions: dict[str, str | int] = {"python": platform.python_version(), "cores": os.cpu_count() or 0}
    conditions |= _versions(("torch", "transformers"))
    torch = sys.modules.get("torch")
    if torch is not None:
        conditions |= {
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
    return conditions


def describe_environment() -> dict[str, str]:
    """Return the environment as text, with machine and revision: stored in every trace, compared before any gate."""
    conditions = {name: str(value) for name, value in environment().items()}
    conditions |= {"machine": platform.machine(), "harness": __version__}
    return conditions | {"revision": _described(Path.cwd()) or "unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInfo:
    """The machine of a run."""

    device: str
    """The processor's or GPU's name."""
    cpu_flags: tuple[str, ...]
    """The `FLAGS` that the processor has; empty if the system does not report them."""
    num_threads: int
    """Threads of torch, and of peers that have their own."""
    versions: dict[str, str]
    switches: dict[str, str] = field(default_factory=dict)
    """The `SWITCHES` that are set."""

    @property
    def hardware(self) -> str:
        """Return device, threads and flags in one line."""
        return f"{self.device}, {self.num_threads} threads, {' '.join(self.cpu_flags) or 'CPU flags unknown'}"

    @property
    def software(self) -> str:
        """Return the versions and the set switches in one line."""
        return ", ".join(
            [
                *(f"{name} {version}" for name, version in self.versions.items()),
                *(f"{name}={value}" for name, value in self.switches.items()),
            ]
        )


def describe_machine(device: str) -> MachineInfo:
    """Describe the machine; `device` is the timed one."""
    import torch

    cpu = _cpu_info()
    name = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu.get("model name", platform.machine())
    )
    flags = cpu.get("flags", "").split()
    return MachineInfo(
        device=name,
        cpu_flags=tuple(flag for flag in FLAGS if flag in flags),
        num_threads=torch.get_num_threads(),
        versions={"python": platform.python_version(), **_versions(PACKAGES)},
        switches={name: os.environ[name] for name in SWITCHES if name in os.environ},
    )


def own_commit() -> str:
    """Return the commit that this code is of, as git knows it or hatch_build.py wrote it; nothing if neither did."""
    root = Path(__file__).parents[2]
    if (root / ".git").exists():
        return _described(root)
    written = root / "harness" / "commit.txt"
    return written.read_text(encoding="utf-8").strip() if written.is_file() else ""


def _described(folder: Path) -> str:
    """Return the commit of a folder if it is a checkout: of the working folder, the engine's as a rule."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()


def _cpu_info() -> dict[str, str]:
    """Return Linux's facts about the first processor."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def refuse_update(option: str) -> None:
    """Refuse an option that rewrites expectations where the environment variable `CI` is set.

    Raises:
        HarnessError: UPDATE_REFUSED.
    """
    value = os.environ.get("CI", "")
    if value.lower() not in ("", "0", "false"):
        raise HarnessError(
            Code.UPDATE_REFUSED,
            f"{option} is refused where CI is set",
            where="environment variable CI",
            actual=value,
            hint="update on your machine and commit the change",
        )
