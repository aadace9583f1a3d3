"""What each part of a model costs in a type: its weights are exchanged for the quantised ones, all others stay.

The cost is exact: one forward over the text for each part.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.extensions.quant.forward import Sequences, kl, log_probabilities
from harness.extensions.quant.result import PartCost
from harness.formats.taps import layer_of, prefix_of, site_of
from harness.oracle.model import HFModel


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """A weight that quantising changes; tied weights are one."""

    name: str
    places: tuple[tuple[nn.Module, str], ...]
    """Modules of the original that have it, each with its own name for it."""
    original: nn.Parameter
    changed: nn.Parameter


def _layer(weight: str) -> str:
    return prefix_of(weight).removesuffix(".") or weight


SPLITS: Mapping[str, Callable[[str], str]] = {"layers": _layer, "kinds": site_of, "weights": str}
"""How weights are put together, by name: what the part of a weight is called."""


def check_splits(names: str) -> list[str]:
    """Return the names of a comma list.

    Raises:
        HarnessError: BAD_OPTION.
    """
    splits = [name.strip() for name in names.split(",") if name.strip()]
    for name in splits:
        if name not in SPLITS:
            what = f"a model is not split into {name!r}"
            expected = ", ".join(SPLITS)
            raise HarnessError(Code.BAD_OPTION, what, where="--parts", expected=expected, actual=name)
    return splits


@torch.no_grad()
def part_costs(
    hf: HFModel,
    quantised: HFModel,
    sequences: Sequences,
    truth: Sequence[torch.Tensor],
    splits: Sequence[str],
    progress: Callable[[str], None],
) -> tuple[PartCost, ...]:
    """Measure the KL from the original of each part of a model.

    Args:
        hf: the original, with all weights in memory.
        quantised: the same with dequantised weights, in memory too.
        sequences: the text.
        truth: logarithms of the original's probabilities, [tokens, vocabulary] of each sequence.
        splits: names of `SPLITS`.
        progress: is given the name of each part before it is measured.
    """
    if not splits:
        return ()  # the weights need not be in memory then
    weights, costs = _changed_weights(hf, quantised), []
    for split in splits:
        parts: dict[str, list[_Weight]] = {}
        for weight in weights:
            parts.setdefault(SPLITS[split](weight.name), []).append(weight)
        for name, part_weights in parts.items():
            progress(name)
            with _exchanged(part_weights):
                pairs = zip(truth, sequences, strict=True)
                rows = torch.cat([kl(expected, log_probabilities(hf, ids)) for expected, ids in pairs])
            costs.append(_cost(split, name, part_weights, float(rows.mean())))
    return tuple(costs)


def _cost(split: str, name: str, weights: Sequence[_Weight], kl_mean: float) -> PartCost:
    changes = [
        ((weight.changed.double() - weight.original.double()).norm(), weight.original.norm()) for weight in weights
    ]
    moved, size = (torch.stack(norms).norm().item() for norms in zip(*changes, strict=True))
    return PartCost(
        split=split,
        name=name,
        layer=None if split == "kinds" else layer_of(weights[0].name),
        num_weights=sum(weight.original.numel() for weight in weights),
        relative_error=moved / size if size else 0.0,
        kl_mean=kl_mean,
    )


def _changed_weights(hf: HFModel, quantised: HFModel) -> list[_Weight]:
    """Return the weights that differ, in the model's order."""
    theirs = dict(quantised.model.named_parameters(remove_duplicate=False))
    places: dict[int, list[str]] = {}
    for name, values in hf.model.named_parameters(remove_duplicate=False):
        places.setdefault(id(values), []).append(name)
    changed_weights = []
    for names in places.values():
        original, changed = hf.model.get_parameter(names[0]), theirs.get(names[0])
        if changed is not None and original.shape == changed.shape and not torch.equal(original, changed):
            owners = (name.rpartition(".") for name in names)
            at = tuple((hf.model.get_submodule(path), leaf) for path, _, leaf in owners)
            name = names[0].removesuffix(".weight")
            changed_weights.append(_Weight(name=name, places=at, original=original, changed=changed))
    return changed_weights


@contextmanager
def _exchanged(weights: Sequence[_Weight]) -> Iterator[None]:
    """Give the original the changed weights, and its own back at the end."""
    try:
        for weight in weights:
            for module, name in weight.places:
                setattr(module, name, weight.changed)
        yield
    finally:
        for weight in weights:
            for module, name in weight.places:
                setattr(module, name, weight.original)
