"""HuggingFace's quantised forms by name, each with the shapes that it takes."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness.campaigns.quant.hf.compressed import compressed_models
from harness.campaigns.quant.hf.torchao import torchao_models
from harness.engines.quantised_form import quantising
from harness.formats.checkpoint.gguf.weights import missing_package
from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True)
class HFType:
    """One form of quantised weights."""

    package: str
    models: Callable[..., tuple[Any, HFModel]]
    """Takes the original and a folder for scratch; returns the quantised model, and the dequantised one."""
    columns: int = 1
    """The inputs of each linear layer must be a multiple of this number."""
    rows: int = 1
    """Its outputs must be a multiple of this number."""


GROUP = 32
"""Weights that share a scale: as in GGUF, and few enough for the small models of the tests."""


def _torchao(module: str, config: str, *, columns: int = 1, rows: int = 1, **options: Any) -> HFType:
    models = partial(torchao_models, module, config, **options)
    return HFType(package="torchao", models=models, columns=columns, rows=rows)


def _compressed(preset: str, group_size: int | None = None) -> HFType:
    models = partial(compressed_models, preset, group_size=group_size)
    return HFType(package="compressed_tensors", models=models, columns=group_size or 1)


HF_TYPES: Mapping[str, HFType] = {
    "torchao-int8": _torchao("torchao.quantization", "Int8WeightOnlyConfig"),
    "torchao-int8-dynamic": _torchao("torchao.quantization", "Int8DynamicActivationInt8WeightConfig"),
    # Int4WeightOnlyConfig of torchao.quantization asks for a package of CUDA kernels: this is its form for CPUs.
    "torchao-int4": _torchao(
        "torchao.prototype.quantization.int4", "PrototypeInt4WeightOnlyConfig", columns=GROUP, rows=16, group_size=GROUP
    ),
    "compressed-w8a8": _compressed("INT8"),
    "compressed-w8a16": _compressed("W8A16", GROUP),
    "compressed-w4a16": _compressed("W4A16", GROUP),
}


def check_package(name: str) -> None:
    """Refuse a type whose package is not installed.

    Raises:
        HarnessError: PACKAGE_MISSING, or QUANTISER_REFUSED: it cannot be imported.
    """
    package = HF_TYPES[name].package
    if importlib.util.find_spec(package) is None:
        absent = ImportError(f"No module named {package!r}")
        raise missing_package(package, absent, hint="pip install 'inference-harness[quant]'")
    with quantising(f"--types {name}"):  # torchao says at import which of its CUDA libraries are not there
        importlib.import_module(package)
