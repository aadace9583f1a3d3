"""What a live engine keeps of a request: the keys and values, and the states, that its methods show."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import torch

from harness.engines.by_content.columns import Columns
from harness.engines.by_content.steps import Stepper, finish, with_following
from harness.engines.by_content.tap_map import MappedTap, TapMap
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.decode import HFDecoder
from harness.oracle.model import HFModel

Cached = Callable[[int], Mapping[int, tuple[torch.Tensor, torch.Tensor]]]
"""Is given a request's number; returns the keys and values of each layer, [positions, KV heads, head size]."""


class KeptCache:
    """Reads the cache of an engine that shows it; of one that does not, nothing."""

    def __init__(self, stepper: Stepper, graph: Graph, tap_map: TapMap) -> None:
        """Take an engine, and its map: keys lie in the cache as after rotary."""
        cached: Cached | None = getattr(stepper, "cached", None)
        self._cached, self._map, self._graph = cached, tap_map, graph
        self._operations = [op for op in graph if op.kind is Kind.CACHE]

    @property
    def is_shown(self) -> bool:
        """Whether the engine shows it."""
        return self._cached is not None

    def read(self, number: int, num_tokens: int, num_computed: int = 0) -> dict[str, tuple[range, torch.Tensor]]:
        """Return of each tap the positions that are kept, the latest ones, and their rows.

        Args:
            number: of the request in the engine.
            num_tokens: of it, computed so far.
            num_computed: rows of it with those that it has given up: a cache that never went back holds all.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: what is shown are no keys and values of the model.
        """
        shown = {} if self._cached is None else self._cached(number)
        held = {}
        for operation in self._operations:
            if operation.layer is not None and operation.layer in shown:
                rows = self._rows(operation, shown[operation.layer], max(num_tokens, num_computed))[:num_tokens]
                held[operation.tap] = range(num_tokens - len(rows), num_tokens), rows
        return held

    def _rows(self, operation: Operation, layer: tuple[torch.Tensor, torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Return what a layer keeps, [positions, KV heads, head size]."""
        rows = layer[operation.site == "v_cache"]
        width = prod(operation.shape)
        if not isinstance(rows, torch.Tensor) or len(rows) > num_tokens or rows[:1].numel() != width:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"the engine's cache does not hold {operation.tap}",
                where="the method cached(request)",
                expected=f"a tensor {[f'up to {num_tokens}', *operation.shape]}",
                actual=list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__,
                hint="return {layer: (keys, values)}, each [positions, KV heads, head size], without padding",
            )
        shape = rows.shape[1:] if rows.dim() == 3 else operation.shape  # a scale may be that of a head
        return self._in_order(operation, rows.reshape(len(rows), width)).reshape(-1, *shape)

    def _in_order(self, operation: Operation, rows: torch.Tensor) -> torch.Tensor:
        """Return [positions, W] with the elements as HF has them, where the engine's projections have another order."""
        mapped = self._map.taps.get(operation.inputs[0]) or self._of_another_layer(operation.inputs[0])
        columns = None if mapped is None else mapped.sources[0].columns
        if columns is None or columns.order is None or len(columns.order) != rows.shape[1]:
            return rows
        return Columns(start=0, stop=rows.shape[1], order=columns.ranks).of(rows)

    def _of_another_layer(self, tap: str) -> MappedTap | None:
        """Return where the like of a tap is in another layer: an engine has one order of heads."""
        site = self._graph[tap].site
        return next((item for mapped_tap, item in self._map.taps.items() if self._graph[mapped_tap].site == site), None)


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
    """Place and layout of a state."""

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
        self._show_states: Callable[[int], Shown] | None = getattr(stepper, "states", None)
        self._places = places

    def read(self, number: int) -> dict[Key, torch.Tensor]:
        """Return the states of a request, by its number in the engine: as HF has them, or one column fewer."""
        layers = {} if self._show_states is None else self._show_states(number)
        states = dict[Key, torch.Tensor]()
        for layer, shown in layers.items():
            if isinstance(shown, Mapping):
                states |= {(layer, name): state for name, state in shown.items()}
                continue
            for (place_layer, name), place in self._places.items():
                if place_layer == layer and place is not None:
                    states[layer, name] = shown[place.index].permute(place.order).reshape(place.shape)
        return states


def find_places(stepper: Stepper, hf: HFModel, number: int) -> Places:
    """Find HF's states among those that the engine shows after a few tokens.

    A convolution's may have one column less: what the next token needs.

    Args:
        stepper: the engine.
        hf: the model in float32.
        number: of a request that the engine has not seen.
    """
    show_states: Callable[[int], Shown] | None = getattr(stepper, "states", None)
    if show_states is None:
        return {}
    ids = torch.randint(0, hf.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        stepper.step(with_following(stepper, [(number, ids, 0)]))
    shown = show_states(number)
    are_named = all(isinstance(item, Mapping) for item in shown.values())
    places = {} if are_named else _nearest_places(hf, ids, shown)
    finish(stepper, number)
    return places


def _nearest_places(hf: HFModel, ids: list[int], shown: Shown) -> Places:
    with HFDecoder(hf) as decoder:
        decoder.feed([ids])
        states = {key: state[0] for key, state in decoder.states.items()}
    return {key: _nearest_place(key, state, shown.get(key[0], ())) for key, state in states.items()}


def _nearest_place(
    key: Key, state: torch.Tensor, shown: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
) -> _Place | None:
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
