"""The importance matrix of a model: how large the inputs of each weight are, which llama.cpp's quantiser weighs by.

Source: `IMatrixCollector` in llama.cpp's tools/imatrix: the mean square of each input over the tokens of a text.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from harness.extensions.llamacpp.gguf.names import gguf_name
from harness.extensions.quant.forward import hf_distributions
from harness.oracle.model import HFModel

Importance = Mapping[str, torch.Tensor]
"""By GGUF's name of a weight: [inputs] float32."""


def importance_of(hf: HFModel, sequences: Sequence[Sequence[int]]) -> Importance:
    """Return the mean square of each input of each linear layer over some tokens.

    The token ids are other ones than those that the cost is measured on.
    """
    sums: dict[str, torch.Tensor] = {}
    with _watched(hf, sums):
        hf_distributions(hf, sequences)
    return {name: total / sum(map(len, sequences)) for name, total in sums.items()}


@contextmanager
def _watched(hf: HFModel, sums: dict[str, torch.Tensor]) -> Iterator[None]:
    with ExitStack() as hooks:
        for path, part in hf.model.named_modules():
            name = gguf_name(f"{path}.weight") if isinstance(part, nn.Linear) else None
            if name is not None:
                hook = part.register_forward_pre_hook(partial(_add_squares, sums, name))
                hooks.callback(hook.remove)
        yield


def _add_squares(sums: dict[str, torch.Tensor], name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
    squares = inputs[0].float().square().flatten(0, -2).sum(dim=0)
    sums[name] = sums[name] + squares if name in sums else squares
