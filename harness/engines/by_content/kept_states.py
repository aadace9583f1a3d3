"""The states that a live engine keeps: by HF's names, or found by what they hold."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import torch

from harness.engines.by_content.steps import Stepper, with_following
from harness.oracle.decode import HFDecoder
from harness.oracle.model import HFModel

Shown = Mapping[int, Mapping[str, torch.Tensor] | Sequence[torch.Tensor]]
"""Of each layer its states: by HF's names and as HF has them, or in any order and layout."""
Key = tuple[int, str]
"""Layer and name of a state of HF's."""
_NUM_TOKENS = 13
"""Of the run in which they are found: more than a convolution reaches over."""
_NEAR = 0.05
"""Largest distance, over the norm, of a state in the engine's dtype from HF's in float32."""
_MOST_DIMS = 4


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a state lies, and how."""

    index: int
    """Of the layer's tensors."""
    order: tuple[int, ...]
    """Of their dimensions."""
    shape: tuple[int, ...]


Places = Mapping[Key, _Place | None]
"""Where HF's states lie in what an engine shows; None for one that was not found. Named ones are not looked for."""


class KeptStates:
    """Reads the states of an engine that shows them; of one that does not, none."""

    def __init__(self, stepper: Stepper, places: Places) -> None:
        """Take an engine, and the places of states that are not named; see `find_places`."""
        self._own: Callable[[int], Shown] | None = getattr(stepper, "states", None)
        self._places = places

    def read(self, number: int) -> dict[Key, torch.Tensor]:
        """Return the states of a request, by its number in the engine: as HF has them, or one column fewer."""
        layers = {} if self._own is None else self._own(number)
        found = dict[Key, torch.Tensor]()
        for layer, shown in layers.items():
            if isinstance(shown, Mapping):
                found |= {(layer, name): state for name, state in shown.items()}
                continue
            for (own, name), place in self._places.items():
                if own == layer and place is not None:
                    found[layer, name] = shown[place.index].permute(place.order).reshape(place.shape)
        return found


def find_places(stepper: Stepper, hf: HFModel, number: int) -> Places:
    """Find HF's states among those that the engine shows after a few tokens.

    A convolution's may have one column less: what the next token needs.

    Args:
        stepper: the engine.
        hf: the model in float32.
        number: of a request that the engine has not seen.
    """
    own: Callable[[int], Shown] | None = getattr(stepper, "states", None)
    if own is None:
        return {}
    ids = torch.randint(0, hf.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        stepper.step(with_following(stepper, [(number, ids, 0)]))
    shown = own(number)
    if all(isinstance(item, Mapping) for item in shown.values()):
        return {}
    with HFDecoder(hf) as decoder:
        decoder.feed([ids])
        states = {key: state[0] for key, state in decoder.states.items()}
    return {key: _found(key, state, shown.get(key[0], ())) for key, state in states.items()}


def _found(key: Key, state: torch.Tensor, shown: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> _Place | None:
    """Return the place that holds what is nearest to a state; None where nothing is near."""
    if isinstance(shown, Mapping):
        return None
    best, nearest = None, _NEAR
    for place, tensor in _candidates(key, state.shape, shown):
        wanted = state[..., state.shape[-1] - place.shape[-1] :]
        error = float((tensor.to(state) - wanted).norm() / wanted.norm()) if bool(wanted.any()) else 1.0
        if error < nearest:
            best, nearest = place, error
    return best


def _candidates(key: Key, shape: torch.Size, shown: Sequence[torch.Tensor]) -> Iterator[tuple[_Place, torch.Tensor]]:
    """Yield every way to read a state of a shape from some tensors."""
    shapes = [tuple(shape)]
    if key[1].startswith("conv") and shape[-1] > 1:
        shapes.append((*shape[:-1], shape[-1] - 1))
    for index, tensor in enumerate(shown):
        for wanted in (item for item in shapes if prod(item) == tensor.numel() and tensor.dim() <= _MOST_DIMS):
            for order in permutations(range(tensor.dim())):
                yield _Place(index, order, wanted), tensor.permute(order).reshape(wanted)
