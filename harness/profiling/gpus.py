"""What GPUs can do at best, by their data sheets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import Code, HarnessError

_GB, _TB_PER_S, _TFLOPS = 10**9, 10**12, 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """By the dtype of the products; what is not named the GPU has no unit for."""
    source: str


def _gpu(
    name: str, memory: int, bandwidth: float, half: float, single: float, source: str, *, eighth: float | None = None
) -> Gpu:
    """Return a GPU of so many GB, TB/s and TFLOP/s in 16 bits, in float32, in 8 bits."""
    rates = {"bfloat16": half, "float16": half, "float32": single, **({} if eighth is None else {"float8": eighth})}
    return Gpu(
        name=name,
        memory_bytes=memory * _GB,
        bytes_per_s=bandwidth * _TB_PER_S,
        flops_per_s={dtype: rate * _TFLOPS for dtype, rate in rates.items()},
        source=source,
    )


_HOPPER, _AMPERE = "NVIDIA H100 data sheet", "NVIDIA A100 data sheet"
_ALL = (
    _gpu("A10", 24, 0.6, 125, 31.2, "NVIDIA A10 data sheet"),
    _gpu("A100-PCIE", 80, 1.935, 312, 19.5, _AMPERE),
    _gpu("A100-SXM", 80, 2.039, 312, 19.5, _AMPERE),
    _gpu("H100-PCIE", 80, 2.0, 756, 51, _HOPPER, eighth=1513),
    _gpu("H100-SXM", 80, 3.35, 989, 67, _HOPPER, eighth=1979),
    _gpu("H200", 141, 4.8, 989, 67, "NVIDIA H200 data sheet", eighth=1979),
    _gpu("L4", 24, 0.3, 121, 30.3, "NVIDIA L4 data sheet", eighth=242.5),
    _gpu("L40S", 48, 0.864, 362, 91.6, "NVIDIA L40S data sheet", eighth=733),
    _gpu("MI300X", 192, 5.3, 1307, 163.4, "AMD Instinct MI300X data sheet", eighth=2615),
)
GPUS = {gpu.name: gpu for gpu in _ALL}
_SHORT = {"A100": "A100-SXM", "H100": "H100-SXM"}
_REPORTED = {
    r"NVIDIA A10": "A10",
    r"NVIDIA A100-PCIE-80GB|NVIDIA A100 80GB PCIe": "A100-PCIE",
    r"NVIDIA A100-SXM4-80GB": "A100-SXM",
    r"NVIDIA H100 PCIe": "H100-PCIE",
    r"NVIDIA H100 80GB HBM3": "H100-SXM",
    r"NVIDIA H200": "H200",
    r"NVIDIA L4": "L4",
    r"NVIDIA L40S": "L40S",
    r"AMD Instinct MI300X(?: VF)?": "MI300X",  # VF: the whole card, passed to a virtual machine
}
"""What a driver calls a card, and its data sheet; many cards have like names."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name, in letters of any case.

    Raises:
        HarnessError: BAD_OPTION: it is not in the table.
    """
    key = name.upper()
    gpu = GPUS.get(_SHORT.get(key, key))
    if gpu is None:
        what = f"no figures are known of the GPU {name!r}"
        raise HarnessError(Code.BAD_OPTION, what, where="--gpu", expected=", ".join(GPUS), actual=name)
    return gpu


def reported_gpu(name: str) -> Gpu | None:
    """Return the GPU of a driver's name, such as `NVIDIA H100 80GB HBM3`; None if its data sheet is not known."""
    return next((GPUS[key] for pattern, key in _REPORTED.items() if re.fullmatch(pattern, name)), None)
