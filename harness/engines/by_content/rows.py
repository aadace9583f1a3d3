"""Tells which token each row of a forward belongs to, from the token ids that the engine looks up.

An engine may run several forwards in a step: in any order, in chunks, with padding, with tokens that it computes again,
or forwards of another model. The ids alone decide; a value that is judged never does. Among all explanations of the
ids, the one with the fewest wrong ids is taken, then the one with the fewest runs of consecutive tokens. Rows on which
equally good explanations differ are ambiguous.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import torch

PADDING, EARLIER = -1, -2
"""What a row is that is no token of the step's work: padding or unknown; a token that an earlier step has computed."""
_MOST_STATES = 20_000
"""Partial explanations that are looked at before the rows count as ambiguous."""
_MOST_EXPLANATIONS = 16
"""Equally good explanations that are compared: four of them may agree on a wrong row."""


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The work of one request in a step."""

    tokens: Sequence[int]
    """All tokens of the request up to the last one of the step."""
    first: int
    """Position of the first token to compute."""

    @property
    def length(self) -> int:
        """Number of tokens to compute."""
        return len(self.tokens) - self.first


_Key = Callable[[RequestWork], tuple[int, ...]]
_ORDERS: dict[str, _Key] = {
    "work": lambda _work: (),
    "shortest first": lambda work: (work.length,),
    "longest first": lambda work: (-work.length,),
    "least context first": lambda work: (len(work.tokens),),
    "most context first": lambda work: (-len(work.tokens),),
    "decode first": lambda work: (work.length > 1,),
    "prefill first": lambda work: (work.length == 1,),
    "decode first, most context first": lambda work: (work.length > 1, -len(work.tokens)),
    "prefill first, longest first": lambda work: (work.length == 1, -work.length),
}
"""Orders in which engines compute the requests of a step. Equal ones keep the order of the work, or its reverse."""
ORDERS = tuple((name, is_reversed) for name in _ORDERS for is_reversed in (False, True))


def in_order(order: tuple[str, bool], work: Sequence[RequestWork]) -> list[int]:
    """Return the indices of requests in one of `ORDERS`."""
    name, is_reversed = order
    indices = range(len(work))
    return sorted(reversed(indices) if is_reversed else indices, key=lambda at: _ORDERS[name](work[at]))


@dataclass(slots=True)
class Habits:
    """How an engine lays out the rows of its steps, as far as small steps of unlike tokens have shown it."""

    orders: list[tuple[str, bool]] = field(default_factory=lambda: list(ORDERS))
    """Orders of requests that all these steps had."""
    pads: set[int] = field(default_factory=set)
    """Token ids of padding."""
    sides: set[str] = field(default_factory=set)
    """`left` or `right`: where padding was, before or after the tokens of a line."""
    most_in_line: int | None = None
    """Requests of a line, at most; None before the first step of several requests."""
    is_turned: bool = False
    """Whether a line has one token of each request: ids are [tokens, requests]."""


class Run(NamedTuple):
    """Consecutive rows of a line: consecutive tokens of one request, or padding."""

    line: int
    start: int
    """Column of the first row."""
    length: int
    request: int
    """Index in the work; `PADDING` for padding."""
    position: int
    """Of the first token."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the rows of the forwards of a step are."""

    rows: list[torch.Tensor]
    """For each forward, [lines, tokens] int64: the index of each row in the work, one request after the other."""
    ambiguous: frozenset[int] = frozenset()
    """Rows of the work that may be one of several rows, or none."""


def tell_rows(
    forwards: Sequence[torch.Tensor], work: Sequence[RequestWork], habits: Habits, *, is_whole: bool = True
) -> Told:
    """Tell the rows of forwards that come one after the other.

    Args:
        forwards: token ids of each forward, [lines, tokens].
        work: what the step has to compute.
        habits: of the engine.
        is_whole: whether these forwards compute all of the work.
    """
    if habits.is_turned:
        told = tell_rows([ids.T for ids in forwards], work, replace(habits, is_turned=False), is_whole=is_whole)
        return Told([rows.T for rows in told.rows], told.ambiguous)
    starts = starts_of(work)
    lines = [line for ids in forwards for line in ids.tolist()]
    filled = _filled([token for line in lines for token in line], len(lines), work, habits)
    if filled is not None:
        return Told(_shaped(filled, forwards))
    best = [_rows(runs, lines, work, starts) for runs in _Search(lines, work, habits, is_whole=is_whole).best()]
    if not best:
        return Told([torch.full(ids.shape, PADDING) for ids in forwards], frozenset(range(starts[-1])))
    ambiguous = {
        row for rows in best[1:] for pair in zip(best[0], rows, strict=True) if len({*pair}) > 1 for row in pair
    }
    if len({tuple(in_order(order, work)) for order in habits.orders}) != 1:
        ambiguous |= _twins(work, starts)
    return Told(_shaped(best[0], forwards), frozenset(row for row in ambiguous if row >= 0))


def starts_of(work: Sequence[RequestWork]) -> list[int]:
    """Return the index of the first row of each request in the work, and the number of all rows."""
    return [0, *accumulate(item.length for item in work)]


def learn_habits(forwards: Sequence[torch.Tensor], work: Sequence[RequestWork], habits: Habits) -> None:
    """Keep the habits that a step of unlike tokens shows."""
    turned = [ids.T for ids in forwards]
    if any(min(ids.shape) > 1 for ids in forwards) and not habits.is_turned:
        habits.is_turned = _num_runs(turned, work, habits) < _num_runs(forwards, work, habits)
    if habits.is_turned:
        forwards = turned
    told = tell_rows(forwards, work, Habits(pads=habits.pads))
    for ids, rows in zip(forwards, told.rows, strict=True):
        if bool((rows >= 0).any()) or len(ids.unique()) == 1:
            habits.pads |= {*ids[rows == PADDING].tolist()}
        for line in rows:
            live = (line != PADDING).nonzero()[:, 0].tolist()
            if live:
                habits.sides |= {"left"} if live[0] else set()
                habits.sides |= {"right"} if live[-1] < len(line) - 1 else set()
    starts = starts_of(work)
    lines = [
        {bisect_right(starts, row) - 1: None for row in line if row >= 0}
        for rows in told.rows
        for line in rows.tolist()
    ]
    order = list(dict.fromkeys(request for line in lines for request in line))
    if len(work) > 1:
        habits.most_in_line = max(habits.most_in_line or 0, *map(len, lines))
    if not told.ambiguous:
        habits.orders = [item for item in habits.orders if in_order(item, work) == order]


def _num_runs(forwards: Sequence[torch.Tensor], work: Sequence[RequestWork], habits: Habits) -> float:
    """Return the number of runs that explain the forwards."""
    lines = [line for ids in forwards for line in ids.tolist()]
    best = _Search(lines, work, Habits(pads=habits.pads), is_whole=True).best()
    return sum(run.request != PADDING for run in best[0]) if best else float("inf")


def _twins(work: Sequence[RequestWork], starts: Sequence[int]) -> set[int]:
    """Return the rows of requests that compute the same tokens."""
    tokens = [tuple(item.tokens[item.first :]) for item in work]
    twins = [at for at, computed in enumerate(tokens) if tokens.count(computed) > 1]
    return {row for at in twins for row in range(starts[at], starts[at + 1])}


def _shaped(rows: Sequence[int], forwards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.tensor(rows, dtype=torch.int64).split([ids.numel() for ids in forwards])
    return [part.reshape(ids.shape) for part, ids in zip(parts, forwards, strict=True)]


def _filled(ids: Sequence[int], num_lines: int, work: Sequence[RequestWork], habits: Habits) -> list[int] | None:
    """Return the rows if the requests fill the lines in the one known order; None otherwise."""
    orders = {tuple(in_order(order, work)) for order in habits.orders}
    if len(orders) != 1:
        return None
    order, starts = next(iter(orders)), starts_of(work)
    tokens = [token for at in order for token in work[at].tokens[work[at].first :]]
    padding = ids[len(tokens) :]
    if [*ids[: len(tokens)]] != tokens or not habits.pads.issuperset(padding):
        return None
    if padding and (num_lines > 1 or "left" in habits.sides):
        return None
    rows = [row for at in order for row in range(starts[at], starts[at + 1])]
    return rows + [PADDING] * (len(ids) - len(rows))


def _rows(
    runs: Sequence[Run], lines: Sequence[Sequence[int]], work: Sequence[RequestWork], starts: Sequence[int]
) -> list[int]:
    """Return for each id of all lines the index of its row in the work."""
    begins = [0, *accumulate(map(len, lines))]
    rows = [PADDING] * begins[-1]
    for run in (run for run in runs if run.request != PADDING):
        first, start = work[run.request].first, starts[run.request]
        for offset in range(run.length):
            position = run.position + offset
            row = EARLIER if position < first else start + position - first
            rows[begins[run.line] + run.start + offset] = row
    return rows


class _State(NamedTuple):
    """A partial explanation: all ids before a place are explained."""

    line: int
    column: int
    next: tuple[int, ...]
    """For each request, the position of the next token to compute."""
    has_tokens: bool
    """Whether the line has tokens before the place."""


_Cost = tuple[int, int, int]
"""Wrong ids, runs of tokens, and habits that are broken."""


class _Search:
    """Finds the best explanations (A*): those of lowest cost in which every request's tokens come in their order."""

    def __init__(
        self, lines: Sequence[Sequence[int]], work: Sequence[RequestWork], habits: Habits, *, is_whole: bool
    ) -> None:
        self._lines, self._work, self._habits, self._is_whole = lines, work, habits, is_whole
        self._known = {token for item in work for token in item.tokens} - habits.pads
        self._left = [0, *accumulate(len(line) for line in reversed(lines))][::-1]  # ids from each line on
        ranks = [in_order(order, work) for order in habits.orders]
        self._ranks = [[order.index(at) for at in range(len(work))] for order in ranks]

    def best(self) -> list[list[Run]]:
        """Return a few of the explanations of lowest cost; [] if there is none, or the search is too long."""
        return self._best(allows_wrong=False) or self._best(allows_wrong=True)

    def _best(self, *, allows_wrong: bool) -> list[list[Run]]:
        start = _State(0, 0, tuple(item.first for item in self._work), has_tokens=False)
        queue: list[tuple[_Cost, int, _Cost, _State]] = [(self._bound((0, 0, 0), start), 0, (0, 0, 0), start)]
        trail: dict[int, tuple[int, Run]] = {}
        seen: dict[_State, list[_Cost]] = defaultdict(list)
        best = list[list[Run]]()
        lowest: _Cost | None = None
        while queue and len(best) < _MOST_EXPLANATIONS:
            bound, number, cost, state = heappop(queue)
            if lowest is not None and bound > lowest:
                break
            if state.line == len(self._lines):
                if not self._is_whole or not self._num_left(state):
                    lowest = bound
                    best.append(_followed(trail, number))
                continue
            costs = seen[state]
            if costs and (cost > costs[0] or len(costs) >= _MOST_EXPLANATIONS):
                continue
            costs.append(cost)
            if len(trail) > _MOST_STATES:
                return []
            for following, run, extra in self._following(state, allows_wrong=allows_wrong):
                total = cost[0] + extra[0], cost[1] + extra[1], cost[2] + extra[2]
                ahead = -len(trail) - 1  # of equal bounds, the latest comes first
                trail[ahead] = number, run
                heappush(queue, (self._bound(total, following), ahead, total, following))
        return best

    def _num_left(self, state: _State) -> int:
        return sum(len(item.tokens) - at for item, at in zip(self._work, state.next, strict=True))

    def _bound(self, cost: _Cost, state: _State) -> _Cost:
        """Return the lowest cost that an explanation can have which begins as a partial one."""
        open_requests = sum(at < len(item.tokens) for item, at in zip(self._work, state.next, strict=True))
        return cost[0], cost[1] + open_requests * self._is_whole, cost[2]

    def _following(self, state: _State, *, allows_wrong: bool) -> Iterator[tuple[_State, Run, _Cost]]:
        """Yield what may come next: a run of a request's tokens, or padding."""
        ids = self._lines[state.line][state.column :]
        num_left = self._left[state.line] - state.column
        if self._is_whole and self._num_left(state) > num_left:
            return
        for request, position in self._begins(state, ids[0], allows_wrong=allows_wrong):
            yield from self._runs(state, ids, request, position, allows_wrong=allows_wrong)
        for length in self._ends(state, ids, range(1, len(ids) + 1)):
            wrong = sum(token in self._known for token in ids[:length])
            side = "right" if state.has_tokens else "left" if length < len(ids) else ""
            is_odd = bool(side) and bool(self._habits.sides) and side not in self._habits.sides
            run = Run(state.line, state.column, length, PADDING, 0)
            if allows_wrong or not wrong:
                yield self._after(state, run), run, (wrong, 0, int(is_odd))

    def _begins(self, state: _State, token: int, *, allows_wrong: bool) -> Iterator[tuple[int, int]]:
        """Yield the requests and positions at which a run may begin: the next one, or what is computed again."""
        for request, item in enumerate(self._work):
            at = state.next[request]
            for position in dict.fromkeys((at, item.first, 0)):
                if position < len(item.tokens) and (allows_wrong or item.tokens[position] == token):
                    yield request, position

    def _runs(
        self, state: _State, ids: Sequence[int], request: int, position: int, *, allows_wrong: bool
    ) -> Iterator[tuple[_State, Run, _Cost]]:
        tokens, following = self._work[request].tokens, state.next[request]
        most = min(len(tokens) - position, len(ids))
        pairs = list(zip(ids[:most], tokens[position : position + most], strict=True))
        wrong = list(
            accumulate(id_ != token and (id_ in self._known or id_ in self._habits.pads) for id_, token in pairs)
        )
        if not allows_wrong:
            most = next((at for at, (id_, token) in enumerate(pairs) if id_ != token), most)
        for length in self._ends(state, ids, range(most, 0, -1), request=request, position=position):
            if position != following and position + length <= following < len(tokens):
                continue  # nothing new: an engine that computes earlier tokens again goes on to the next ones
            run = Run(state.line, state.column, length, request, position)
            is_shared = state.has_tokens and self._habits.most_in_line == 1
            odd = self._disorder(state, request) + is_shared
            yield self._after(state, run), run, (int(wrong[length - 1]), 1, odd)

    def _ends(
        self, state: _State, ids: Sequence[int], lengths: range, *, request: int = PADDING, position: int = 0
    ) -> Iterator[int]:
        """Yield the lengths after which something else may begin: the line's end, padding, or a request's token."""
        starts = {
            item.tokens[at]
            for item, following in zip(self._work, state.next, strict=True)
            for at in (following, item.first, 0)
            if at < len(item.tokens)
        } | self._habits.pads
        for length in lengths:
            is_longest = request != PADDING and length == lengths[0]
            if is_longest or length == len(ids) or ids[length] in starts or ids[length] not in self._known:
                yield length

    def _after(self, state: _State, run: Run) -> _State:
        following, has_tokens = state.next, state.has_tokens or run.request != PADDING
        if run.request != PADDING:
            end = max(state.next[run.request], run.position + run.length)
            following = (*following[: run.request], end, *following[run.request + 1 :])
        if run.start + run.length == len(self._lines[run.line]):
            return _State(run.line + 1, 0, following, has_tokens=False)
        return _State(run.line, run.start + run.length, following, has_tokens)

    def _disorder(self, state: _State, request: int) -> int:
        """Return 1 if a request begins before one that all known orders of the engine have earlier."""
        if state.next[request] != self._work[request].first or not self._ranks:
            return 0
        waiting = [
            at
            for at, item in enumerate(self._work)
            if at != request and state.next[at] == item.first and item.first < len(item.tokens)
        ]
        return int(bool(waiting) and all(any(rank[at] < rank[request] for at in waiting) for rank in self._ranks))


def _followed(trail: Mapping[int, tuple[int, Run]], number: int) -> list[Run]:
    """Return the runs that lead to a state."""
    runs = []
    while number in trail:
        number, run = trail[number]
        runs.append(run)
    return runs[::-1]
