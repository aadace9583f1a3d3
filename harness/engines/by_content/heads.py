"""The order in which an engine lays out heads, and the elements of a head.

Products of queries and keys do not show it, so it is an engine's right. The heads of values lie as those of keys, and
the heads of the context as those of queries.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod

import torch

from harness.engines.by_content.columns import Columns, Fit
from harness.formats.taps import Graph, Kind, Operation

Order = tuple[int, ...] | None
"""Rank of the column of each element of a value; None if the elements lie as HF has them."""
ColumnsOf = Callable[[str], Columns | None]
"""Returns the columns that are taken for a tap; None if there are none."""


class HeadOrders:
    """The orders that an engine may have."""

    def __init__(self, graph: Graph) -> None:
        """Take the operations of the model."""
        self._graph, self._before = graph, _before_attention(graph)
        self._of_most: dict[str, Order] = {}
        """By site, the order that most layers have."""
        self._follows = dict(_following(graph, self._before))
        """By tap whose heads lie as those of others: the number of heads, and these others."""

    def is_free(self, tap: str) -> bool:
        """Whether only products of queries and keys follow from a tap."""
        return tap in self._before

    def may_be(self, operation: Operation, columns: Columns, columns_of: ColumnsOf) -> bool:
        """Whether the columns of a value may lie so."""
        if self.is_free(operation.tap):
            return operation.site not in self._of_most or columns.ranks == self._of_most[operation.site]
        return columns.is_rising or columns.ranks == self.following(operation, columns_of)

    def following(self, operation: Operation, columns_of: ColumnsOf) -> Order:
        """Return the order of a value whose heads lie as those of what was taken for other taps."""
        num_heads, leaders = self._follows.get(operation.tap, (0, ()))
        width = prod(operation.shape)
        columns = next(filter(None, map(columns_of, leaders)), None)
        heads = None if columns is None or columns.ranks is None else _order_of_heads(columns.ranks, num_heads)
        if heads is None or width % num_heads:
            return None
        size = width // num_heads
        return tuple(chain.from_iterable(range(head * size, (head + 1) * size) for head in heads))

    def keep_most(self, columns: Mapping[str, Columns]) -> set[str]:
        """Keep by site the order that more than half of the layers have, and two of them at least.

        Args:
            columns: what is taken for each tap.

        Returns:
            Taps that have another order.
        """
        orders: dict[str, list[Order]] = defaultdict(list)
        for tap in columns.keys() & self._before:
            orders[self._graph[tap].site].append(columns[tap].ranks)
        most = {site: Counter(orders_of_site).most_common(1)[0] for site, orders_of_site in orders.items()}
        self._of_most = {site: order for site, (order, num) in most.items() if num > 1 and 2 * num > len(orders[site])}
        return {tap for tap in columns if not self.may_be(self._graph[tap], columns[tap], columns.get)}

    def forget(self) -> None:
        """Allow every layer an order of its own."""
        self._of_most = {}


def in_order(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a value [T, W] with its elements in the order of the columns."""
    return value[:, torch.tensor(order).argsort()]


def as_ordered(fit: Fit, order: tuple[int, ...]) -> Fit:
    """Return the columns of a value, of those that hold it with its elements in an order."""
    places = fit.columns.places
    return replace(fit, columns=replace(fit.columns, order=tuple(places[rank] for rank in order)))


def _order_of_heads(ranks: tuple[int, ...], num_heads: int) -> Order:
    """Return the place of each head; None if heads lie in their order, or are no blocks of columns."""
    size = len(ranks) // num_heads
    heads = [{rank // size for rank in ranks[at : at + size]} for at in range(0, size * num_heads, size)]
    places = tuple(next(iter(blocks)) for blocks in heads)
    return places if all(len(blocks) == 1 for blocks in heads) and places != tuple(range(num_heads)) else None


def _following(graph: Graph, before: set[str]) -> Iterator[tuple[str, tuple[int, tuple[str, ...]]]]:
    """Yield the taps whose heads lie as those of others, with the number of heads and these, the nearest first."""
    for op in graph:
        if op.kind is not Kind.ATTENTION or len(op.inputs) < 3:
            continue
        query, key, value = op.inputs[:3]
        for tap, leader in ((op.tap, query), (value, key)):
            if tap not in before and len(graph[leader].shape) == 2:
                yield tap, (graph[leader].shape[0], tuple(_chain(graph, leader, before)))


def _chain(graph: Graph, tap: str, before: set[str]) -> Iterator[str]:
    """Yield a tap and what it is computed from, as far as its order is free."""
    at: str | None = tap
    while at in before:
        yield at
        at = next((item for item in graph[at].inputs if item in before), None)


def _before_attention(graph: Graph) -> set[str]:
    """Return the taps that only queries and keys follow from."""
    before = {tap for op in graph if op.kind is Kind.ATTENTION for tap in op.inputs[:2]}
    values = {op.inputs[2] for op in graph if op.kind is Kind.ATTENTION}
    readers: dict[str, set[str]] = {}
    for op in graph:
        for tap in op.inputs:
            readers.setdefault(tap, set()).add(op.tap)
    for op in reversed(graph.operations):
        readers_of_op = {tap for tap in readers.get(op.tap, set()) if not graph[tap].is_kept}
        if readers_of_op and readers_of_op <= before and op.tap not in values:
            before.add(op.tap)
    return before - values
