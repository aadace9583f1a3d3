"""The dtypes that a recording holds, as torch's own."""

import torch

from harness.formats.recording.format import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {short: getattr(torch, name) for name, short in DTYPES.items()}
