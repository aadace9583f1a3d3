"""compressed-tensors' forms: a checkpoint is written in its format, and transformers loads and runs that."""

from pathlib import Path
from typing import Any

import torch

from harness.engines.quantised_form import load_quantised
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel, load_model


def compressed_models(
    preset: str, checkpoint: Checkpoint, scratch: Path, group_size: int | None = None
) -> tuple[Any, HFModel]:
    """Return the quantised model, and HuggingFace's own dequantised form of it.

    Args:
        preset: the name that compressed-tensors gives to a scheme.
        checkpoint: the original.
        scratch: folder for the compressed checkpoint.
        group_size: of the weights that share a scale, in place of the preset's.
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
