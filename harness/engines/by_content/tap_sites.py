"""Finds the places of taps in three steps: many requests of one token each, then a prompt and one token more.

At position 0 rotary turns nothing and attention sees one value, so a mistake in rotary, mask or cache does not hide the
map. The prompt and the token after it tell apart what is the same at position 0, and show where the rows are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from math import inf, prod

import torch

from harness.engines.by_content.columns import (
    LOOSE,
    Columns,
    Table,
    limit_of_same,
    relative_error,
)
from harness.engines.by_content.finder import TapFinder, have_one_size, in_place_of
from harness.engines.by_content.forwards import SiteRows
from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.engines.by_content.named import named_columns
from harness.engines.by_content.steps import MODULE, RETURNED, Site
from harness.engines.by_content.tap_map import MappedTap, ShownSite, TapEvidence
from harness.engines.by_content.tensor_names import TapNames
from harness.formats.taps import Kind, Operation
from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True)
class FirstTap:
    """A tap of the first step."""

    places: Sequence[tuple[Site, Columns]]
    """Where it is; several places may hold the same value at position 0, and others later."""
    evidence: TapEvidence


def find_first(
    hf: HFModel,
    ids: Sequence[int],
    seen: Mapping[Site, SiteRows],
    *,
    rounding: float,
    tap_names: Mapping[str, str] | None = None,
) -> dict[str, FirstTap]:
    """Return the taps among the tensors of a step of many requests of one token; `hf` is in float32.

    `tap_names` are of sites, and the taps that they are for certain.
    """
    sites = {site.name: site for site in seen}
    tables = [Table(site.name, item.values) for site, item in seen.items() if item.values.shape[1]]
    names = TapNames(hf.graph, [site.name for site in seen if site.what == MODULE])
    finder = TapFinder(hf, torch.tensor(ids)[:, None], tables, names, rounding=rounding)
    labels = [str(sites[table.name]) for table in tables]
    finder.named = named_columns(tap_names or {}, hf.graph, tables, labels)
    finder.find()
    returned = [item for site, item in seen.items() if site.what == RETURNED]
    if any(not bool(item.values.isfinite().all()) for item in returned):
        finder.find_first_not_finite()
    return {
        tap: FirstTap([(sites[tables[fit.index].name], fit.columns) for fit in finder.holding(tap)], chosen.evidence)
        for tap, chosen in finder.chosen.items()
    }


_NO_VALUES = (Kind.CACHE, Kind.STATE, Kind.CHOICE)
"""What no tensor of floating-point numbers holds: a cache is read back, and a choice is of indices."""
_CERTAIN = (TapEvidence.DEFINITION, TapEvidence.NAMED)
_MOST_CANDIDATES = 24
_MOST_TRIALS = 200
_AT_ONCE = 8
"""Trials in one forward."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A source with its rows in the prompt and the token after it, [T, W]; or in the last row of each alone, [2, W]."""

    source: ShownSite
    rows: torch.Tensor
    is_sampled_only: bool = False

    @property
    def has_finite_row(self) -> bool:
        """Whether all of a row is finite."""
        return bool(self.rows.isfinite().all(dim=1).any())


class LaterSteps:
    """The engine's tensors in two steps of one request."""

    def __init__(
        self,
        hf: HFModel,
        ids: Sequence[int],
        prefill: Mapping[Site, SiteRows],
        decode: Mapping[Site, SiteRows],
        *,
        rounding: float,
    ) -> None:
        """Take the steps.

        Args:
            hf: the model that the engine should be.
            ids: the prompt, and one token.
            prefill: tensors of the prompt's step.
            decode: tensors of the token's step.
            rounding: RMS relative error of one rounding in the engine.
        """
        self._hf, self._ids, self._rounding = hf, torch.tensor(ids)[None], rounding
        self._prefill, self._decode, self._num_tokens = prefill, decode, len(ids) - 1
        self._order = {site: at for at, site in enumerate(prefill)}
        self._taken: set[ShownSite] = set()
        """Sources that hold a tap for certain."""
        self._pending: dict[str, list[_Read]] = {}
        """Tensors that hold a tap's value at position 0, and not at later ones."""
        self._others: dict[str, list[_Read]] = {}
        """By tap with a tensor that holds its value, those that hold it at position 0 alone."""
        self._best_reads: dict[str, _Read] = {}
        self.taps: dict[str, MappedTap] = {}
        self.uncertain: dict[str, str] = {}

    def tell_apart(self, first: Mapping[str, FirstTap]) -> None:
        """Find the sources of each tap, in the order of HF's run; then those that only other taps tell.

        Args:
            first: where each tap is at position 0.
        """
        run_hf(self._hf, self._ids, lambda operation, value: self._look(operation, value, first))
        logits = self._hf.graph.logits
        returned = self._read(self._returned(logits), is_by_request=True)
        if logits not in self.taps and returned is not None:
            self._take(logits, [returned], TapEvidence.DEFINITION)
        for operation in self._hf.graph:
            self._take_what_is_read(operation.tap)
        for operation in reversed(self._hf.graph.operations):
            lost = [self._hf.graph[tap] for tap in operation.inputs if tap not in self.taps]
            lost = [item for item in lost if item.kind not in _NO_VALUES]
            if lost and not operation.is_kept and self._best_read(operation.tap) is not None:
                self._find_by(operation, lost)
        self._prefer_content()
        if returned is not None:  # the engine serves these, even if a product before them holds HF's logits
            self._take(logits, [returned], TapEvidence.DEFINITION)
        unclear = [tap for tap in self._pending if tap not in self.taps]
        self.uncertain |= dict.fromkeys(
            unclear, "the tensors that hold it at position 0 hold another value at later ones"
        )

    def _look(self, operation: Operation, value: torch.Tensor, first: Mapping[str, FirstTap]) -> torch.Tensor | None:
        tap = first.get(operation.tap)
        if tap is None:
            return None
        reads = [self._long(site, columns, operation) for site, columns in tap.places]
        candidates = [read for read in reads if read is not None]
        if not candidates:
            self.uncertain[operation.tap] = "no tensor that holds it at position 0 has a row for each token of a prompt"
            return None
        if tap.evidence is TapEvidence.NAMED:
            self._take(operation.tap, candidates[:1], tap.evidence)
            return in_place_of(value, candidates[0].rows)
        errors = [self._error(read, value) for read in candidates]
        nearest = min(errors)
        limit = limit_of_same(nearest, self._rounding)
        holding = [read for read, error in zip(candidates, errors, strict=True) if error <= limit]
        if nearest > self._held:  # the engine has another value, or this tensor is another one at later positions
            self._pending[operation.tap] = left = [read for read in candidates if read.source not in self._taken]
            return in_place_of(value, left[-1].rows) if left else None
        self._taken |= {read.source for read in holding}
        self._others[operation.tap] = [read for read, error in zip(candidates, errors, strict=True) if error > limit]
        is_by_consumers = tap.evidence is TapEvidence.CONSUMERS
        self._take(operation.tap, holding, TapEvidence.CONSUMERS if is_by_consumers else TapEvidence.CONTENT)
        return in_place_of(value, holding[0].rows)

    @property
    def _held(self) -> float:
        """Relative error up to which a tensor is the value, where another may be meant."""
        return max(1e-4, 24 * self._rounding)

    def _take(self, tap: str, reads: Sequence[_Read], evidence: TapEvidence) -> None:
        """Take sources for a tap: what modules return first."""

        def is_indirect(read: _Read) -> tuple[bool, bool]:
            return not read.source.columns.is_rising, read.source.site.what != MODULE

        ordered = sorted(reads, key=is_indirect)
        self.uncertain.pop(tap, None)
        self._best_reads[tap] = ordered[0]
        self.taps[tap] = MappedTap(
            tap=tap,
            evidence=evidence,
            sources=tuple(read.source for read in ordered),
            is_sampled_only=ordered[0].is_sampled_only,
        )

    def _long(self, site: Site, columns: Columns, operation: Operation) -> _Read | None:
        """Return the rows of a site; the last one alone where an engine may compute only that; None without these."""
        source = ShownSite(site=site, columns=columns)
        read = self._read(source, is_by_request=False)
        is_prunable = operation.tap in self._hf.graph.prunable
        return self._read(source, is_by_request=True) if read is None and is_prunable else read

    def _read(self, source: ShownSite, *, is_by_request: bool = False) -> _Read | None:
        """Return a source's rows in both steps; None if some are unknown, or it has too few columns."""
        items = [step.get(source.site) for step in (self._prefill, self._decode)]
        rows = [
            source.columns.of(item.values)
            for item in items
            if item is not None
            and item.is_by_request == is_by_request
            and bool(item.is_known.all())
            and item.values.shape[1] >= source.columns.stop
        ]
        return _Read(source, torch.cat(rows), is_sampled_only=is_by_request) if len(rows) == len(items) else None

    def _best_read(self, tap: str) -> _Read | None:
        """Return the tensor that was found for a tap, or that may be it."""
        return self._best_reads.get(tap) or next(reversed(self._pending.get(tap, ())), None)

    def _take_what_is_read(self, tap: str) -> None:
        """Take another tensor than the one that holds a value, if all of its readers were computed from that.

        A value that is changed behind its operation is one mistake of that operation, and not one of each reader. What
        is computed within the reader's module is the reader's, and what is only rounded is a convention's. A norm that
        is wrong itself may read what another norm could: a norm makes the same of many tensors.
        """
        readers = [op for op in self._hf.graph if tap in op.inputs and not op.is_kept]
        if tap not in self.taps or any(reader.tap not in self._pending for reader in readers):
            return
        results = [read.source.site for reader in readers for read in self._pending[reader.tap]]
        if not results or any(map(self._is_named, (tap, *(reader.tap for reader in readers)))):
            return
        first, held = min(results, key=self._order.__getitem__), self._best_reads[tap]
        changed = [] if any(reader.kind is Kind.NORM for reader in readers) else self._changed(tap, held, first)
        trials: list[Mapping[str, _Read]] = [
            {tap: read}
            for read in (*self._others.get(tap, ()), *changed)
            if not read.source.site.path == first.path != held.source.site.path
        ]
        for reader in readers if trials else ():
            trials = list(self._computing(reader, trials))
        if trials:
            self._take(tap, [trials[0][tap]], TapEvidence.CONSUMERS)
            for reader in readers:
                self._take(reader.tap, self._pending[reader.tap][-1:], TapEvidence.CONTENT)

    def _is_named(self, tap: str) -> bool:
        return tap in self.taps and self.taps[tap].evidence is TapEvidence.NAMED

    def _changed(self, tap: str, held: _Read, first: Site) -> Iterator[_Read]:
        """Yield what may be a value that was changed before it is read: tensors of no tap that were computed since.

        Args:
            tap: of the value.
            held: the tensor that holds it.
            first: the first site of what reads it.
        """
        since = [site for site, at in self._order.items() if self._order[held.source.site] < at < self._order[first]]
        for read in self._whole(self._hf.graph[tap], since):
            source = replace(read.source, columns=replace(read.source.columns, order=held.source.columns.ranks))
            rows = source.columns.of(read.rows)
            if source not in self._taken and relative_error(rows, held.rows) > LOOSE:
                yield replace(read, source=source, rows=rows)

    def _find_by(self, reader: Operation, lost: Sequence[Operation]) -> None:
        """Take the tensors for inputs of an operation from which HF computes what the engine has for it."""
        chosen = islice(product(*(self._candidates(operation, reader) for operation in lost)), _MOST_TRIALS)
        trials = [dict(zip((op.tap for op in lost), reads, strict=True)) for reads in chosen]
        for taken in self._computing(reader, trials):
            if any(self._computing(reader, self._without_each(taken))):
                continue  # the operation does not depend on one of them
            for tap, read in self._nearest_of_exchanged(reader, taken).items():
                self._take(tap, [read], TapEvidence.CONSUMERS)
            if reader.tap not in self.taps:
                self._take(reader.tap, self._pending[reader.tap][-1:], TapEvidence.CONTENT)
            return

    @staticmethod
    def _without_each(taken: Mapping[str, _Read]) -> list[dict[str, _Read]]:
        return [{**taken, tap: replace(read, rows=torch.zeros_like(read.rows))} for tap, read in taken.items()]

    def _computing(self, reader: Operation, trials: Sequence[Mapping[str, _Read]]) -> Iterator[Mapping[str, _Read]]:
        """Yield the tensors from which HF computes what the engine has for an operation."""
        for begin in range(0, len(trials), _AT_ONCE):
            part = trials[begin : begin + _AT_ONCE]
            for taken, errors in zip(part, self._errors_with(reader, part), strict=True):
                if errors.get(reader.tap, inf) <= self._held:
                    yield taken

    def _nearest_of_exchanged(self, reader: Operation, taken: Mapping[str, _Read]) -> Mapping[str, _Read]:
        """Return the same tensors for taps as HF's values are nearest to: a sum is the same in any order."""
        if len(taken) == 1 or len({read.rows.shape for read in taken.values()}) > 1:
            return taken
        orders = [dict(zip(taken, order, strict=True)) for order in permutations(taken.values())]
        errors = self._errors_with(reader, orders)
        same = [at for at, item in enumerate(errors) if item.get(reader.tap, inf) <= self._held]
        return orders[min(same, key=lambda at: sum(errors[at][tap] for tap in taken), default=0)]

    def _errors_with(self, reader: Operation, trials: Sequence[Mapping[str, _Read]]) -> list[dict[str, float]]:
        """Return how far tensors are from HF's values, of taps that take them and of the operation that reads them.

        One forward has a request for each trial.
        """
        errors: list[dict[str, float]] = [{} for _ in trials]

        def look(operation: Operation, value: torch.Tensor) -> torch.Tensor | None:
            reads = [taken.get(operation.tap) or self._best_read(operation.tap) for taken in trials]
            pairs = [(read, part) for read, part in zip(reads, value.chunk(len(trials)), strict=True) if read]
            if not pairs:
                return None
            if operation.tap in trials[0] or operation.tap == reader.tap:
                for of_trial, (read, part) in zip(errors, pairs, strict=True):
                    of_trial[operation.tap] = relative_error(read.rows, part[-len(read.rows) :])
            if operation.tap == reader.tap:
                raise EndOfRun
            return torch.cat([in_place_of(part, read.rows) for read, part in pairs])

        following = [] if self._hf.mtp is None else self._hf.mtp.following
        with self._hf.followed_by([*following] * len(trials)):
            run_hf(self._hf, self._ids.repeat(len(trials), 1), look)
        return errors

    def _prefer_content(self) -> None:
        """Take the tensors that hold what HF computes from those found, where the one that was taken does not.

        An input that was found later may show that what was computed from another one is that of another layer.
        """
        kept = set[str]()
        while kept_too := self._put_right(kept):
            kept |= kept_too

    def _put_right(self, kept: Collection[str]) -> set[str]:
        """Take such tensors, unless what the engine computes next is from those that were taken before.

        Args:
            kept: taps whose tensors stay.

        Returns:
            Taps whose tensors have to stay, too: nothing was taken.
        """
        taken, needed = dict[str, list[_Read]](), set[str]()

        def look(operation: Operation, value: torch.Tensor) -> torch.Tensor | None:
            tap, current = operation.tap, self._best_reads.get(operation.tap)
            if current is None:
                return None
            if not self._holds(current, value) and self.taps[tap].evidence not in _CERTAIN:
                whole = self._whole(operation, self._prefill)  # a mask may be as wide, without one finite row
                holding = [read for read in whole if read.has_finite_row and self._holds(read, value)]
                if not holding:
                    needed.update(taken.keys() & self._by_consumers & {*operation.inputs})
                elif tap not in kept:
                    taken[tap] = holding
            return in_place_of(value, taken.get(tap, [current])[0].rows)

        run_hf(self._hf, self._ids, look)
        if not needed:
            for tap, reads in taken.items():
                self._take(tap, reads, TapEvidence.CONTENT)
        return needed

    @property
    def _by_consumers(self) -> set[str]:
        """Taps whose tensors were found by what is computed from them."""
        return {tap for tap, mapped in self.taps.items() if mapped.evidence is TapEvidence.CONSUMERS}

    def _holds(self, read: _Read, value: torch.Tensor) -> bool:
        return self._error(read, value) <= self._held

    def _error(self, read: _Read, value: torch.Tensor) -> float:
        """Return the relative error of the rows that are finite: the others are judged, and tell nothing."""
        is_finite = read.rows.isfinite().all(dim=1)
        rows, expected = read.rows[is_finite], value[-len(read.rows) :][is_finite]
        return relative_error(rows, expected) if len(rows) else self._held

    def _whole(self, operation: Operation, sites: Iterable[Site]) -> Iterator[_Read]:
        """Yield the tensors at sites that have a row for each token, and as many columns as a tap."""
        columns = Columns(start=0, stop=prod(operation.shape))
        for site in sites:
            if self._prefill[site].values.shape[1] == columns.stop:
                read = self._read(ShownSite(site=site, columns=columns))
                if read is not None:
                    yield read

    def _candidates(self, operation: Operation, reader: Operation) -> list[_Read]:
        """Return what may be an operation's value, each once: what is like another layer's sources first.

        A norm makes the same of all multiples of a value: where one reads it, any tensor of its width is no candidate.
        """
        sites = list(self._prefill)
        known = [at for tap in operation.inputs if (at := self._place(tap)) is not None]
        between = sites[max(known, default=0) + 1 : self._place(reader.tap)]
        pending = self._pending.get(operation.tap, ())
        if reader.kind is Kind.NORM:
            others = [read for read in pending if not have_one_size(read.rows, self._rounding)]
        else:
            others = [*pending, *self._whole(operation, reversed(between))]
        reads: list[_Read] = []
        for read in (*map(self._read, self._like(operation)), *others):
            if read is not None and not any(torch.equal(read.rows, earlier.rows) for earlier in reads):
                reads.append(read)
        return reads[:_MOST_CANDIDATES]

    def _place(self, tap: str) -> int | None:
        """Return where in the run a tap is."""
        if tap in self.taps:
            return self._order[self.taps[tap].sources[0].site]
        return self._order[self._pending[tap][-1].source.site] if self._pending.get(tap) else None

    def _like(self, operation: Operation) -> Iterator[ShownSite]:
        """Yield what is to the operation's layer what sources are to other layers, for the same site of HF's."""
        for tap, mapped in self.taps.items():
            mapped_operation = self._hf.graph[tap]
            if (
                mapped_operation.is_like(operation)
                and mapped_operation.layer is not None
                and operation.layer is not None
            ):
                for source in mapped.sources[:4]:
                    for site in source.site.elsewhere(mapped_operation.layer, operation.layer):
                        yield replace(source, site=site)

    def _returned(self, logits: str) -> ShownSite:
        (width,) = self._hf.graph[logits].shape
        return ShownSite(site=Site("", 0, RETURNED), columns=Columns(start=0, stop=width))
