"""A model in one of HuggingFace's quantised forms, run as HuggingFace runs it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.engines.hf import quantising
from harness.errors import Code, HarnessError
from harness.extensions.quant.forward import hf_distributions
from harness.extensions.quant.hf.types import HF_TYPES, HFType, check_package
from harness.extensions.quant.text import Sequences
from harness.extensions.quant.type_run import TypeRun, shares
from harness.oracle.model import HFModel


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
