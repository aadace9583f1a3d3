"""Experts whose weights were read from the quantised checkpoint with one mistake, in some or all of their products."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain

import torch

from harness.extensions.quantised.checkpoint import QuantisedCheckpoint
from harness.extensions.quantised.codes import Codes
from harness.extensions.quantised.config import InputScheme
from harness.extensions.quantised.conventions import input_scheme, quantised_checkpoint
from harness.extensions.quantised.inputs import by_rows, ways_to_round
from harness.extensions.quantised.misread import MISREADINGS
from harness.judge.compare.conventions.experts import QuantisedInputs
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.experts.mixture import Mixture, changed, mixture_of

_MOST_ELEMENTS = 1 << 26
"""Of the weights of all experts that are looked at."""
_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_TOGETHER = (_PRODUCTS, _PRODUCTS[:2], *((product,) for product in _PRODUCTS))
"""Products in which a loader may make the same mistake."""
Weights = Mapping[int, torch.Tensor]
"""By expert: [O, I] float32."""


def misread_experts(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The weights of the chosen experts, or of some of their products, were read with one mistake.

    Causes: experts of a quantised checkpoint whose `gate_proj`, `up_proj` and `down_proj` were all, or some of them,
    read with one mistake of `misread_weight`; gate and up with each other's scales.
    """
    mixture, checkpoint = mixture_of(wrong), quantised_checkpoint(wrong.hf)
    if mixture is None or checkpoint is None:
        return
    codes = _codes(wrong, mixture, checkpoint)
    if codes is None:
        return
    misread = {product: _misread(product, codes) for product in _PRODUCTS}
    scheme = input_scheme(wrong.hf, wrong.operation)
    for products in _TOGETHER:
        for cause in misread[products[0]]:
            if all(cause in misread[product] for product in products):
                weights = {product: misread[product][cause] for product in products}
                whose = "" if products == _PRODUCTS else f"{' and '.join(products)} of "
                for output in _outputs(mixture, weights, scheme):
                    yield Hypothesis(cause=f"in {whose}the experts, {cause}", output=output)


def _codes(
    wrong: WrongOperation, mixture: Mixture, checkpoint: QuantisedCheckpoint
) -> dict[str, dict[int, Codes]] | None:
    """Return the codes of each product of the chosen experts; None if they are not all there, or are too large."""
    names = {
        (product, expert): f"{wrong.operation.module}.{expert}.{product}.weight"
        for product in _PRODUCTS
        for expert in mixture.chosen.unique().tolist()
    }
    weights = [checkpoint.weights.get(name) for name in names.values()]
    sizes = [torch.Size(item.shape).numel() for item in weights if item is not None]
    if len(sizes) < len(names) or sum(sizes) > _MOST_ELEMENTS:
        return None
    codes: dict[str, dict[int, Codes]] = {product: {} for product in _PRODUCTS}
    for (product, expert), name in names.items():
        codes[product][expert] = checkpoint.codes(name)
    return codes


def _misread(product: str, codes: Mapping[str, Mapping[int, Codes]]) -> dict[str, Weights]:
    """Return what the weights of one product become by each mistake."""
    by_cause: dict[str, dict[int, torch.Tensor]] = {}
    for expert, expert_codes in codes[product].items():
        right = expert_codes.dequantised()
        others = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        theirs = codes[others[product]][expert] if product in others else None
        of_others = [] if theirs is None else [(f"the scales are those of {others[product]}", theirs.scale)]
        for cause, wrong in chain(
            *(misread(expert_codes) for misread in MISREADINGS),
            ((name, replace(expert_codes, scale=scale)) for name, scale in of_others),
        ):
            weight = wrong.dequantised()
            if weight.shape == right.shape and bool(weight.isfinite().all()) and not torch.equal(weight, right):
                by_cause.setdefault(cause, {})[expert] = weight
    return {cause: weights for cause, weights in by_cause.items() if len(weights) == len(codes[product])}


def _outputs(mixture: Mixture, weights: Mapping[str, Weights], scheme: InputScheme | None) -> Iterator[torch.Tensor]:
    """Yield what the module gives with other weights: with inputs as they are, and as the checkpoint declares them."""

    def change(name: str, parameter: torch.Tensor) -> torch.Tensor:
        changed_parameter = parameter.clone()
        for product, by_expert in weights.items():
            for expert, weight in by_expert.items():
                _put(changed_parameter[expert], name, product, weight)
        return changed_parameter

    way = None if scheme is None else next(ways_to_round(by_rows(scheme), None, mixture.wrong.dtype))
    with mixture.wrong.hf.exactly(), changed(mixture.module, change):
        for inputs in (None, way)[: 1 if way is None else 2]:
            with nullcontext() if inputs is None else QuantisedInputs(inputs.steps, inputs.scheme.group or 1):
                yield mixture.run()


def _put(target: torch.Tensor, name: str, product: str, weight: torch.Tensor) -> None:
    """Put a product's weight where a parameter of HF's has it: gate and up are one, the first half and the second."""
    if name == "gate_up_proj" and product != "down_proj" and target.shape == (2 * weight.shape[0], weight.shape[1]):
        target[slice(0, len(weight)) if product == "gate_proj" else slice(len(weight), None)] = weight.to(target)
    elif name == product and target.shape == weight.shape:
        target.copy_(weight)
