"""The trainer built anew from HF's and PEFT's own classes, with its tensors: how a sound trainer rounds.

PEFT rounds the product with the weights, and then its sum with the adapter's product. Autocast rounds the inputs of
each product. HF's model with merged weights does neither.
"""

import copy
import warnings
from typing import Any

from torch import nn

from harness.judge.weights.sources import gathered, plain_name
from harness.oracle.model import HFModel

_ADAPTER_STATE = ("scaling", "merged_adapters", "_active_adapter", "_disable_adapters")
"""What a layer of PEFT's holds besides its tensors."""


def replica(module: nn.Module, hf: HFModel) -> HFModel:
    """Return HF's model with a module's own tensors, in their dtypes, and with its adapters as they are.

    What was changed in the module's code or hooked to it is not in it. Tensors are shared with the module.

    Args:
        module: of the same parameters as the model's, with PEFT's adapters or without.
        hf: the named model.
    """
    shared = {id(item): nn.Parameter(item.detach(), requires_grad=False) for item in hf.model.parameters()}
    model = copy.deepcopy(hf.model, shared)
    own: Any = module
    if getattr(own, "peft_config", None):
        own = own.get_base_model()  # which has the adapters in it
        _add_adapters(model, module, own)
    tensors = {plain_name(name): gathered(tensor) for name, tensor in own.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name].to(parameter.device)
    attention = getattr(getattr(own, "config", None), "_attn_implementation", None)
    if attention is not None:
        model.set_attn_implementation(attention)
    built = HFModel(model=model.eval(), checkpoint=hf.checkpoint, dtype=hf.dtype, device=hf.device)
    built.graph = hf.graph
    return built


def _add_adapters(model: Any, module: Any, own: nn.Module) -> None:
    from peft import get_peft_model

    (first, config), *others = copy.deepcopy(module.peft_config).items()
    with warnings.catch_warnings(action="ignore"):  # of adapters that are not initialised: their values come later
        wrapped = get_peft_model(model, config, first)
        for name, config in others:
            wrapped.add_adapter(name, config)
    for path, layer in own.named_modules():
        state = {name: value for name, value in vars(layer).items() if name in _ADAPTER_STATE}
        vars(model.get_submodule(plain_name(path))).update(copy.deepcopy(state))
