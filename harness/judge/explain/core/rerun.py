"""HF's own code, run again: single operations on any inputs, and the part of the model around an operation.

Where a part is run, what the engine recorded is put back, as where it was judged. So everything that the engine did
not record follows from HF's own code: a change is tried through all that lies between it and the next tap.

`P` places of the batch, `R` rows.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch

from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import RecordedRows
from harness.judge.compare.evidence import PartInputs
from harness.judge.compare.replay import put_back
from harness.oracle.model import HFModel
from harness.oracle.paired import Value, run_as_far_as
from harness.oracle.watch import AttentionCall, Watch

_SHARE = 0.9
"""Of the time for an explanation: the rest is for what comes after the trials in bulk."""
_SAME = 1e-5
"""Relative distance of two runs that give the same."""


def replay(hf: HFModel, operation: Operation, inputs: list[torch.Tensor]) -> torch.Tensor | None:
    """Return what an operation gives row by row: [rows, W] float64; None if it cannot be computed by itself.

    Args:
        hf: the model.
        operation: a product, a norm, a sum or a gated activation.
        inputs: [rows, ...] float64 in the order of `operation.inputs`.
    """
    flat = [x.flatten(1) for x in inputs]
    if operation.kind in (Kind.LINEAR, Kind.NORM):
        with hf.exactly(operation.module):  # of another part of the model, maybe, than what is explained
            return _of_module(hf.module(operation.module), operation, flat[0])
    if operation.kind is Kind.ADD and len(flat) == 2 and flat[0].shape == flat[1].shape:
        return flat[0] + flat[1]
    if operation.kind is Kind.ACTIVATION and (function := activation_of(hf, operation)) is not None:
        gate, up = factors_of(operation, flat)
        activated: torch.Tensor = function(gate)
        return activated if up is None else activated * up
    return None


def _of_module(module: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return None
    x = x.to(weight.device)
    if operation.source.endswith(":linear"):
        bias = getattr(module, "bias", None)
        bias = bias.to(torch.float64) if isinstance(bias, torch.Tensor) else None
        return torch.nn.functional.linear(x, weight.to(torch.float64), bias).cpu()
    if operation.kind is Kind.NORM and x.shape[-1] != weight.shape[0]:  # norms of q and k see heads
        if x.shape[-1] % weight.shape[0]:  # what is normed is a part of its input
            return None
        x = x.unflatten(-1, (-1, weight.shape[0]))
    result: torch.Tensor = module(x)
    return result.flatten(1).cpu().to(torch.float64)


def factors_of(operation: Operation, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return gate and up of an activation, [rows, W]; None for up if it has none.

    Both may come as one, gate first, from a fused projection.
    """
    gate, *others = inputs
    if others:
        return gate, others[0]
    if gate.shape[1] == 2 * prod(operation.shape):
        gate, up = gate.chunk(2, dim=1)
        return gate, up
    return gate, None


def activation_of(hf: HFModel, operation: Operation) -> Any:
    """Return the activation function beside the module that reads a gated product; None if there is none."""
    parent = hf.module(operation.module.rpartition(".")[0])
    return next((getattr(parent, name) for name in ("act_fn", "activation_fn", "act") if hasattr(parent, name)), None)


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A part of the model, held in float64, and the operation in it that is looked at."""

    hf: HFModel
    watch: Watch
    part_inputs: PartInputs
    operation: Operation
    usable: frozenset[str]
    """Recorded taps."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """[P, ...] of each tap of the part, as the latest run went on with it."""
    recorded: dict[str, RecordedRows | None] = field(default_factory=dict)
    """Of each tap of the part, what the engine recorded in the batch."""
    calls: dict[str, AttentionCall] = field(default_factory=dict)
    """Of each attention of the part, by its tap."""

    @property
    def rows(self) -> Rows:
        """Return the rows in all places of the batch, [P]."""
        return self.part_inputs.batch.rows(torch.arange(self.part_inputs.batch.num_places))

    @cached_property
    def _where(self) -> Mapping[tuple[int, int, int], int]:
        return {row: place for place, row in enumerate(self.rows.identities())}

    def places(self, rows: Rows) -> torch.Tensor:
        """Return where rows stand in the batch, [R] int64; -1 for those that stand in another."""
        return torch.tensor([self._where.get(row, -1) for row in rows.identities()], dtype=torch.int64)

    def reading(self, tap: str, rows: Rows, values: torch.Tensor) -> "Rerun":
        """Return a run that goes on with other rows of a tap, [R, W], than were recorded."""
        places = self.places(rows)
        here = places >= 0
        rows_read = RecordedRows(places=places[here], rows=values[here])
        return replace(self, recorded={tap: rows_read}, values={}, calls={})

    def run(self, forced: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None) -> torch.Tensor:
        """Return what the operation gives in all places, [P, W] float64.

        Args:
            forced: by tap, places [R] and rows [R, ...] to put there in the place of what HF computes.
        """
        self.values.clear()
        batch, call = self.part_inputs.batch, self.part_inputs.call
        shape = len(batch.sequences), batch.num_tokens
        show = partial(self._show, forced or {})
        return run_as_far_as(self.operation.tap, self.hf, self.watch, call, shape, show)

    def _recorded(self, tap: str) -> RecordedRows | None:
        if tap not in self.recorded:
            self.recorded[tap] = self.part_inputs.batch.recorded(tap) if tap in self.usable else None
        return self.recorded[tap]

    def _show(self, forced: Mapping[str, tuple[torch.Tensor, torch.Tensor]], value: Value) -> torch.Tensor | None:
        tap, replaced = value.operation.tap, None
        rows = value.in_all_places(value.rows, self.part_inputs.batch.num_places)
        if value.call is not None:
            self.calls[tap] = value.call
        if tap in forced:
            replaced = put_back(rows, *forced[tap])
        elif (recorded := self._recorded(tap)) is not None:
            replaced = put_back(rows, recorded.places, recorded.rows)
        self.values[tap] = (rows if replaced is None else replaced).clone()
        return replaced if replaced is None or value.places is None else replaced[value.places.to(replaced.device)]


def is_same(output: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a part that is run by itself gives what the model gives: to the rounding of float64."""
    return output.shape == right.shape and float((output - right).norm()) <= _SAME * float(right.norm())


@dataclass(slots=True)
class Budget:
    """Time that is left for what is tried in bulk, in seconds of this thread: another process takes none of it."""

    seconds: float
    notes: dict[str, str] = field(default_factory=dict)
    """By tap, what was not tried."""
    _longest: float = field(init=False)
    _end: float = field(init=False, default=math.inf)
    """Time of the thread at which the explanation that is looked for now has taken as long as all may take."""
    _end_of_all: float = field(init=False, default=math.inf)
    """Time of the thread at which nothing is left, while some of it is spent."""

    def __post_init__(self) -> None:
        self._longest = _SHARE * self.seconds

    def begin_explanation(self) -> None:
        """Begin with another operation: what is tried of it takes as long as all together may take, at most."""
        self._end = time.thread_time() + self._longest

    @property
    def left(self) -> float:
        """Time for what comes next, in seconds: what else was tried of this operation has taken its part."""
        return min(self.seconds, min(self._end, self._end_of_all) - time.thread_time())

    @property
    def is_half_spent(self) -> bool:
        """Whether what was tried of this operation leaves less than half of the time for what comes next."""
        return self._end - time.thread_time() < self._longest / 2

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Take the time of the block."""
        self._end_of_all = time.thread_time() + self.seconds
        try:
            yield
        finally:
            self.seconds, self._end_of_all = self._end_of_all - time.thread_time(), math.inf


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a parameter another attribute for the duration of the block; it is as before afterwards."""
    was_its_own, original = name in vars(holder), getattr(holder, name)
    try:
        setattr(holder, name, value)
        yield
    finally:
        if name in vars(holder) and not was_its_own:  # the original is its class's
            delattr(holder, name)
        else:
            setattr(holder, name, original)


@contextmanager
def attributes_kept(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Give modules back the attributes that they have, and what their lists and tables hold."""
    tables = [vars(module) for module in modules]
    tables += [item for table in tables for item in table.values() if type(item) is dict]
    before = [(table, dict(table)) for table in tables]
    lists = [(item, item[:]) for table in tables for item in table.values() if type(item) is list]
    try:
        yield
    finally:
        for table, original in before:
            for name in table.keys() - original.keys():
                del table[name]
            table |= original
        for item, elements in lists:
            item[:] = elements
