"""Finds the taps of a step among tensors: of a live engine, or dumped.

HF computes the same tokens and goes on with the engine's tensor wherever one was found, so each value is looked for as
it follows from the engine's own values. A wrong value is found by the names of tensors, or because HF computes from it
what the engine computed next.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from harness.engines.by_content.columns import (
    Columns,
    Fit,
    Table,
    TableIndex,
    limit_of_same,
    order_of_row,
    relative_error,
)
from harness.engines.by_content.heads import ColumnsOf, HeadOrders, as_ordered, in_order
from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.engines.by_content.relations import Candidate, Relations
from harness.engines.by_content.tap_map import TapEvidence
from harness.engines.by_content.tensor_names import TapNames, elsewhere
from harness.errors import Code, HarnessError
from harness.formats.taps import Kind, Operation
from harness.oracle.model import HFModel

_LEAST_SHARP, _SHARP_ROUNDINGS = 2e-5, 6
"""Relative error up to which a tensor is what HF computes, and not only near to it."""
_SAME = 1e-6
"""Relative error up to which two values of HF's are one, and may be one tensor."""
_NEAR, _NEAR_SHARE = 1.0, 0.5
"""Relative error of the tensor nearest to a lost value, and its share of those of others, for it to be taken."""
_ONE_SIZE, _ONE_SIZE_ROUNDINGS = 1e-3, 7
"""Relative difference of norms up to which rows have been divided by them, and in roundings: the mean square may be
rounded, and the factor that is made of it."""
_LEAST_IN_ORDER = 4
"""Tensors that must be found in the order of their numbers for the numbers to be those of the run."""
_SHARE_OF_NAMES = 0.8
"""Of the names of tensors, those that must follow from other layers' for a name alone to be believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTensor:
    """The tensor that is taken for a tap."""

    table: int
    columns: Columns
    evidence: TapEvidence
    error: float = float("inf")
    """Relative error against what HF computes from the engine's values; infinity if that was not compared."""
    is_last_row: bool = False
    """Whether it has the last token's row alone; `table` then counts the tensors of one row."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A tensor that a run took for a tap, with HF's value of the tap, [T, W]."""

    tensor: FoundTensor
    value: torch.Tensor


class TapFinder:
    """The taps of a step among tensors."""

    def __init__(
        self,
        hf: HFModel,
        ids: torch.Tensor,
        tables: Sequence[Table],
        names: TapNames,
        *,
        last_rows: Sequence[Table] = (),
        rounding: float,
    ) -> None:
        """Take the tensors.

        Args:
            hf: the model that the engine should be, in float32.
            ids: the tokens, [requests, tokens].
            tables: tensors with a row for each token, of any names, in any order.
            names: those that may tell what a tensor is.
            last_rows: tensors of one row.
            rounding: RMS relative error of one rounding in the engine.
        """
        self._hf, self._ids, self._rounding = hf, ids, rounding
        self.tables, self.last_rows = tables, last_rows
        self._index = TableIndex(tables, rounding=rounding)
        self._copy_of = self._index.copy_of
        self._relations = Relations(hf, ids, tables, rounding=rounding, limit=self._sharp_limit)
        self._names = names
        self._orders = HeadOrders(hf.graph)
        self._place = {op.tap: at for at, op in enumerate(hf.graph)}
        self._readers: dict[str, list[str]] = defaultdict(list)
        for op in hf.graph:
            for tap in op.inputs:
                if not op.is_kept:
                    self._readers[tap].append(op.tap)
        self._near: dict[str, list[Fit]] = {}
        self._lost_values: dict[str, torch.Tensor] = {}
        """HF's values [T, W] of the taps that the latest run did not find."""
        self._barred = set[tuple[str, int]]()
        """Taps with tables that are another tap's."""
        self.named: Mapping[str, tuple[int, Columns]] = {}
        """By tap, the table and columns that a user says are it."""
        self._holding_value: dict[str, list[int]] = {}
        """By tap, the tables that held HF's value in the latest run."""
        self.chosen: dict[str, FoundTensor] = {}

    def find(self) -> None:
        """Find the taps by what the tensors hold; then those with other values, by what follows and by names.

        An engine has one order of heads: a layer with another one is wrong, and what it holds is found as any other
        wrong value is, or not at all.
        """
        self._find()
        first = self.chosen
        others = self._orders.keep_most({tap: tensor.columns for tap, tensor in first.items()})
        if others:
            self._find()
            if not first.keys() - others <= self.chosen.keys():
                self.chosen = first
                self._orders.forget()
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        """Refuse a name if its tensor holds another tap's value, and another tensor that of its tap."""
        if not self.named:
            return
        self._walk(self._assumed)
        for tap, (table, _columns) in self.named.items():
            others = [item for item, tables in self._holding_value.items() if item != tap and table in tables]
            right = self._holding_value.get(tap, [])
            if others and right and table not in right:
                raise HarnessError(
                    Code.NAMES_CONTRADICT_CONTENT,
                    "a name contradicts what the tensors hold",
                    where="names",
                    expected=f"{self.tables[right[0]].name} for {tap}",
                    actual=f"{self.tables[table].name}, which holds {others[0]}",
                    hint="correct the name, or leave it out: tensors without a name are found by content",
                )

    def _find(self) -> None:
        self._barred.clear()
        self.chosen = self._walk({})
        while self._find_by_relations() or self._find_by_names() or self._find_by_order() or self._find_by_nearness():
            pass
        self._find_logits()

    def find_first_not_finite(self) -> None:
        """Take the first tensor without a finite row for the first value that no tensor holds, if it is as wide.

        For all tensors of a run in its order, whose logits are not finite: nothing else tells what these hold.
        """
        lost = next((op for op in self._lost() if set(op.inputs) <= self.chosen.keys()), None)
        if lost is None:
            return
        begin = max((self.chosen[tap].table for tap in lost.inputs), default=-1) + 1
        width = prod(lost.shape)
        for at, table in enumerate(self.tables[begin:], start=begin):
            if table.rows.shape[1] == width and not bool(table.rows.isfinite().all(dim=1).any()):
                columns = Columns(start=0, stop=width)
                self.chosen[lost.tap] = FoundTensor(table=at, columns=columns, evidence=TapEvidence.NOT_FINITE)
                return

    def look_up_embedding(self, dtype: torch.dtype) -> None:
        """Take HF's embedding of the tokens where no tensor holds it, so that what reads it can be judged.

        Not if HF computes anything with it besides and the engine rounds that.
        """
        tap = next((op.tap for op in self._hf.graph if op.kind is Kind.EMBEDDING), None)
        value = None if tap is None else self._lost_values.get(tap)
        weight = self._hf.model.get_input_embeddings().weight
        if tap is None or value is None or tap in self.chosen:
            return
        if dtype is torch.float32 or torch.equal(weight[self._ids.flatten().to(weight.device)].cpu(), value):
            self.tables = [*self.tables, Table("HF's embedding of the tokens", value.to(dtype))]
            columns = Columns(start=0, stop=value.shape[1])
            tensor = FoundTensor(table=len(self.tables) - 1, columns=columns, evidence=TapEvidence.LOOKED_UP)
            self.chosen = {tap: tensor, **self.chosen}

    def rows(self, tap: str) -> torch.Tensor:
        """Return the rows of a tap that was found, [T, W]; or [1, W] of the last token's row."""
        return self._rows(self.chosen[tap])

    def name(self, tap: str) -> str:
        """Return the name of the tensor that was found for a tap."""
        tensor = self.chosen[tap]
        return (self.last_rows if tensor.is_last_row else self.tables)[tensor.table].name

    def left(self) -> list[str]:
        """Return the names of tensors that are as wide as a lost tap, and no tap's."""
        widths = {prod(op.shape) for op in self._lost()}
        rows = [(at, Columns(start=0, stop=table.rows.shape[1])) for at, table in enumerate(self.tables)]
        return [
            self.tables[at].name for at, all_of in rows if all_of.stop in widths and not self._is_claimed(at, all_of)
        ]

    def holding(self, tap: str) -> list[Fit]:
        """Return all tables that hold what was found for a tap."""
        chosen = self.chosen[tap]
        operation, chosen_fit = self._hf.graph[tap], Fit(index=chosen.table, columns=chosen.columns, error=chosen.error)
        if chosen.evidence is TapEvidence.NAMED:
            return [chosen_fit]
        return self._fits(operation, self._rows(chosen), self._columns_of, exactly=True) or [chosen_fit]

    def _rows(self, tensor: FoundTensor) -> torch.Tensor:
        return tensor.columns.of((self.last_rows if tensor.is_last_row else self.tables)[tensor.table].rows)

    def _walk(self, assumed: Mapping[str, FoundTensor]) -> dict[str, FoundTensor]:
        """Run HF over the engine's values, and return the tensors that hold what follows.

        Args:
            assumed: tensors to take where no tensor holds HF's value.
        """
        taken: dict[str, _Taken] = {}
        num_barred = len(self._barred)
        self._holding_value.clear()
        self._lost_values.clear()
        first = min((self._place[tap] for tap in assumed), default=0)

        def look(operation: Operation, value: torch.Tensor) -> torch.Tensor | None:
            if operation.kind is Kind.CHOICE:
                return None
            chosen: FoundTensor | None
            if operation.tap in self.named:
                chosen = self._as_named(operation.tap, value)
            elif self._place[operation.tap] < first and not self._is_barred(operation.tap):
                chosen = self.chosen.get(operation.tap)  # does not depend on what is assumed
            else:
                chosen = self._holding(operation, value, taken) or assumed.get(operation.tap)
            if len(self._barred) > num_barred:
                raise EndOfRun
            if chosen is None:
                self._lost_values[operation.tap] = value
                return None
            taken[operation.tap] = _Taken(chosen, value)
            return in_place_of(value, self._rows(chosen))

        run_hf(self._hf, self._ids, look)
        if len(self._barred) > num_barred:
            return self._walk(assumed)
        return {tap: item.tensor for tap, item in taken.items()}

    def _as_named(self, tap: str, value: torch.Tensor) -> FoundTensor:
        table, columns = self.named[tap]
        fits = self._index.find(value, exactly=True)
        self._holding_value[tap] = [fit.index for fit in fits if fit.error <= self._sharp_limit]
        error = relative_error(columns.of(self.tables[table].rows), value)
        return FoundTensor(table=table, columns=columns, evidence=TapEvidence.NAMED, error=error)

    @property
    def _assumed(self) -> dict[str, FoundTensor]:
        return {tap: tensor for tap, tensor in self.chosen.items() if tensor.evidence is not TapEvidence.CONTENT}

    def _is_barred(self, tap: str) -> bool:
        """Whether the tensor that was chosen for a tap is another one's."""
        chosen = self.chosen.get(tap)
        if chosen is None or chosen.is_last_row:
            return False
        return (tap, self._copy_of[chosen.table]) in self._barred

    def _holding(self, operation: Operation, value: torch.Tensor, taken: Mapping[str, _Taken]) -> FoundTensor | None:
        """Return the tensor that holds a value to rounding: of several that do, the one whose name is like it."""

        def columns_of(tap: str) -> Columns | None:
            return taken[tap].tensor.columns if tap in taken else None

        fits = [
            fit
            for fit in self._fits(operation, value, columns_of)
            if (operation.tap, self._copy_of[fit.index]) not in self._barred
        ]
        self._holding_value[operation.tap] = [fit.index for fit in fits if fit.error <= self._sharp_limit]
        fits = [fit for fit in fits if not self._is_named(fit) and self._is_free(fit, value, taken)]
        if not fits or fits[0].error > self._index.fine:
            self._near[operation.tap] = fits
            return self._holding_last_row(operation, value)
        limit = limit_of_same(fits[0].error, self._rounding)  # up to it names decide

        def preference(fit: Fit) -> tuple[int, int, int]:
            table = self.tables[fit.index]
            is_whole = fit.columns.order is None and table.rows.shape[1] == prod(operation.shape)
            kind = 0 if is_whole else 1 if fit.columns.order is None else 2
            return -self._names.likeness(table.name, operation), kind, fit.index

        best = min((fit for fit in fits if fit.error <= limit), key=preference)
        return FoundTensor(table=best.index, columns=best.columns, evidence=TapEvidence.CONTENT, error=best.error)

    def _is_named(self, fit: Fit) -> bool:
        """Whether a user says that a tensor is another tap, of which it is no copy."""
        return fit.error > _SAME and any(
            self._copy_of[table] == self._copy_of[fit.index] and bool(columns.shared(fit.columns)[0])
            for table, columns in self.named.values()
        )

    def _is_free(self, fit: Fit, value: torch.Tensor, taken: Mapping[str, _Taken]) -> bool:
        """Whether a tensor is no other tap's: one tensor serves one tap, unless HF's values of both are the same.

        A tap that it fits markedly worse loses it.
        """
        for tap, item in taken.items():
            tensor = item.tensor
            if tensor.is_last_row or self._copy_of[tensor.table] != self._copy_of[fit.index] or fit.error <= _SAME:
                continue
            here, there = fit.columns.shared(tensor.columns)
            if not here or relative_error(value[:, here], item.value[:, there]) <= _SAME:
                continue
            limit = max(limit_of_same(fit.error, self._rounding), self._sharp_limit / 3)
            if tensor.evidence is not TapEvidence.CONTENT or tensor.error <= limit:
                return False
            self._barred.add((tap, self._copy_of[tensor.table]))
        return True

    def _holding_last_row(self, operation: Operation, value: torch.Tensor) -> FoundTensor | None:
        """Return the tensor of one row that holds the last token's, where an engine may compute that alone."""
        if operation.tap not in self._hf.graph.prunable:
            return None
        row = value[-1:].T
        errors = {
            at: relative_error(table.rows.T, row)
            for at, table in enumerate(self.last_rows)
            if table.rows.shape[1] == len(row)
        }
        best = min(errors, key=lambda at: errors[at], default=None)
        if best is None or errors[best] > self._index.fine:
            return None
        columns = Columns(start=0, stop=len(row))
        return FoundTensor(
            table=best, columns=columns, evidence=TapEvidence.CONTENT, error=errors[best], is_last_row=True
        )

    def _fits(
        self, operation: Operation, value: torch.Tensor, columns_of: ColumnsOf, *, exactly: bool = False
    ) -> list[Fit]:
        """Return the tensors that hold a value in columns that may lie so, the nearest first."""
        fits = [
            fit
            for fit in self._index.find(value, exactly=exactly)
            if self._orders.may_be(operation, fit.columns, columns_of)
        ]
        order = self._orders.following(operation, columns_of)
        if order is not None:  # heads of one KV head are alike at position 0: no order can be read from them
            ordered = self._index.find(in_order(value, order), exactly=True)
            fits += [as_ordered(fit, order) for fit in ordered if fit.columns.is_rising]
        return sorted(fits, key=lambda fit: fit.error) if order is not None else fits

    def _columns_of(self, tap: str) -> Columns | None:
        return self.chosen[tap].columns if tap in self.chosen else None

    def _find_by_names(self) -> bool:
        """Take tensors by their names for values after which nothing was found; return whether more was found."""
        learned = {op.tap: tensor for op in self._lost() if (tensor := self._learned(op)) is not None}
        named = {op.tap: tensor for op in self._lost() if (tensor := self._named_like(op)) is not None}
        if not learned and not named:
            return False
        before = self._assumed
        trial = self._walk({**before, **named, **learned})
        names_tell, kept = self._do_names_tell(), {}
        for tap, tensor in trial.items():
            if tensor.evidence is not TapEvidence.CONTENT:
                if self._leads_on(tap, trial):
                    kept[tap] = replace(tensor, evidence=TapEvidence.CONSUMERS)
                elif tap in before or (names_tell if tap in learned else not self._index.can_tell(tensor.table)):
                    kept[tap] = replace(tensor, evidence=TapEvidence.NAME)
        return self._take(self._walk(kept)) if kept else False

    def _take(self, findings: dict[str, FoundTensor]) -> bool:
        """Take other findings if there are more of them and none of the present ones is lost."""
        before, now = (self._sharp(item) for item in (self.chosen, findings))
        is_more = len(now) > len(before) or len(findings) > len(self.chosen)
        if not is_more or not (findings.keys() >= self.chosen.keys() and now >= before):
            return False
        self.chosen = findings
        return True

    def _learned(self, operation: Operation) -> FoundTensor | None:
        """Return the tensor that is to the operation's layer what others are to theirs."""
        known = self._of_site(operation)
        for name in self._predicted(operation, known):
            for columns in {tensor.columns.start: tensor.columns for tensor in known.values()}.values():
                tensor = self._named(name, columns)
                if tensor is not None and not any(
                    self._is_copy(tensor, known_tensor) for known_tensor in known.values()
                ):
                    return tensor
        return None

    def _is_copy(self, tensor: FoundTensor, original: FoundTensor) -> bool:
        """Whether a tensor is another layer's: a module of all layers may be dumped by each name with its last call."""
        rows, others = self._rows(tensor), self._rows(original)
        return rows.shape == others.shape and torch.equal(rows, others)

    def _of_site(self, operation: Operation) -> dict[int, FoundTensor]:
        """Return what was found for the operation's like in other layers, which may have heads of another size."""
        others = {tap: self._hf.graph[tap] for tap in self.chosen if not self.chosen[tap].is_last_row}
        return {
            operation_elsewhere.layer: self.chosen[tap]
            for tap, operation_elsewhere in others.items()
            if operation_elsewhere.is_like(operation) and operation_elsewhere.layer not in (None, operation.layer)
        }

    def _predicted(self, operation: Operation, known: Mapping[int, FoundTensor]) -> Iterator[str]:
        if operation.layer is not None:
            names = {layer: self.tables[tensor.table].name for layer, tensor in known.items()}
            yield from elsewhere(names, operation.layer)

    def _do_names_tell(self) -> bool:
        """Whether the names of tensors follow from those of other layers: not where they are arbitrary numbers."""
        hits = [
            self.tables[tensor.table].name in self._predicted(self._hf.graph[tap], known)
            for tap, tensor in self.chosen.items()
            if tensor.evidence is TapEvidence.CONTENT
            and not tensor.is_last_row
            and (known := self._of_site(self._hf.graph[tap]))
        ]
        return sum(hits) >= _SHARE_OF_NAMES * max(1, len(hits))

    def _named_like(self, operation: Operation) -> FoundTensor | None:
        """Return the tensor with a name like the tap's."""
        columns = Columns(start=0, stop=prod(operation.shape))
        named = (self._named(name, columns, is_whole=True) for name in self._names.like(operation))
        return next((tensor for tensor in named if tensor is not None), None)

    def _named(self, name: str, columns: Columns, *, is_whole: bool = False) -> FoundTensor | None:
        """Return the columns of the tensor of that name, if it has them and they are no other tap's."""
        for at, table in enumerate(self.tables):
            width = table.rows.shape[1]
            has_them = width == columns.stop if is_whole else width >= columns.stop
            if table.name == name and has_them and not self._is_claimed(at, columns):
                return FoundTensor(table=at, columns=columns, evidence=TapEvidence.NAME)
        return None

    def _is_claimed(self, table: int, columns: Columns) -> bool:
        """Whether columns of a table, or of a copy of it, are taken for a tap."""
        return any(
            not tensor.is_last_row
            and self._copy_of[tensor.table] == self._copy_of[table]
            and bool(tensor.columns.shared(columns)[0])
            for tensor in self.chosen.values()
        )

    def _lost(self) -> list[Operation]:
        """Return the operations that were not found and that something is computed from which was not, either."""
        graph, lost = self._hf.graph, set[str]()
        ends = {graph.logits, *graph.drafted_from.values()}
        for op in reversed(graph.operations):
            if op.tap in self.chosen:
                continue
            readers = self._readers[op.tap]
            if any(tap in lost or self._is_blurred(tap) for tap in readers) or op.tap in ends:
                lost.add(op.tap)
        return [op for op in graph if op.tap in lost and op.kind is not Kind.CHOICE and not op.is_kept]

    def _is_blurred(self, tap: str) -> bool:
        """Whether a tap was found whose value is not what HF computes, or only roughly."""
        return tap in self.chosen and not self._is_sharp(self.chosen[tap])

    def _is_sharp(self, tensor: FoundTensor) -> bool:
        """Whether a tensor holds HF's value to a few roundings: a little more is a value before it that is wrong."""
        return tensor.evidence in (TapEvidence.CONTENT, TapEvidence.NAMED) and tensor.error <= self._sharp_limit

    @property
    def _sharp_limit(self) -> float:
        return min(self._index.fine, max(_LEAST_SHARP, _SHARP_ROUNDINGS * self._rounding))

    def _sharp(self, by_tap: Mapping[str, FoundTensor]) -> set[str]:
        return {tap for tap, item in by_tap.items() if self._is_sharp(item)}

    def _leads_on(self, tap: str, by_tap: Mapping[str, FoundTensor]) -> bool:
        """Whether a tensor holds what HF computes from a tap, through values that were not found."""
        ahead, seen = [tap], {tap}
        while ahead:
            for reader in self._readers[ahead.pop()]:
                if reader in by_tap:
                    if self._is_sharp(by_tap[reader]):
                        return True
                elif reader not in seen:
                    seen.add(reader)
                    ahead.append(reader)
        return False

    def _find_by_relations(self) -> bool:
        """Take what relations between tensors tell, wherever in the model; return whether more was found."""
        candidates = {op.tap: fitting for op in self._lost() if (fitting := self._candidates(op))}
        if not candidates:
            return False
        known = {tap: self._rows(tensor) for tap, tensor in self.chosen.items() if not tensor.is_last_row}
        before = self._assumed
        for told in self._relations.assignments(known, candidates, self._may_be):
            new = {
                tap: FoundTensor(table=item.table, columns=item.columns, evidence=TapEvidence.CONSUMERS)
                for tap, item in told.items()
            }
            trial = self._walk({**before, **new}) if new else {}
            kept = {
                tap: tensor
                for tap, tensor in trial.items()
                if tensor.evidence is not TapEvidence.CONTENT and (tap in before or self._leads_on(tap, trial))
            }
            if kept and self._take(self._walk(kept)):
                return True
        return False

    def _may_be(self, operation: Operation, fit: Fit) -> bool:
        is_free = fit.error <= _SAME or not self._is_claimed(fit.index, fit.columns)
        return is_free and self._orders.may_be(operation, fit.columns, self._columns_of)

    def _candidates(self, operation: Operation) -> list[Candidate]:
        """Return the unclaimed tensors that may be an operation's value, each content once.

        These are tensors near to HF's value, those as wide as it, and the columns that hold it in other layers. What a
        norm divides by its size is none: a norm makes the same of that and of what it reads.
        """
        width, graph = prod(operation.shape), self._hf.graph
        readers = {graph[tap].kind for tap in self._readers[operation.tap]}
        is_read_by_norm = Kind.NORM in readers and operation.kind is not Kind.NORM
        places = [(fit.index, fit.columns) for fit in self._near.get(operation.tap, ())]
        in_other_layers = {
            (self.tables[tensor.table].rows.shape[1], tensor.columns) for tensor in self._of_site(operation).values()
        }
        for at, table in enumerate(self.tables):
            room = table.rows.shape[1]
            places += [(at, columns) for wide, columns in in_other_layers if wide == room]
            places += [(at, self._order_as_read(operation, table))] if room == width else []
        places.sort(key=lambda place: self._names.likeness(self.tables[place[0]].name, operation))  # of copies the last
        candidates = [
            self._relations.candidate(at, columns)
            for at, columns in places
            if self._orders.may_be(operation, columns, self._columns_of)
            and not self._is_claimed(at, columns)
            and not (is_read_by_norm and have_one_size(columns.of(self.tables[at].rows), self._rounding))
        ]
        return list({item.content: item for item in candidates if item is not None}.values())

    def _order_as_read(self, operation: Operation, table: Table) -> Columns:
        """Return the columns of a whole tensor: the elements of heads lie as in what the operation reads.

        Else as in other layers, or as at position 0, where rotary turns nothing.
        """
        whole = Columns(start=0, stop=prod(operation.shape))
        order = self._orders.following(operation, self._columns_of)
        if self._orders.is_free(operation.tap):
            read = [self.chosen[tap] for tap in operation.inputs if tap in self.chosen and self._orders.is_free(tap)]
            alike = [*read, *self._of_site(operation).values()]
            value = self._lost_values.get(operation.tap)
            if alike:
                order = alike[0].columns.ranks
            elif value is not None and operation.kind is Kind.ROTARY:
                order = order_of_row(table.rows[0].float(), value[0], self._sharp_limit)
        return replace(whole, order=order) if order is not None and len(order) == whole.stop else whole

    def _find_by_order(self) -> bool:
        """Take the tensors between two that were found, if they are as many as the lost taps that belong there.

        These are taps that other layers have, too. Where names do not differ in numbers alone that grow in the order of
        the run, take the only tensor that is left, if one tap is. Return whether more was found.
        """
        whole = {tap: tensor for tap, tensor in self.chosen.items() if not tensor.is_last_row}
        taps = sorted(whole, key=self._place.__getitem__)
        numbers = [[int(number) for number in re.findall(r"\d+", table.name)] for table in self.tables]
        of_taps = [numbers[whole[tap].table] for tap in taps]
        is_numbered = len({re.sub(r"\d+", "", table.name) for table in self.tables}) == 1
        is_ordered = is_numbered and len(taps) >= _LEAST_IN_ORDER and of_taps == sorted(of_taps)
        between = [*pairwise(taps)] if is_ordered else []
        new: dict[str, FoundTensor] = {}
        for one, two in between:
            low, high = numbers[whole[one].table], numbers[whole[two].table]
            lost = [op for op in self._lost() if self._place[one] < self._place[op.tap] < self._place[two]]
            free = [at for at, number in enumerate(numbers) if low < number < high]
            new |= self._one_each(lost, sorted(free, key=numbers.__getitem__), most=len(free))
        new = new or self._one_each(self._lost(), range(len(self.tables)), most=1)
        return bool(new) and self._take(self._walk({**self._assumed, **new}))

    def _one_each(self, lost: Sequence[Operation], tables: Sequence[int], *, most: int) -> dict[str, FoundTensor]:
        """Return one tensor for each lost tap that other layers have, in their order, if there are as many."""
        known = {op.tap: next(iter(self._of_site(op).values())).columns for op in lost if self._of_site(op)}
        widths = {columns.stop for columns in known.values()}
        free = [
            at
            for at in tables
            if (width := self.tables[at].rows.shape[1]) in widths
            and not self._is_claimed(at, Columns(start=0, stop=width))
        ]
        if not len(known) == len(free) <= most:
            return {}
        return {
            tap: FoundTensor(table=at, columns=columns, evidence=TapEvidence.NAME)
            for (tap, columns), at in zip(known.items(), free, strict=True)
            if self.tables[at].rows.shape[1] == columns.stop
        }

    def _find_by_nearness(self) -> bool:
        """Take the tensor that is by far the nearest to a lost value, which is by far the nearest to it as well.

        One whose name follows from those of other layers need only be the nearest. Return whether more was found.
        """
        if not self._lost():
            return False
        before = self._assumed
        self._walk(before)  # for the values that are lost
        operations = [op for op in self._lost() if op.tap in self._lost_values]
        candidates = {op.tap: self._candidates(op) for op in operations}
        distances = {
            (tap, item.content): self._relations.distance(item, self._lost_values[tap])
            for tap, items in candidates.items()
            for item in items
        }
        for op in operations:
            order = sorted(candidates[op.tap], key=lambda item: distances[op.tap, item.content])
            for item in order[:1]:
                least = distances[op.tap, item.content]
                rivals = [
                    distance
                    for (tap, content), distance in distances.items()
                    if (tap == op.tap) != (content == item.content)
                ]
                follows = self.tables[item.table].name in self._predicted(op, self._of_site(op))
                if least > (_NEAR if follows else _NEAR_SHARE * min([_NEAR, *rivals])):
                    continue
                evidence = TapEvidence.NAME if follows else TapEvidence.NEAREST
                tensor = FoundTensor(table=item.table, columns=item.columns, evidence=evidence)
                if self._take(self._walk({**before, op.tap: tensor})):
                    return True
        return False

    def _find_logits(self) -> None:
        """Take the tensor with as many columns as the vocabulary for logits of another value, if there is but one."""
        logits = self._hf.graph[self._hf.graph.logits]
        if logits.tap in self.chosen:
            return
        columns = Columns(start=0, stop=prod(logits.shape))
        wide = [
            (table.name, FoundTensor(table=at, columns=columns, evidence=TapEvidence.DEFINITION, is_last_row=is_last))
            for is_last, tables in ((False, self.tables), (True, self.last_rows))
            for at, table in enumerate(tables)
            if table.rows.shape[1] == columns.stop and (is_last or not self._is_claimed(at, columns))
        ]
        named = [item for item in wide if self._names.likeness(item[0], logits) == 2] or wide
        if len(named) == 1:
            self.chosen[logits.tap] = named[0][1]


def have_one_size(rows: torch.Tensor, rounding: float) -> bool:
    """Whether all rows [T, W] have the same norm, as in what a norm divides by it before it multiplies by weights."""
    sizes = rows.float().norm(dim=1)
    return bool(sizes.min() > (1 - max(_ONE_SIZE, _ONE_SIZE_ROUNDINGS * rounding)) * sizes.max())


def in_place_of(value: torch.Tensor, engine_rows: torch.Tensor) -> torch.Tensor:
    """Return HF's rows [T, W] with the engine's last rows in their place, as far as these are finite."""
    missing = len(value) - len(engine_rows)
    rows = torch.cat([value[:missing].to(engine_rows), engine_rows]) if missing else engine_rows
    return rows if bool(rows.isfinite().all()) else torch.where(rows.isfinite(), rows.to(value), value)
