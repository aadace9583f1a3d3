"""HuggingFace's quantised forms on a CPU (torchao, compressed-tensors): how each is made, its shapes, and its run."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.engines.hf import load_quantised, quantising
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.model import missing_package
from harness.extensions.quant.forward import Sequences, TypeRun, hf_distributions, shares
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel, load_model


@torch.no_grad()
def torchao_models(
    module: str, config: str, checkpoint: Checkpoint, scratch: Path, **options: Any
) -> tuple[Any, HFModel]:
    """Return the quantised model, and the original with the dequantised weights.

    `config` is the name of a class in `module`, which takes the options; `scratch` is not used.
    """
    from transformers import TorchAoConfig

    made = getattr(importlib.import_module(module), config)(**options)
    quantised = load_quantised(checkpoint.folder, quantization_config=TorchAoConfig(made))
    exact = load_model(checkpoint, dtype=torch.float32, stays=True)
    for path, part in quantised.named_modules():
        if isinstance(part, nn.Linear) and hasattr(part.weight, "__tensor_flatten__"):
            exact.module(path).weight.copy_(_dequantised(part.weight))  # type: ignore[operator]
    return quantised, exact


def _dequantised(weight: Any) -> torch.Tensor:
    """[out, in] float32.

    The layout of packed weights for a CPU is known to their kernel alone, which has no function that unpacks them. Its
    product with the identity is the weights: each sum has one term that is not zero.
    """
    if type(weight).dequantize is torch.Tensor.dequantize:
        values: torch.Tensor = nn.functional.linear(torch.eye(weight.shape[1]), weight).T
        return values
    return weight.dequantize()  # type: ignore[no-any-return]


def compressed_models(
    preset: str, checkpoint: Checkpoint, scratch: Path, group_size: int | None = None
) -> tuple[Any, HFModel]:
    """Return the quantised model, and HuggingFace's own dequantised form of it.

    `preset` is the name that compressed-tensors gives to a scheme; `group_size` weights share a scale, in place of the
    preset's.
    """
    from transformers import CompressedTensorsConfig

    path = scratch / f"{preset}-{group_size}"
    if not path.exists():
        _write_compressed(checkpoint, path, preset, group_size)
    exact = load_quantised(path, quantization_config=CompressedTensorsConfig(dequantize=True))
    where = torch.device("cpu")
    return load_quantised(path), HFModel(model=exact, checkpoint=checkpoint, dtype=torch.float32, device=where)


@torch.no_grad()
def _write_compressed(checkpoint: Checkpoint, out: Path, preset: str, group_size: int | None) -> None:
    """Round each weight to the nearest step between its group's smallest and largest, with no calibration."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = load_model(checkpoint, dtype=torch.float32, stays=True).model
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group_size is not None:
        scheme.weights.group_size = group_size
    head = [name for name, part in model.named_modules() if part is model.get_output_embeddings()]
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=head))
    for part in model.modules():
        if getattr(part, "quantization_scheme", None) is not None:
            _set_scales(part)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


def _set_scales(part: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = part.quantization_scheme.weights
    groups = part.weight.unflatten(1, (-1, arguments.group_size or part.weight.shape[1]))
    scale, zero_point = calculate_qparams(groups.amin(dim=2), groups.amax(dim=2), arguments)
    part.weight_scale.copy_(scale)
    if hasattr(part, "weight_zero_point"):
        part.weight_zero_point.copy_(zero_point)


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
        raise missing_package(package, absent, hint="pip install -e '.[quant]' in the harness's checkout")
    with quantising(f"--types {name}"):  # torchao says at import which of its CUDA libraries are not there
        importlib.import_module(package)


def run_hf_type(name: str, hf: HFModel, sequences: Sequences, scratch: Path) -> TypeRun:
    """Quantise a model, and run it as HuggingFace does.

    Raises:
        HarnessError: PACKAGE_MISSING, or QUANTISER_REFUSED: a layer's shape does not fit, or the quantiser says no.
    """
    with quantising(f"--types {name}"):
        model, dequantised = hf_type_models(name, hf, scratch)
        parts = [
            (_type_name(parameter), _num_bytes(parameter)) for parameter in model.parameters()
        ]  # before a run, which may unpack
        size, types = sum(num_bytes for _, num_bytes in parts), shares(parts)
        quantised = HFModel(model=model, checkpoint=hf.checkpoint, dtype=torch.float32, device=hf.device)
        return TypeRun(
            name=name,
            size_bytes=size,
            bits_per_weight=8 * size / sum(parameter.numel() for parameter in hf.model.parameters()),
            tensor_types=types,
            exact=dequantised,
            dequantised=hf_distributions(dequantised, sequences),
            engine=hf_distributions(quantised, sequences),
        )


def hf_type_models(name: str, hf: HFModel, scratch: Path) -> tuple[Any, HFModel]:
    """Return a model quantised, and the same with the dequantised weights; raises HarnessError as `run_hf_type`."""
    kind = HF_TYPES[name]
    _check_shapes(name, kind, hf)
    check_package(name)
    with quantising(f"--types {name}"):
        return kind.models(hf.checkpoint, scratch)


def _check_shapes(name: str, kind: HFType, hf: HFModel) -> None:
    layers = dict(_linear_layers(hf))
    if not layers:
        raise _refused(name, "the model has no linear layer to quantise", hf.folder, hint="leave the type out")
    for path, layer in layers.items():
        if layer.in_features % kind.columns or layer.out_features % kind.rows:
            raise _refused(
                name,
                f"the shape of {path} does not fit the type",
                hf.folder,
                expected=f"inputs a multiple of {kind.columns}, outputs of {kind.rows}",
                actual=f"{layer.in_features} inputs, {layer.out_features} outputs",
                hint="--pad fills a small model up; or leave the type out",
            )


def _linear_layers(hf: HFModel) -> Iterator[tuple[str, nn.Linear]]:
    """Go through the layers that are quantised: all but the head."""
    head = hf.model.get_output_embeddings()
    for path, part in hf.model.named_modules():
        if isinstance(part, nn.Linear) and part is not head:
            yield path, part


def _refused(name: str, what: str, folder: Path, **details: Any) -> HarnessError:
    return HarnessError(Code.QUANTISER_REFUSED, what, where=f"--types {name}, {folder}", **details)


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor is made of; a quantised one is made of several."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(_num_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes


def _type_name(tensor: torch.Tensor) -> str:
    """Return the dtype; of a tensor that is made of several, the class that torchao gives it."""
    return type(tensor).__name__ if hasattr(tensor, "__tensor_flatten__") else str(tensor.dtype).removeprefix("torch.")
