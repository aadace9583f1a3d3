"""Attention reads something else where a run of its history should be: other rows, zeros, or nothing.

With e the exponentials of the scores, o what a row should be and a what it is, sum_p e_p (v_p - a) = 0 holds over what
was read. A run of positions p that is read from p + d adds e_(p+d) (v_(p+d) - a) - e_p (v_p - a) for each of them: its
prefix sums give every run at once, whatever the size of a block, and the run is one that takes the whole sum to zero.

`S` history rows, `M` rows that may be read instead, `N` query heads, `K` KV heads, `H` head size, `P` projections,
`D` shifts, `B` ends of runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch

from harness.base.metrics import rounding_unit
from harness.judge.compare.batch import spread
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.cache.contents import ContentIndex, contents_of, provenance_of
from harness.judge.explain.core.wrong_operation import KEY, VALUE, Hypothesis, WrongOperation

_MOST_REQUESTS, _MOST_PROBED, _MOST_RUNS, _MOST_COMPARED = 4, 3, 6, 8
"""Other requests that may be read, rows of a request that are searched, runs that are tried on these, and on all."""
_NUM_PROJECTIONS, _AT_ONCE = 16, 64
_MOST_PLACES = 1 << 22
"""Runs of one row from one source that are compared; of more, those are left out that begin at odd places."""
_PAST = 4
"""Slots behind the newest token, which nobody has written yet."""
_LEAST_WEIGHT = 1e-3
"""Of what is read, so much of the right weight at least: reading nothing at all makes any sum zero."""
_MOST_ROWS, _AS_GOOD = 0.9, 1.5
"""Share of the rows by whose error runs are compared, and how much more of it a rounder run may leave."""
_EXACT = 1e-9
"""Error that any exact run may leave."""
_MOVES = ((False, False), (False, True), (True, True), (True, False))
_PAGE, _LARGEST_PAGE = 16, 64
"""Slots of a page where the engine does not say; slots up to which one slot of every page is looked for."""
_MOST_OF_ROW, _ROUNDINGS = 0.75, 8
"""Share of the columns that are wrong from which on the whole row is; error from which on a column is, in roundings."""
_PARTS = {"": (True, True), "the keys of ": (True, False), "the values of ": (False, True)}
"""Whether keys are read from elsewhere, and whether values are."""


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Rows in a line, which may be read in the place of others."""

    request: int | None
    """None for zeros, and for nothing if there are no keys."""
    first: int
    """Position of the first row."""
    step: torch.Tensor
    """[M] int64: in which they are written; before it their slots hold zeros."""
    key: torch.Tensor | None
    """[M, K, H]."""
    value: torch.Tensor | None

    def held(self, row: AttentionContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that are there for a row."""
        assert self.key is not None
        assert self.value is not None
        is_written = (self.step <= row.rows.step)[:, None, None]
        return self.key * is_written, self.value * is_written


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions from `start` to before `stop` in a row at `at`, read from a source so many positions further on."""

    source: _Source
    part: str
    shift: int
    start: int
    stop: int
    at: int
    every: int = 1
    """Distance of the positions that are read from elsewhere."""
    moves: tuple[bool, bool] = (False, False)
    """Whether start and stop are counted from the row's own position; the start alone: within its page."""

    def places(self, position: int) -> torch.Tensor:
        """Return the positions that a row at another position reads from elsewhere."""
        start, stop = (
            end + (position - self.at) * moves for end, moves in zip((self.start, self.stop), self.moves, strict=True)
        )
        if self.moves == (True, False):
            start = self.stop - self.page + (start - self.stop) % self.page
            stop = stop if start > stop - self.page else start  # a page that is full
        return torch.arange(max(start, 0), max(start, 0, min(stop, position + 1)), self.every)

    @property
    def page(self) -> int:
        """The largest power of two that the page which the run ends may have."""
        return self.stop & -self.stop

    @property
    def roundness(self) -> tuple[bool, bool, bool, int, int]:
        """Which of several that fit alike is taken: less is better."""
        size = self.stop - self.start
        return bool(self.part), self.source.request is not None, not self.is_block, sum(self.moves), size

    @property
    def is_block(self) -> bool:
        """Whether both places are multiples of the length."""
        size = self.stop - self.start
        is_fixed = self.every == 1 and not any(self.moves)
        return is_fixed and size > 1 and self.start % size == 0 and self.shift % size == 0


def other_rows(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A run of the history is read from another place, of any length: a position, a block, all from one place on.

    Causes: reads *the newest token, one position, a part, the beginning, one slot of every n* of its history, or the
    keys or the values of it, from a slot that another request wrote; from one that holds another position of the same
    request; as zeros; does not see it; reads one block of its history from a wrong place; keys, values, or both are
    written *n* slots low or high; reads its pages in another order. In some KV heads, or some elements of values, if
    only these are wrong. Not asserted: another run in each request.
    """
    contents = contents_of(wrong)
    if KEY not in contents.tensors or VALUE not in contents.tensors or not wrong.views:
        return
    if not wrong.can_be_fitted:
        yield from _examples(wrong, contents)
        return
    columns, where = _wrong_part(wrong)
    output, runs = wrong.expected.clone(), list[tuple[AttentionContext, _Run]]()
    for view in wrong.views:
        rows = wrong.rows_of(view)
        best = _best_run(view, wrong.actual[rows], columns, contents)
        if best is None:
            return
        output[rows] = torch.where(columns, _read(view, best), output[rows])
        runs.append((view, best))
    size = wrong.slot_history.block_size
    causes = {_cause(run, int(view.rows.request[0]), size) for view, run in runs}
    is_one = len(causes) == 1
    view, run = runs[0]
    request, step = int(view.rows.request[0]), int(view.rows.step[0])
    details = [_detail(wrong, run, int(view.rows.request[0]), step) for view, run in runs[:3]]
    yield Hypothesis(
        cause=causes.pop() if is_one else "a run of its history, in each request another, would explain each row",
        output=output,
        detail="; ".join([*dict.fromkeys(details), *where]),
        num_fitted=3 * len(runs) + len(where),
        is_cause=is_one,
        provenance=lambda: provenance_of(wrong, step, request, run.start, _content(run, view)),
    )


def _examples(wrong: WrongOperation, contents: ContentIndex) -> Iterator[Hypothesis]:
    """Yield what runs at a few places make of the last row of a request, where nothing can be fitted to the rows."""
    view, size = wrong.views[0], wrong.slot_history.block_size or _PAGE
    row, rows = view.select(torch.tensor([len(view.rows) - 1])), view.rows
    step, request, at = (int(item[-1]) for item in (rows.step, rows.request, rows.position))
    first = int(row.visible()[0].int().argmax())
    middle = (first + at + 1) // 2
    begin = middle // size * size
    block = (begin, begin + size, -begin or size)
    places = [(first, first + 1, 1), (middle, middle + 1, -1), (middle, middle + 1, 1), (at, at + 1, -1)]
    for source in _sources(view, contents):
        if source.request is None:
            ways = [(start, stop, 0) for start, stop, _ in places]
        elif source.request == request:
            ways = [*places, block, (first, at + 1, -1), (first, at + 1, 1)]
        else:
            last = source.first + len(source.step) - 1
            ways = [(first, at + 1, 0), (at, at + 1, min(last - at, 0)), (begin, begin + size, 0)]
        for start, stop, shift in ways:
            run, output = _Run(source, "", shift, start, stop, at), wrong.expected.clone()
            output[len(rows) - 1] = _read_row(row, run)[0]
            detail = _detail(wrong, run, request, step)
            yield Hypothesis(cause=_cause(run, request, size), output=output, detail=detail)


def _wrong_part(wrong: WrongOperation) -> tuple[torch.Tensor, list[str]]:
    """Return which columns of the rows are wrong [N*H], all if most are, and which part of the cache that is."""
    num_heads, num_kv = wrong.views[0].query.shape[1], wrong.views[0].key.shape[1]
    error = (wrong.actual - wrong.expected).abs().amax(dim=0)
    scale = wrong.expected.square().mean().sqrt() * rounding_unit(wrong.dtype)
    is_wrong = (error > scale * max(_ROUNDINGS, float(wrong.bound.max()))).view(num_heads, -1)
    every = torch.ones_like(is_wrong)
    if float(is_wrong.float().mean()) >= _MOST_OF_ROW:
        return every.flatten(), []
    heads = is_wrong.any(dim=1).view(num_kv, -1).any(dim=1)
    if not bool(heads.all()):
        kept = every * heads.repeat_interleave(num_heads // num_kv)[:, None]
        return kept.flatten(), [f"in KV heads {heads.nonzero()[:, 0].tolist()} alone"]
    elements = is_wrong.any(dim=0)
    return (every * elements).flatten(), [f"in elements {elements.nonzero()[:, 0].tolist()[:8]} of each head alone"]


def _sources(view: AttentionContext, contents: ContentIndex) -> Iterator[_Source]:
    """Yield what may be read: zeros, nothing, the request's rows and the slots behind them, rows of others."""
    request, length = int(view.rows.request[0]), len(view.key)
    none = [torch.zeros(max(length, _PAST), *x.shape[1:], dtype=x.dtype) for x in (view.key, view.value)]
    always = torch.full((len(none[0]),), -1)
    yield _Source(None, 0, always, *none)
    yield _Source(None, 0, always, None, None)
    history = [torch.cat((x, zeros[:_PAST])) for x, zeros in zip((view.key, view.value), none, strict=True)]
    yield _Source(request, 0, torch.cat((view.key_step, always[:_PAST])), *history)
    known = contents.rows[KEY]
    for holder in known.request.unique().tolist()[: _MOST_REQUESTS + 1]:
        here = (known.request == holder).nonzero()[:, 0]
        here = here[known.position[here].argsort(stable=True)]
        positions = known.position[here]
        key, value = (contents.tensors[kind][here] for kind in (KEY, VALUE))
        is_whole = int(positions[-1] - positions[0]) == len(here) - 1
        is_kept = key[0].numel() == view.key[0].numel() and value[0].numel() == view.value[0].numel()  # and no latent
        if holder != request and is_whole and is_kept:
            rows = key.unflatten(1, view.key.shape[1:]), value.unflatten(1, view.value.shape[1:])
            yield _Source(holder, int(positions[0]), known.step[here], *rows)


def _best_run(
    view: AttentionContext, actual: torch.Tensor, columns: torch.Tensor, contents: ContentIndex
) -> _Run | None:
    """Return the run that comes nearest to all rows [T, N*H] of a request."""
    sources, probed = list(_sources(view, contents)), spread(range(len(view.rows)), _MOST_PROBED)
    runs = [
        replace(run, moves=moves)
        for at in probed
        for run in _search(view.select(torch.tensor([at])), actual[at], columns, sources)
        for moves in (((False, True),) if run.every > 1 else _MOVES if len(view.rows) > 1 else _MOVES[:1])
    ]

    def errors(run: _Run, rows: torch.Tensor) -> torch.Tensor:
        error: torch.Tensor = ((_read(view.select(rows), run) - actual[rows]) * columns).norm(dim=1)
        return error

    left = {run: errors(run, torch.tensor(probed)) for run in dict.fromkeys(runs)}
    order = [_best_of({run: float(error.quantile(q)) for run, error in left.items()}) for q in (0.5, _MOST_ROWS)]
    runs = list(dict.fromkeys(run for pair in zip(*order, strict=True) for run in pair))[:_MOST_COMPARED]
    every = torch.arange(len(view.rows))
    return next(iter(_best_of({run: float(errors(run, every).quantile(_MOST_ROWS)) for run in runs})), None)


def _best_of(errors: Mapping[_Run, float]) -> list[_Run]:
    """Return runs in the order of their errors; of those that are as good as the best one, the round ones first."""
    as_good = _AS_GOOD * min(errors.values(), default=0.0) + _EXACT
    return sorted(errors, key=lambda run: (max(errors[run], as_good), run.roundness))


def _read(view: AttentionContext, run: _Run) -> torch.Tensor:
    """Return the context [T, N*H] of rows that read a run from elsewhere."""
    return torch.cat([_read_row(view.select(torch.tensor([at])), run) for at in range(len(view.rows))])


def _read_row(row: AttentionContext, run: _Run) -> torch.Tensor:
    places, (of_key, of_value), source = run.places(int(row.rows.position)), _PARTS[run.part], run.source
    visible, key, value = row.visible().clone(), row.key.clone(), row.value.clone()
    if source.key is None or source.value is None:
        visible[:, places] = False
        return row.attend(visible=visible)
    held_key, held_value = source.held(row)
    begins = places + run.shift - source.first
    is_held = (begins >= 0) & (begins < len(held_key))
    if of_key:
        key[places[is_held]] = held_key[begins[is_held]]
    if of_value:
        value[places[is_held]] = held_value[begins[is_held]]
    return row.attend(visible=visible, key=key, value=value)


def _search(
    row: AttentionContext, actual: torch.Tensor, columns: torch.Tensor, sources: Sequence[_Source]
) -> list[_Run]:
    """Return the runs under which the sum of what one row [N*H] has read comes nearest to zero."""
    sums, runs = _Sums(row, actual, columns), list[tuple[float, _Run]]()
    by_head = columns.view(row.query.shape[1], -1)
    of_elements = [] if torch.equal(by_head.any(dim=1), by_head.all(dim=1)) else ["the values of "]
    for source in sources:
        is_whole = source.key is None or source.request not in (None, int(row.rows.request))
        for part in of_elements if source.key is not None and of_elements else ("",) if is_whole else _PARTS:
            runs += sums.runs(source, part)
    return [run for _, run in sorted(runs, key=lambda item: item[0])[:_MOST_RUNS]]


class _Sums:
    """What each position adds to the sum of one row, under every shift."""

    def __init__(self, row: AttentionContext, actual: torch.Tensor, columns: torch.Tensor) -> None:
        self.row, self.at = row, int(row.rows.position)
        num_heads, length = row.query.shape[1], self.at + 1
        self.actual = actual.unflatten(0, (num_heads, -1))
        generator = torch.Generator().manual_seed(0)
        size = (*self.actual.shape, _NUM_PROJECTIONS)
        probes = torch.randn(size, generator=generator, dtype=torch.float64) / _NUM_PROJECTIONS**0.5
        self.probes = probes * columns.view(num_heads, -1, 1)
        scores = row.scores()[:, 0, :length].T  # [S, N]
        self.seen = row.visible()[0, :length]
        self.top = scores[self.seen].amax(dim=0)
        weights = (scores - self.top).exp() * self.seen[:, None]
        self.of_places = 1.0 if row.bias is None else row.bias[:, 0, :length].T.exp()  # [S, N]
        sink = torch.zeros(num_heads) if row.sinks is None else (row.sinks - self.top).exp()
        self.total = weights.sum(dim=0) + sink
        self.weights = weights / self.total  # [S, N]
        self.values = self._projected(row.value[:length])  # [S, N, P]
        self.of_own = (self.weights[..., None] * self.values).sum(dim=1)  # [S, P]
        rest = (sink / self.total)[:, None] * torch.einsum("nh,nhp->np", self.actual, self.probes)
        self.sum = self.of_own.sum(dim=0) - rest.sum(dim=0)

    def _projected(self, value: torch.Tensor) -> torch.Tensor:
        """[M, N, P]: values [M, K, H] less what the row is."""
        less = self.row.spread(value).transpose(0, 1) - self.actual
        return torch.einsum("mnh,nhp->mnp", less, self.probes)

    def runs(self, source: _Source, part: str) -> Iterator[tuple[float, _Run]]:
        """Yield the best runs from a source, and how far from zero they leave the sum."""
        length = self.at + 1
        if source.key is None or source.value is None:
            yield from self._best(-self.of_own[None], -self.weights.mean(dim=1)[None], [0], source, part)
            return
        of_key, of_value = _PARTS[part]
        held_key, held_value = source.held(self.row)
        scores = self.row.products(key=held_key)[:, 0].T
        weights = (scores - self.top).clamp(max=50).exp() / self.total  # [M, N]
        values = self._projected(held_value)  # [M, N, P]
        stride = _stride(length, len(weights))
        shifts = [shift for shift in range(1 - length, len(weights)) if shift % stride == 0 or abs(shift) <= 2]
        if source.request is None:
            shifts = [0]
        elif source.request == int(self.row.rows.request):
            shifts.remove(0)  # what the row does read
        for begin in range(0, len(shifts), _AT_ONCE):
            chosen = shifts[begin : begin + _AT_ONCE]
            places = torch.arange(length) + torch.tensor(chosen)[:, None]  # [D, S]
            is_held = (places >= 0) & (places < len(weights))
            places = places.clamp(0, len(weights) - 1)
            new_weights = weights[places] * self.of_places if of_key else self.weights.expand(len(chosen), -1, -1)
            new_values = values[places] if of_value else self.values
            change = (new_weights[..., None] * new_values).sum(dim=2) - self.of_own
            weight = (new_weights - self.weights).mean(dim=2)
            change = change.masked_fill(~is_held[..., None], torch.inf)
            yield from self._best(change, weight, [item + source.first for item in chosen], source, part)

    def _best(
        self, change: torch.Tensor, weight: torch.Tensor, shifts: Sequence[int], source: _Source, part: str
    ) -> Iterator[tuple[float, _Run]]:
        """Yield the runs whose `change` [D, S, P] of the sum and `weight` [D, S] of what is read are the best."""
        length = self.at + 1
        stride = _stride(length, length)
        ends = torch.tensor([end for end in range(length + 1) if end % stride == 0 or end >= length - 1])
        outside = change.isinf().any(dim=2)
        parts = torch.cat((change.masked_fill(outside[..., None], 0.0), weight[..., None], outside[..., None]), dim=2)
        parts = parts * self.seen[:, None]
        if source.request is None:
            yield from self._periodic(parts[0], source, part)
        sums = torch.cat((parts.new_zeros(len(parts), 1, parts.shape[2]), parts.cumsum(dim=1)), dim=1)[:, ends]
        projected, weights, num_outside = sums[..., :-2], sums[..., -2], sums[..., -1]
        left = torch.cdist(projected - self.sum, projected)  # [D, B start, B stop]
        read = 1 + weights[:, None] - weights[:, :, None]
        is_run = (ends[:, None] < ends) & (num_outside[:, None] == num_outside[:, :, None]) & (read > _LEAST_WEIGHT)
        distance = torch.where(is_run, left / read, torch.inf)
        best, where = distance.flatten().topk(min(_MOST_RUNS, distance.numel()), largest=False)
        for error, index in zip(best.tolist(), where.tolist(), strict=True):
            if error < torch.inf:
                at, rest = divmod(index, len(ends) ** 2)
                start, stop = (int(ends[item]) for item in divmod(rest, len(ends)))
                yield error, _Run(source, part, shifts[at], start, stop, self.at)

    def _periodic(self, parts: torch.Tensor, source: _Source, part: str) -> Iterator[tuple[float, _Run]]:
        """Yield what is left if one slot of every page is read so, from its `parts` [S, P + 2] of the sum."""
        for every in range(2, min(_LARGEST_PAGE, self.at // 2) + 1):
            for start in range(every):
                change = parts[start::every].sum(dim=0)
                error = float((self.sum + change[:-2]).norm()) / max(1 + float(change[-2]), _LEAST_WEIGHT)
                yield error, _Run(source, part, 0, start, self.at + 1, self.at, every)


def _stride(length: int, num_known: int) -> int:
    """Return the power of two of which places and shifts are tried, so that they are not too many."""
    stride = 1
    while (length + num_known) / stride * ceil(length / stride) ** 2 > _MOST_PLACES:
        stride *= 2
    return stride


def _cause(run: _Run, request: int, block_size: int | None) -> str:
    """Name what is read, where it is read from, and what that place holds."""
    size, source = run.stop - run.start, run.source
    is_to_newest = run.stop == run.at + 1
    what, slot, position = "a part of its history", "slots", "hold other positions"
    if run.every > 1:
        what = f"one slot of every {run.every} of its history"
    elif run.start == 0 and is_to_newest and not run.moves[0]:
        what = "its history"
    elif run.start == 0 and size > 1 and not run.moves[0]:
        what = "the beginning of its history"
    elif size == 1:
        what = "the newest token" if is_to_newest else "one position of its history"
        slot, position = "a slot", "holds another position"
    if run.moves == (True, False) and source.request is None and not run.part:
        return f"reads its pages in another order: one that is not full comes before the last, pages of {run.page}"
    if source.key is None:
        is_window = run.start == 0 and size > 1 and run.every == 1  # as `masks.wrong_window` says it
        return f"the first {size} tokens are not seen" if is_window else f"does not see {what}"
    if source.request is None:
        return f"reads {run.part}{what} as zeros: not written, or from {slot} nobody wrote"
    if run.is_block and not run.part and (run.start or run.shift or size == block_size):
        return "reads one block of its history from a wrong place"
    if source.request != request:
        return f"reads {run.part}{what} from {slot} that another request wrote"
    if size > 1 and is_to_newest:
        name = {"": "keys and values", "the keys of ": "keys", "the values of ": "values"}[run.part]
        way = f"{abs(run.shift)} slot{'s' * (abs(run.shift) > 1)} {'low' if run.shift > 0 else 'high'}"
        return f"{name} are written {way}"
    return f"reads {run.part}{what} from {slot} that {position} of the same request"


def _detail(wrong: WrongOperation, run: _Run, request: int, step: int) -> str:
    """Say which positions are read from where."""
    source, size = run.source, wrong.slot_history.block_size
    if run.is_block and not run.part and size == run.stop - run.start and source.request is not None:
        whose = "its own" if source.request == request else f"request {source.request}'s"
        if source.request == request or not source.first:
            return (
                f"block {run.start // size} of the table is read from {whose} block {(run.start + run.shift) // size}"
            )
    where = f"request {request}, position {run.at} reads {run.part}{_positions(run.start, run.stop)}"
    if run.every > 1:
        where = f"slot {run.start} of every {run.every} is read"
    if source.key is None:
        return f"{where} as absent"
    if source.request is None:
        return f"{where} as zeros"
    moved = _positions(run.start + run.shift, run.stop + run.shift)
    return f"{where} as request {source.request}, {moved}"


def _positions(start: int, stop: int) -> str:
    return f"position {start}" if stop == start + 1 else f"positions {start} to {stop - 1}"


def _content(run: _Run, view: AttentionContext) -> torch.Tensor:
    """Return the key [K*H] that is read in the place of the first one."""
    key = run.source.key
    at = run.start + run.shift - run.source.first
    return torch.zeros_like(view.key[0]).flatten() if key is None or at >= len(key) else key[at].flatten()
