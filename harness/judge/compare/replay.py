"""Forced replay: HF's forward over an engine's rows, each recorded value put back as soon as it has been compared.

The calls for each operation (oracle/paired.py; the two forwards never run at the same time):

1. The thread of the control calls `Replay.control`: it keeps what the control gave, and puts the recorded rows back.
2. The thread of the truth calls `Replay.truth`: it hands the rows and the control's to the `Judge`, and puts the
   recorded rows back. The judge may leave measuring to a worker thread.

The thread of the truth calls `Replay.part_begins` before the part of the model with the operations, and afterwards
`Replay.part_done`: the judge waits for its worker, as the part's weights are freed now.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from harness.base.memory import give_back
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import PaddedBatch, RecordedRows
from harness.judge.compare.projected import Projections, is_above
from harness.judge.compare.sequences import NOWHERE
from harness.judge.compare.shapes import engine_dtype
from harness.oracle.paired import PartCall, Sample, Value

_LARGE_BYTES = 4 << 20
"""Rows of an operation after which the memory of what was judged is given back."""
RowsAt = Callable[[torch.Tensor], torch.Tensor]
"""Returns the rows of a tap at some places of a batch: [R, ...] for [R] int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapRows:
    """Judged rows of one tap in one batch; tensors [rows, W]."""

    operation: Operation
    batch: PaddedBatch
    places: torch.Tensor
    actual: torch.Tensor
    """The engine's rows, in the recorded dtype."""
    expected: torch.Tensor
    """Rows of the truth."""
    control: torch.Tensor | None
    """Rows of the control, in the engine's dtype."""
    control_scores: torch.Tensor | None
    """[rows, n] of a router's choice: the control's scores."""
    values: Mapping[str, RowsAt]
    """Of its inputs, as the truth's forward used them."""
    value: Value
    unrecorded: tuple[str, ...] = ()
    """Taps between the recorded ones and this one, which HF computed; empty if all inputs were recorded."""
    part: PartCall | None = None
    """The call of the part of the model with the operation; None outside of all parts."""

    @property
    def rows(self) -> Rows:
        """Identity of the rows."""
        return self.batch.rows(self.places)

    def select(self, keep: torch.Tensor) -> "TapRows":
        """Return some of the rows, [rows] bool."""

        def some(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[keep.to(x.device)]

        return replace(
            self,
            places=self.places[keep],
            actual=self.actual[keep.to(self.actual.device)],
            expected=self.expected[keep.to(self.expected.device)],
            control=some(self.control),
            control_scores=some(self.control_scores),
        )

    def with_rows(
        self, places: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, control: torch.Tensor | None
    ) -> "TapRows":
        """Return these rows and others behind them, [R, W]."""
        return replace(
            self,
            places=torch.cat([self.places, places]),
            actual=torch.cat([self.actual, actual.to(self.actual.device)]),
            expected=torch.cat([self.expected, expected]),
            control=None if self.control is None or control is None else torch.cat([self.control, control]),
        )

    def inputs(self, places: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Return the operation's inputs at the judged rows, or at other places."""
        wanted = self.places if places is None else places
        if self.operation.kind is Kind.EMBEDDING or not self.operation.inputs:
            return [self.batch.token_ids.flatten().roll(-self.operation.tokens_ahead)[wanted]]
        return [self.values[tap](wanted) for tap in self.operation.inputs]


class Judge:
    """Judges rows of one operation after the other; all calls come from the thread of the truth.

    This class judges no row: the replay then only puts back what was recorded.
    """

    def __init__(self, graph: Graph, usable: Collection[str]) -> None:
        self.graph = graph
        self.usable = usable
        """Names of recorded taps with the right shape and dtype."""
        self.unrecorded_before: Mapping[str, tuple[str, ...] | None] = dict.fromkeys(op.tap for op in graph)
        """See `unrecorded_before`; None where an operation is not judged."""

    def add(self, rows: TapRows) -> None:
        """Judge rows of an operation, at once or before `settle` returns."""

    def add_estimated(self, operation: Operation, rows: Rows, roundings: torch.Tensor, bound: torch.Tensor) -> None:
        """Note the estimated errors of rows [R] of a product that are far below their bound."""

    def choose(self, operation: Operation, chosen: torch.Tensor, num_scores: int) -> None:
        """Note what the rows of a batch chose, [rows, ..., k] int64, of so many scores."""

    def settle(self) -> None:
        """Finish the judgement of added rows, before their weights are freed."""

    @property
    def reads_later(self) -> bool:
        """Whether it may read rows after `add` has returned."""
        return True

    @property
    def is_decided(self) -> bool:
        """Whether the replay may stop."""
        return False


class DecidedError(Exception):
    """Stops a replay after the decision of its judge; the caller of the replay catches it."""


class Replay:
    """Puts an engine's rows back into both forwards of one batch, and passes them to the judge."""

    def __init__(
        self,
        judge: Judge,
        batch: PaddedBatch,
        projections: Projections | None = None,
        exact: torch.Tensor | None = None,
        *,
        needs_history: bool = True,
    ) -> None:
        """Prepare to replay a batch.

        Args:
            judge: is given the rows.
            batch: of recorded rows.
            projections: of products, which are then multiplied out at some places alone.
            exact: these places, [n] int64.
            needs_history: whether all recorded rows are put back; else those to be judged, and what attention reads.
        """
        self._judge, self._batch, self._projections, self._exact = judge, batch, projections, exact
        self._read_later = (
            None if needs_history else {tap for op in judge.graph if op.kind is Kind.ATTENTION for tap in op.inputs[1:]}
        )
        """Taps that are read at earlier rows; None if all are put back."""
        self._control: dict[str, torch.Tensor] = {}
        self._control_scores: dict[str, torch.Tensor] = {}
        self._recorded_rows: dict[str, RecordedRows] = {}
        """Rows that are in the control's forward, and not yet in the truth's."""
        self._is_recorded: dict[str, torch.Tensor] = {}
        """[places] bool of each tap: where the engine recorded it."""
        self._values: dict[str, RowsAt] = {}
        """Of each tap that an operation has yet to read, as the truth's forward used it."""
        self._part: PartCall | None = None
        computed = (op for op in judge.graph if not op.is_kept)
        self._num_readers = Counter(tap for op in computed for tap in op.inputs)
        self._positions = batch.positions if exact is None else batch.judged_positions
        """Where attention is computed; None for everywhere."""
        self._sampled = frozenset(self._computed_in_part())
        """Taps that are computed only at the chosen positions and places."""

    @property
    def is_sampled(self) -> bool:
        """Whether some operation is judged only at the chosen positions."""
        return bool(self._sampled) and self._projections is None

    @property
    def sample(self) -> Sample | None:
        """Where both forwards compute products and attention; None for everywhere."""
        if not self._sampled:
            return None
        positions = torch.arange(self._batch.num_tokens) if self._positions is None else self._positions
        return Sample(positions=positions, taps=self._sampled, product_places=self._exact)

    def _computed_in_part(self) -> Iterator[str]:
        """Yield the products and contexts that are computed in part: they were recorded in every row of the batch."""
        for op in self._judge.graph:
            is_inside = op.kind in (Kind.LINEAR, Kind.ATTENTION) and op.tap not in self._judge.graph.head
            if not is_inside or op.tap not in self._judge.usable:
                continue
            if op.kind is Kind.LINEAR and self._projections is not None:
                is_wanted = self._is_projected(op, self._projections)
            else:
                is_wanted = self._positions is not None
            if is_wanted and self._batch.is_whole(op.tap):
                yield op.tap

    def _is_projected(self, operation: Operation, projections: Projections) -> bool:
        """Whether a product is judged by its projections: one whose inputs were recorded, and which is wide enough."""
        if self._exact is None or operation.tap in self._judge.unrecorded_before:
            return False
        num_judged = int(self._batch.is_own.sum())
        return projections.fit(operation, self._batch.num_places, len(self._exact), num_judged)

    @property
    def logit_positions(self) -> list[int]:
        """Positions at which the LM head was recorded in a row to be judged; position 0 if it was nowhere."""
        recorded = [self._recorded(tap) for tap in self._judge.graph.head]
        places = torch.cat([torch.zeros(0, dtype=torch.int64), *(item.places for item in recorded if item is not None)])
        places = places[self._batch.is_own[places]]
        positions: list[int] = (places % self._batch.num_tokens).unique().tolist()
        return positions or [0]

    def control(self, value: Value) -> torch.Tensor | None:
        """See `PairObserver.control`."""
        tap, recorded = value.operation.tap, self._recorded(value.operation.tap)
        located = None if recorded is None else _where(value, recorded)
        if recorded is None or located is None:
            return None
        self._recorded_rows[tap] = recorded
        here, at = located
        self._control[tap] = value.rows[at].flatten(1)  # a copy: the control may go on before the truth comes here
        if value.scores is not None:
            self._control_scores[tap] = value.scores[at]
        return self._put_back(value, recorded, here, at)

    def truth(self, value: Value) -> torch.Tensor | None:
        """See `PairObserver.truth`."""
        tap, replaced = value.operation.tap, None
        recorded = self._recorded_rows.pop(tap, None) or self._recorded(tap)
        is_recorded = torch.zeros(self._batch.num_places, dtype=torch.bool)
        located = None if recorded is None else _where(value, recorded)
        if recorded is not None and located is not None:
            here, at = located
            is_recorded[(recorded if tap in self._sampled else here).places] = True
            if self._projections is not None and tap in self._sampled and value.module_input is not None:
                self._judge_product(value, recorded, self._tap_rows(value, here, at), self._projections)
            elif (judged := self._tap_rows(value, here, at)) is not None:
                self._judge.add(judged)
            replaced = self._put_back(value, recorded, here, at)
        self._is_recorded[tap] = is_recorded
        if value.scores is not None and not value.operation.among_tokens:
            rows = value.in_all_places(value.rows if replaced is None else replaced, self._batch.num_places)
            self._judge.choose(value.operation, rows[self._batch.is_own], value.scores.shape[-1])
        self._keep(value, recorded, replaced)
        if value.rows.nbytes >= _LARGE_BYTES:
            give_back()
        return replaced

    def part_begins(self, call: PartCall) -> None:
        """See `PairObserver.part_begins`."""
        copied = partial(_copied, dtype=engine_dtype(self._batch.recording))
        args, kwargs = tree_map_only(torch.Tensor, copied, (call.args, _rows_in(call.kwargs)))
        self._part = replace(call, args=args, kwargs={**call.kwargs, **kwargs})

    def part_done(self) -> None:
        """See `PairObserver.part_done`; raises DecidedError once nothing further is to be judged."""
        self._part = None
        self._judge.settle()
        if self._judge.is_decided:
            raise DecidedError

    def _judge_product(
        self, value: Value, recorded: RecordedRows, exact: TapRows | None, projections: Projections
    ) -> None:
        """Judge all rows of a product: the sample's by its results, others by projections, or multiplied out."""
        if exact is None:  # no row of the sample is to be judged
            assert value.module_input is not None
            product = projections.multiplied(value.operation, value.module_input)
            judged = self._tap_rows(replace(value, rows=product, places=None), recorded, recorded.places)
            if judged is not None:
                self._judge.add(judged)
            return
        x, operation = value.module_input, value.operation
        assert x is not None
        multiplied = x[exact.places.to(x.device)], exact.expected
        is_rest = self._is_judged(operation, recorded.places) & ~torch.isin(recorded.places, exact.places)
        rows, places = recorded.rows[is_rest.to(recorded.rows.device)], recorded.places[is_rest]
        if not len(places):
            self._judge.add(exact)
            return
        x = x[places.to(x.device)]
        roundings, bound = projections.estimates(operation, x, rows.to(x.device), multiplied)
        is_far = is_above(roundings, bound)
        if bool(is_far.any()):
            x_far = x[is_far.to(x.device)]
            expected = projections.multiplied(operation, x_far)
            control = None if exact.control is None else projections.control(operation, x_far)
            exact = exact.with_rows(places[is_far], rows[is_far.to(rows.device)], expected, control)
        self._judge.add_estimated(operation, self._batch.rows(places[~is_far]), roundings[~is_far], bound[~is_far])
        self._judge.add(exact)

    def _tap_rows(self, value: Value, recorded: RecordedRows, at: torch.Tensor) -> TapRows | None:
        """Return the rows that the engine computed, with recorded inputs or through unrecorded taps."""
        unrecorded = self._judge.unrecorded_before.get(value.operation.tap, ())
        control = self._control.pop(value.operation.tap, None)
        scores = self._control_scores.pop(value.operation.tap, None)
        if unrecorded is None:
            return None
        judged = self._is_judged(value.operation, recorded.places)
        if not bool(judged.any()):
            return None
        return TapRows(
            operation=value.operation,
            batch=self._batch,
            places=recorded.places[judged],
            actual=(recorded.rows if bool(judged.all()) else recorded.rows[judged]).flatten(1),
            expected=self._some(value.rows, at[judged.to(at.device)]).flatten(1),
            control=None if control is None else control[judged.to(control.device)],
            control_scores=None if scores is None else scores[judged.to(scores.device)],
            values={tap: self._values[tap] for tap in value.operation.inputs if tap in self._values},
            value=value,
            unrecorded=unrecorded,
            part=self._part,
        )

    def _some(self, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return rows of the running forward: a copy where they may be read after it has gone on."""
        return rows if not self._judge.reads_later and _are_all(len(rows), at) else rows[at]

    def _is_judged(self, operation: Operation, places: torch.Tensor) -> torch.Tensor:
        """[places] bool: rows that the engine computed itself, from recorded inputs or through unrecorded taps."""
        judged = self._batch.is_own[places]
        if not self._judge.unrecorded_before.get(operation.tap, ()):
            judged = judged & self._inputs_recorded(operation)[places]
        return judged

    def _inputs_recorded(self, operation: Operation) -> torch.Tensor:
        """[places] bool: where all inputs were recorded; of attention, with the whole history."""
        are_recorded = torch.ones(self._batch.num_places, dtype=torch.bool)
        for index, tap in enumerate(operation.inputs):
            is_recorded = self._is_recorded.get(tap, torch.zeros_like(are_recorded))
            if operation.kind is Kind.ATTENTION and index:
                is_recorded = is_recorded.view(-1, self._batch.num_tokens).int().cummin(dim=1).values.bool().flatten()
            are_recorded &= is_recorded
        return are_recorded

    def _put_back(self, value: Value, recorded: RecordedRows, here: RecordedRows, at: torch.Tensor) -> torch.Tensor:
        """Return the rows with which the forward continues: of a sample, all rows as they were recorded.

        Where all of them were recorded, they are the recorded ones in their dtype.
        """
        if value.operation.tap in self._sampled and value.places is not None:
            if _are_all(self._batch.num_places, recorded.places):
                return recorded.rows.reshape(-1, *value.rows.shape[1:])
            rows = value.rows.new_zeros(self._batch.num_places, *value.rows.shape[1:])
            return put_back(rows, recorded.places.to(rows.device), recorded.rows)
        if value.rows.is_floating_point() and _are_all(len(value.rows), at):
            return here.rows.reshape(value.rows.shape)
        return put_back(value.rows, at, _usable_rows(value, here, at))

    def _recorded(self, tap: str) -> RecordedRows | None:
        """Return the recorded rows of a tap that HF computes from the same tokens."""
        is_judged = self._read_later is not None and tap not in self._read_later
        recorded = self._batch.recorded(tap, is_judged=is_judged) if tap in self._judge.usable else None
        ahead = self._judge.graph[tap].tokens_ahead if recorded is not None and tap in self._judge.graph else 0
        if recorded is None or not ahead:
            return recorded
        keep = self._batch.is_followed(ahead)[recorded.places]
        return RecordedRows(places=recorded.places[keep], rows=recorded.rows[keep]) if bool(keep.any()) else None

    def _keep(self, value: Value, recorded: RecordedRows | None, replaced: torch.Tensor | None) -> None:
        """Keep a value until the last operation that reads it has been judged; the model may change its tensor.

        What was recorded in every row is read again instead.
        """
        operation = value.operation
        for tap in operation.inputs:
            self._num_readers[tap] -= 1
            if not self._num_readers[tap]:
                self._values.pop(tap, None)
        if not self._num_readers[operation.tap]:
            return
        if recorded is not None and value.rows.is_floating_point() and len(recorded.places) == self._batch.num_rows:
            like = value.rows.new_empty(0, *value.rows.shape[1:])
            self._values[operation.tap] = partial(_read_again, self._batch, operation.tap, like)
            return
        rows = value.rows.clone() if replaced is None else replaced.to(value.rows)
        is_whole = operation.tap in self._sampled
        self._values[operation.tap] = partial(
            _rows_at, rows if is_whole else value.in_all_places(rows, self._batch.num_places)
        )


def _read_again(batch: PaddedBatch, tap: str, like: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return rows of a tap that was recorded in every row, [R, ...] as a forward has them."""
    recorded = batch.recorded(tap)
    assert recorded is not None
    where = torch.full((batch.num_places,), NOWHERE, dtype=torch.int64)
    where[recorded.places] = torch.arange(len(recorded.places))
    return recorded.rows[where[places]].to(like).reshape(-1, *like.shape[1:])


def _rows_at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return rows[places.to(rows.device)]


def _where(value: Value, recorded: RecordedRows) -> tuple[RecordedRows, torch.Tensor] | None:
    """Return the recorded rows that are among a value's rows, and their indices there; None if there are none."""
    if value.places is None:
        return recorded, recorded.places.to(value.rows.device)
    at = torch.searchsorted(value.places, recorded.places).clamp(max=len(value.places) - 1)
    is_there = value.places[at] == recorded.places
    if not bool(is_there.any()):
        return None
    kept = RecordedRows(places=recorded.places[is_there], rows=recorded.rows[is_there])
    return kept, at[is_there].to(value.rows.device)


def _copied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor, in a narrower dtype if that holds the same numbers, as it does of recorded rows."""
    if not x.is_floating_point() or dtype.itemsize >= x.itemsize:
        return x.clone()
    narrow = x.to(dtype)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x.clone()


def _rows_in(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hidden states among the arguments of a part, by name."""
    return {name: value for name, value in kwargs.items() if name == "hidden_states"}


def _usable_rows(value: Value, recorded: RecordedRows, at: torch.Tensor) -> torch.Tensor:
    """Return the recorded rows, with HF's own choice instead of indices that do not exist."""
    if value.scores is None or value.operation.among_tokens:
        return recorded.rows
    possible = are_indices(recorded.rows, value.scores.shape[-1])
    if bool(possible.all()):
        return recorded.rows
    rows = recorded.rows.clone()
    rows[~possible] = value.rows[at][~possible.to(at.device)].to(rows.device, rows.dtype).reshape(-1, *rows.shape[1:])
    return rows


def are_indices(chosen: torch.Tensor, num_scores: int) -> torch.Tensor:
    """[rows] bool: whether all indices of a row, [rows, ..., k], are below the number of scores."""
    return ((chosen >= 0) & (chosen < num_scores)).flatten(1).all(dim=1)


def put_back(rows: torch.Tensor, at: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Return the rows with the recorded rows at some indices."""
    values = recorded.to(rows.device, rows.dtype)
    if _are_all(len(rows), at):
        return values.reshape(rows.shape)
    rows = rows.clone()
    rows[at] = values.reshape(-1, *rows.shape[1:])
    return rows


def _are_all(num_rows: int, at: torch.Tensor) -> bool:
    """Whether indices are those of all rows in their order."""
    return len(at) == num_rows and bool((at == torch.arange(num_rows, device=at.device)).all())


def unrecorded_before(graph: Graph, usable: set[str]) -> dict[str, tuple[str, ...] | None]:
    """Return, for each recorded tap whose inputs were not all recorded, the unrecorded taps that HF computes before it.

    They reach back to the nearest recorded taps. None if they reach back to the model's tokens: the whole model so far
    would be judged as one operation, and propagation judges that better. Tokens that a layer looks ahead to are near.
    """
    between_taps: dict[str, tuple[str, ...] | None] = {}
    for operation in graph:
        if operation.tap in usable and not operation.is_kept and not set(operation.inputs) <= usable:
            between = _unrecorded(graph, operation, usable)
            is_closed = all(graph[tap].inputs or graph[tap].tokens_ahead for tap in between)
            between_taps[operation.tap] = tuple(op.tap for op in graph if op.tap in between) if is_closed else None
    return between_taps


def _unrecorded(graph: Graph, operation: Operation, usable: set[str]) -> set[str]:
    unrecorded: set[str] = set()
    pending = [tap for tap in operation.inputs if tap not in usable]
    while pending:
        tap = pending.pop()
        if tap not in unrecorded:
            unrecorded.add(tap)
            pending += [item for item in graph[tap].inputs if item not in usable]
    return unrecorded
