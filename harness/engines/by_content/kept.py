"""The KV cache of a live engine: what its method `cached` shows of a request."""

from collections.abc import Callable, Mapping
from math import prod

import torch

from harness.engines.by_content.columns import Columns
from harness.engines.by_content.steps import Stepper
from harness.engines.by_content.tap_map import MappedTap, TapMap
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind, Operation

Cached = Callable[[int], Mapping[int, tuple[torch.Tensor, torch.Tensor]]]
"""Is given a request's number; returns the keys and values of each layer, [positions, KV heads, head size]."""


class KeptCache:
    """Reads the cache of an engine that shows it; of one that does not, nothing."""

    def __init__(self, stepper: Stepper, graph: Graph, tap_map: TapMap) -> None:
        """Take an engine, and its map: keys lie in the cache as after rotary."""
        own: Cached | None = getattr(stepper, "cached", None)
        self._cached, self._map, self._graph = own, tap_map, graph
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
        return self._in_order(operation, rows.reshape(len(rows), width)).reshape(-1, *operation.shape)

    def _in_order(self, operation: Operation, rows: torch.Tensor) -> torch.Tensor:
        """Return [positions, W] with the elements as HF has them, where the engine's projections have another order."""
        mapped = self._map.taps.get(operation.inputs[0]) or self._of_another_layer(operation.inputs[0])
        columns = None if mapped is None else mapped.sources[0].columns
        if columns is None or columns.order is None or columns.stop - columns.start != rows.shape[1]:
            return rows
        return Columns(start=0, stop=rows.shape[1], order=columns.own_order).of(rows)

    def _of_another_layer(self, tap: str) -> MappedTap | None:
        """Return where the like of a tap is in another layer: an engine has one order of heads."""
        site = self._graph[tap].site
        return next((item for other, item in self._map.taps.items() if self._graph[other].site == site), None)
