"""The tensors of a step, forward by forward, and how their rows are brought into the order of the step's work.

A forward begins where token ids become vectors. All tensors up to the next look-up have its rows, in one of several
layouts; small steps show which layout each site has.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import cached_property
from typing import NamedTuple

import torch

from harness.engines.by_content.rows import (
    EARLIER,
    PADDING,
    Habits,
    RequestWork,
    Told,
    learn_habits,
    starts_of,
    tell_rows,
)
from harness.engines.by_content.steps import RETURNED, Lookup, See, Site, Stepper, Work, watched_run

_MOST_PADDING = 8
"""Rows that an engine adds behind its tokens, at most, where it does not show the ids of its rows."""

_NEAR = 0.05
"""Largest distance, over the norm, of a row from the same row in another step."""


@dataclass(slots=True)
class StepForward:
    """The tensors of a step from one look-up of token ids to the next."""

    lookup: Lookup | None
    """None if the engine shows no look-up: all tensors of the step."""
    ids: torch.Tensor
    """[lines, tokens]; empty without a look-up."""
    tensors: dict[Site, torch.Tensor] = field(default_factory=dict)


class RowOrder(Enum):
    """How the rows of a step are assumed to lie where the engine shows no look-up of token ids."""

    PACKED = auto()
    """One request after the other, in the order of the work."""
    PADDED_RIGHT = auto()
    """Side by side, one line for each request; padding is after its tokens."""
    PADDED_LEFT = auto()
    """Side by side; padding is before the tokens."""


class Counted(IntEnum):
    """What a dimension of a tensor counts, the more likely first."""

    TOKENS = auto()
    """All ids of the forward."""
    COLUMNS = auto()
    """The tokens of a line; the first dimension counts the lines."""
    UNPADDED = auto()
    """The ids that are no padding."""
    LINES = auto()
    """The lines; the first dimension counts the tokens of a line."""
    TURNED = auto()
    """All ids of the forward, the first one of each line, then the second ones."""
    CONTEXT = auto()
    """All tokens of the forward's requests up to now, one request after the other."""
    PADDED = auto()
    """All ids of the forward, and padding that the engine adds later."""
    REQUESTS = auto()
    """The requests of the forward."""
    ALL_REQUESTS = auto()
    """The requests of the step."""


class SiteLayout(NamedTuple):
    """How a tensor of a forward has rows."""

    kind: Counted
    dim: int
    parts: int = 1
    """Entries of the dimension for each row: heads, where these are one dimension with the tokens."""


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The rows of a site in the order of a step's work."""

    values: torch.Tensor
    """[rows, W]; or [requests, W] if only the last row of each request is computed."""
    is_known: torch.Tensor
    """[rows] or [requests] bool."""
    is_by_request: bool


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of tensors belong in the work."""

    all_rows: torch.Tensor
    """Of each row its index in the work, or what is no token of it."""
    told: torch.Tensor
    """Which rows belong to the work."""
    rows: torch.Tensor
    """Of these, their indices."""
    num_rows: int
    """Of the work."""
    are_all: bool
    """Whether the rows are those of the work, in its order."""

    @classmethod
    def of(cls, all_rows: torch.Tensor, num_rows: int) -> "_Places":
        """Take the index in the work of each row."""
        told = all_rows >= 0
        are_all = len(all_rows) == num_rows and bool((all_rows == torch.arange(num_rows)).all())
        return cls(all_rows, told, all_rows[told], num_rows, are_all)

    @property
    def num_told(self) -> int:
        """Rows that belong to the work."""
        return len(self.rows)


@dataclass(frozen=True)
class _Rows:
    """The rows of one forward."""

    rows: torch.Tensor
    """[lines, tokens] int64."""
    work: Sequence[RequestWork]
    starts: Sequence[int]
    ambiguous: Collection[int]

    @cached_property
    def flat(self) -> torch.Tensor:
        return self.rows.flatten()

    @cached_property
    def unpadded(self) -> torch.Tensor:
        return self.flat[self.flat != PADDING]

    @cached_property
    def requests(self) -> list[int]:
        """The requests of the forward, in the order of its rows."""
        there = torch.bucketize(self.flat[self.flat >= 0], torch.tensor(self.starts[1:]), right=True)
        return list(dict.fromkeys(there.tolist()))

    @cached_property
    def context(self) -> torch.Tensor:
        """For each token of the requests up to now, its row in the work; earlier tokens have none."""
        parts = []
        for at in self.requests:
            rows = self.flat[(self.flat >= self.starts[at]) & (self.flat < self.starts[at + 1])]
            computed = torch.arange(self.starts[at], int(rows.max()) + 1)
            parts.append(torch.cat([torch.full((self.work[at].first,), PADDING), computed]))
        return torch.cat(parts) if parts else self.flat[:0]

    def places(self, kind: Counted, size: int, *, is_by_work: bool) -> "_Places | None":
        """Return where the rows of a tensor belong; None if it has others."""
        key = kind, size, is_by_work
        if key not in self._known:
            rows = self._of(kind, size, is_by_work=is_by_work)
            num = len(self.work) if kind >= Counted.REQUESTS else self.starts[-1]
            self._known[key] = None if rows is None else _Places.of(rows, num)
        return self._known[key]

    @cached_property
    def _known(self) -> "dict[tuple[Counted, int, bool], _Places | None]":
        return {}

    def _of(self, kind: Counted, size: int, *, is_by_work: bool) -> torch.Tensor | None:
        """Return for each row of a tensor its row, or its request, in the work; None if it has others."""
        match kind:
            case Counted.TOKENS | Counted.COLUMNS:
                rows = self.flat
            case Counted.LINES | Counted.TURNED:
                rows = self.rows.T.flatten()
            case Counted.UNPADDED:
                rows = self.unpadded if size == len(self.unpadded) else self.flat
            case Counted.CONTEXT:
                rows = self.context
            case Counted.PADDED:
                rows = torch.cat([self.flat, torch.full((max(0, size - len(self.flat)),), PADDING)])
            case Counted.REQUESTS:
                rows = torch.tensor(sorted(self.requests) if is_by_work else self.requests, dtype=torch.int64)
            case Counted.ALL_REQUESTS:
                rows = torch.arange(len(self.work))
        return rows if len(rows) == size else None

    def layouts(self, shape: Sequence[int], *, is_assumed: bool) -> Iterator[SiteLayout]:
        """Yield the ways in which a tensor of this shape may have the rows of the forward."""
        lines, columns = self.rows.shape
        sizes = {
            Counted.TOKENS: len(self.flat),
            Counted.UNPADDED: len(self.unpadded),
            Counted.CONTEXT: len(self.context),
            Counted.TURNED: len(self.flat),
            Counted.REQUESTS: len(self.requests),
            Counted.ALL_REQUESTS: len(self.work),
        }
        for dim, size in enumerate(shape):
            yield from (SiteLayout(kind, dim) for kind, count in sizes.items() if count == size)
            if dim and shape[0] == lines and size == columns:
                yield SiteLayout(Counted.COLUMNS, dim)
            if dim and shape[0] == columns and size == lines:
                yield SiteLayout(Counted.LINES, dim)
            if is_assumed and len(self.flat) < size <= len(self.flat) + _MOST_PADDING:
                yield SiteLayout(Counted.PADDED, dim)
        for kind, padding in (
            (Counted.TOKENS, 0),
            (Counted.CONTEXT, 0),
            *([(Counted.PADDED, 1)] if is_assumed else []),
        ):
            count = sizes[Counted.TOKENS if kind is Counted.PADDED else kind] + padding
            if len(shape) > 1 and count and shape[0] > count and not shape[0] % count:
                yield SiteLayout(kind, 0, shape[0] // count)


class RowTeller:
    """Brings the tensors of all forwards of a step into the order of its work."""

    def __init__(self, lookups: Collection[Lookup], *, recomputes: bool = False) -> None:
        """Prepare for an engine.

        Args:
            lookups: where token ids become vectors; empty if the engine does not show it.
            recomputes: whether an engine that shows no look-up computes all earlier tokens of a request in each step.
        """
        self.lookups = frozenset(lookups)
        self.order = RowOrder.PACKED
        """Used if there are no look-ups."""
        self._recomputes = recomputes
        self._habits = {lookup: Habits() for lookup in self.lookups}
        self._layouts: dict[Site, set[SiteLayout]] = {}
        self._widths: dict[Site, int] = {}
        """Elements of a row, of sites that have nothing but the rows of each forward; 0 for others."""
        self._of_one_row: set[Site] = set()
        """Sites that were seen only in forwards of one row, whose dimensions tell little."""
        self.has_reordered = False
        """Whether there are tensors whose rows lie in another order than the ids that are looked up."""
        self._is_by_work = True
        """Whether rows of requests lie in the order of the work, and not in that of the forward's rows."""

    @property
    def pads(self) -> set[int]:
        """Token ids of padding."""
        return {token for habits in self._habits.values() for token in habits.pads}

    def tell(self, forwards: Sequence[StepForward], work: Sequence[RequestWork], *, is_whole: bool = True) -> Told:
        """Tell the rows of all forwards of a step; those of different look-ups are of different models."""
        if not self.lookups:
            return Told([self._assumed(work) for _ in forwards])
        rows: list[torch.Tensor] = [forward.ids for forward in forwards]
        ambiguous = frozenset[int]()
        for lookup, habits in self._habits.items():
            places = [at for at, forward in enumerate(forwards) if forward.lookup == lookup]
            if places:
                told = tell_rows([forwards[at].ids for at in places], work, habits, is_whole=is_whole)
                for at, rows_of_forward in zip(places, told.rows, strict=True):
                    rows[at] = rows_of_forward
                ambiguous |= told.ambiguous
        if is_whole and not any(forward.lookup for forward in forwards):  # the step looks up ids at another place
            ambiguous = frozenset(range(starts_of(work)[-1]))
        return Told(rows, ambiguous)

    def _assumed(self, work: Sequence[RequestWork]) -> torch.Tensor:
        """Return the rows of a step's one forward, [lines, tokens]."""
        lines, starts = [], starts_of(work)
        for at, item in enumerate(work):
            earlier = torch.full((item.first if self._recomputes else 0,), EARLIER)
            lines.append(torch.cat([earlier, torch.arange(starts[at], starts[at + 1])]))
        if self.order is RowOrder.PACKED and len({*map(len, lines)}) > 1:  # equal lines are in one order in any case
            return torch.cat(lines)[None]
        width = max(map(len, lines))
        pads = [torch.full((width - len(line),), PADDING) for line in lines]
        is_left = self.order is RowOrder.PADDED_LEFT
        return torch.stack(
            [torch.cat([pad, line] if is_left else [line, pad]) for pad, line in zip(pads, lines, strict=True)]
        )

    def learn(self, forwards: Sequence[StepForward], work: Sequence[RequestWork]) -> None:
        """Learn from a small step of unlike tokens how the engine lays out its rows."""
        for lookup, habits in self._habits.items():
            ids = [forward.ids for forward in forwards if forward.lookup == lookup]
            if ids:
                learn_habits(ids, work, habits)

    def learn_layouts(self, forwards: Sequence[StepForward], work: Sequence[RequestWork]) -> None:
        """Keep the layouts that each site has in all steps.

        An engine may lay out a row that is alone in another way: the heads of one key as if they were tokens. Its size
        shows that nothing but the row is there.
        """
        for forward, rows in self._with_rows(forwards, work):
            num_rows = len(rows.flat)
            for site, tensor in forward.tensors.items():
                layouts = {*rows.layouts(tensor.shape, is_assumed=not self.lookups)}
                width = self._widths.setdefault(site, tensor.numel() // max(1, num_rows))
                has_rows_alone = tensor.numel() == num_rows * width
                if site not in self._layouts:
                    self._layouts[site] = layouts
                    self._of_one_row |= {site} if num_rows == 1 else set()
                elif num_rows > 1 and has_rows_alone and site in self._of_one_row:
                    self._layouts[site] = layouts
                elif num_rows > 1 or not has_rows_alone:
                    self._layouts[site] &= layouts
                self._of_one_row -= {site} if num_rows > 1 else set()
                self._widths[site] *= has_rows_alone

    def has_mixed_forwards(self, forwards: Sequence[StepForward], work: Sequence[RequestWork]) -> bool:
        """Whether a forward has rows of several requests."""
        return any(len(rows.requests) > 1 for _forward, rows in self._with_rows(forwards, work))

    def forget_reordered(
        self, forwards: Sequence[StepForward], work: Sequence[RequestWork], alone: Mapping[int, Mapping[Site, SiteRows]]
    ) -> None:
        """Forget layouts in which rows have the values of other rows: the engine has reordered its rows.

        Args:
            forwards: of a step that is right.
            work: of the step.
            alone: rows of some of its requests, by their index, that were computed in steps of their own.
        """
        starts = starts_of(work)
        told = self.tell(forwards, work)
        while True:
            shown = self.in_order(forwards, work, told)
            reordered = {
                site
                for at, sites in alone.items()
                for site in shown.keys() & sites.keys()
                if _is_reordered(shown[site], sites[site], starts[at])
            }
            if not reordered:
                return
            self.has_reordered = True
            for site in reordered:
                self._layouts[site] = self._layouts[site] - {min(self._layouts[site])}

    def learn_order_of_requests(
        self, forwards: Sequence[StepForward], work: Sequence[RequestWork], returned: torch.Tensor
    ) -> None:
        """Learn in which order rows of requests lie, from the logits that a step returned in the order of the work."""
        num_equal = {}
        for self._is_by_work in (False, True):
            rows = self.in_order(forwards, work).values()
            num_equal[self._is_by_work] = sum(
                item.values.shape == returned.shape and torch.equal(item.values.to(returned), returned) for item in rows
            )
        self._is_by_work = num_equal[True] >= num_equal[False]

    def in_order(
        self, forwards: Sequence[StepForward], work: Sequence[RequestWork], told: Told | None = None
    ) -> dict[Site, SiteRows]:
        """Return the rows of each site in the order of the work. Of a row that is computed twice, the last one counts.

        Args:
            forwards: of a step.
            work: of the step.
            told: what `tell` returns for them.
        """
        result: dict[Site, SiteRows] = {}
        for forward, rows in self._with_rows(forwards, work, told):
            for site, tensor in forward.tensors.items():
                layout = min(self._layouts.get(site, ()), default=None)
                is_one = len(rows.flat) == 1 and tensor.numel() == self._widths.get(site)
                values = tensor.reshape(1, -1) if is_one else None if layout is None else _rows_first(tensor, layout)
                if layout is None or values is None:
                    continue
                places = rows.places(layout.kind, len(values), is_by_work=self._is_by_work)
                if places is not None:
                    _put(result, site, values, places, rows, is_by_request=layout.kind >= Counted.REQUESTS)
        return result

    def padding_of(
        self, forwards: Sequence[StepForward], work: Sequence[RequestWork], site: Site, shape: Sequence[int]
    ) -> tuple[int, torch.Tensor] | None:
        """Return the dimension of a site's tensor that counts the rows of the last forward, and which are padding."""
        layout = min(self._layouts.get(site, ()), default=None)
        if layout is None or layout.kind not in (Counted.TOKENS, Counted.PADDED) or layout.parts > 1:
            return None
        told = self.tell(forwards, work, is_whole=False)
        rows = _Rows(told.rows[-1], work, starts_of(work), told.ambiguous)
        places = rows.places(layout.kind, shape[layout.dim], is_by_work=True)
        return None if places is None else (layout.dim, places.all_rows == PADDING)

    def _with_rows(
        self, forwards: Sequence[StepForward], work: Sequence[RequestWork], told: Told | None = None
    ) -> Iterator[tuple[StepForward, _Rows]]:
        starts, told = starts_of(work), told or self.tell(forwards, work)
        for forward, rows in zip(forwards, told.rows, strict=True):
            yield forward, _Rows(rows, work, starts, told.ambiguous)


def _rows_first(tensor: torch.Tensor, layout: SiteLayout) -> torch.Tensor | None:
    """Return [rows, W] of a tensor in a layout; None if its shape does not fit."""
    if not tensor.numel() or tensor.dim() <= layout.dim or tensor.shape[0] % layout.parts:
        return None
    if layout.kind in (Counted.COLUMNS, Counted.LINES):
        tensor = tensor.movedim(layout.dim, 1).flatten(0, 1)
    else:
        tensor = tensor.movedim(layout.dim, 0)
    return tensor.reshape(len(tensor) // layout.parts, -1)


def _put(
    result: dict[Site, SiteRows],
    site: Site,
    values: torch.Tensor,
    places: _Places,
    rows: _Rows,
    *,
    is_by_request: bool,
) -> None:
    """Put rows of a forward where they belong in the work."""
    if not places.num_told:
        return
    if site not in result and places.are_all:
        result[site] = SiteRows(values, torch.ones(places.num_rows, dtype=torch.bool), is_by_request)
    else:
        if site not in result:
            empty = values.new_zeros(places.num_rows, values.shape[1])
            result[site] = SiteRows(empty, torch.zeros(places.num_rows, dtype=torch.bool), is_by_request)
        if result[site].values.shape != (places.num_rows, values.shape[1]):
            return
        result[site].values[places.rows] = values[places.told.to(values.device)]
        result[site].is_known[places.rows] = True
    if rows.ambiguous and not is_by_request:
        result[site].is_known[[*rows.ambiguous]] = False


def _is_reordered(shown: SiteRows, alone: SiteRows, start: int) -> bool:
    """Whether a row from the start on, computed alone, is not at its place and is at another one."""
    if shown.is_by_request or alone.is_by_request or shown.values.shape[1] != alone.values.shape[1]:
        return False
    values, expected = shown.values.double(), alone.values.double()
    is_near = torch.cdist(values, expected) <= _NEAR * expected.norm(dim=1)
    return bool((is_near.any(dim=0) & ~is_near[start : start + len(expected)].diagonal()).any())


def find_lookups(shown: Sequence[tuple[Lookup, torch.Tensor, bool]], tokens: Sequence[int]) -> list[Lookup]:
    """Return where token ids become vectors.

    Args:
        shown: in the order of the run, what is given integers, these, and whether it makes numbers of them.
        tokens: unlike token ids of a step.
    """
    ids_of: dict[Lookup, list[torch.Tensor]] = {}
    for lookup, ids, _ in shown:
        ids_of.setdefault(lookup, []).append(ids)
    lookups = []
    for lookup in dict.fromkeys(lookup for lookup, _, makes_numbers in shown if makes_numbers):
        rest = iter([token for ids in ids_of[lookup] for token in ids.flatten().tolist()])
        if all(token in rest for token in tokens):  # they are there in their order
            module = lookup.of_module  # cheaper to watch than its operators
            same = ids_of.get(module, [])
            is_same = len(same) == len(ids_of[lookup]) and all(map(torch.equal, same, ids_of[lookup]))
            lookups.append(module if lookup.path and is_same else lookup)
    return list(dict.fromkeys(lookups))


def _nothing(_site: Site, _tensor: torch.Tensor) -> None:
    return None


def run_step(
    stepper: Stepper,
    work: Work,
    teller: RowTeller,
    *,
    keep: Callable[[Sequence[StepForward], Site, torch.Tensor], torch.Tensor],
    only: Collection[Site] | None = None,
    rows: Sequence[int] | None = None,
    following: Sequence[Sequence[int]] = (),
) -> tuple[list[StepForward], torch.Tensor]:
    """Run a step; return its forwards with their tensors, and its logits.

    Args:
        stepper: the engine.
        work: of the step.
        teller: knows where forwards begin.
        keep: returns what to keep of a tensor; is given the forwards up to now, too.
        only: the sites to show; None for all.
        rows: see `watched_run`.
        following: see `watched_run`.
    """
    forwards = list[StepForward]()

    def begin(lookup: Lookup | None, ids: torch.Tensor, _makes_numbers: bool) -> See:
        lines = ids if lookup is None else ids.reshape(-1, ids.shape[-1] if ids.dim() else 1)
        forward, at = StepForward(lookup, lines), len(forwards)
        forwards.append(forward)

        def see(site: Site, tensor: torch.Tensor) -> None:
            if site.what != RETURNED:
                forward.tensors[site] = keep(forwards[: at + 1], site, tensor)

        return see

    see = _nothing if teller.lookups else begin(None, torch.empty(0, 0), False)
    logits = watched_run(
        stepper, work, see, only=only, rows=rows, following=following, lookups=teller.lookups, on_ids=begin
    )
    return forwards, logits
