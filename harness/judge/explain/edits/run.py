"""Run the part of the model around a wrong operation with one expression of HF's source changed.

Every module around an operation is a few lines of Python, and so are the functions that it calls. No family and no kind
of operation is known here: a norm, a gate, a router and a scan are all code.

A change is tried first on a few of the wrong rows, in the innermost module that runs the code. Only where they come out
as they were recorded, the whole part is run.

`P` places of the batch, `R` rows, `F` few of them.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map

from harness.formats.taps import Kind
from harness.judge.compare.batch import PaddedBatch, RecordedRows
from harness.judge.compare.evidence import PartInputs
from harness.judge.explain.core.fit import fit_factor_near_one
from harness.judge.explain.core.rerun import Budget, Rerun, attributes_kept, is_same
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, explained
from harness.judge.explain.edits.change import ModelChange
from harness.judge.explain.edits.code import LinesRun, changes_of_code, lines_run, modules_around
from harness.judge.explain.edits.held import changes_of_parameters
from harness.judge.explain.edits.limits import Meter, TooMuchError, limited
from harness.judge.explain.experts.router import are_chosen_alike, choice
from harness.judge.explain.states.decode import Decode, decode_of
from harness.oracle.paired import PartCall
from harness.oracle.watch import token_dim

_FEW = (7, 11, 13, 17)
"""Numbers of rows that are tried first: one of them is no other size of a tensor."""
_SOME, _ALL = 0.5, 0.85
"""Shares of rows that come out as recorded: for a change to be told, and for less likely ones to be left out."""
_MOST_MISTAKES = 32
"""Changes that are tried of one sound operation."""


def other_code(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what the operation gives with one change of HF's code around it, or of what it holds.

    Causes: in *module* (*file:line*), `*expression*` is left out, is applied twice, is `*expression*`, takes the other
    branch, comes after `*statement*`, is multiplied by *value*, is rounded to *dtype*; *parameter* is zero, all one,
    transposed, in another order, rounded, scaled, or that of *module*; *module* gives its input. In decode alone: one
    of the changes of code, where a state goes on from a prompt that is right.
    """
    budget = wrong.edit_budget
    if budget is None or budget.left <= 0:
        return
    with budget.spent():
        all_trials = [trials for trials in (_Trials.in_decode(wrong), _Trials.of(wrong)) if trials is not None]
    for trials in all_trials:
        if (yield from _tried(trials, budget)):
            return


def _tried(trials: "_Trials", budget: Budget) -> Generator[Hypothesis, None, bool]:
    """Yield the changes under which most rows come out as recorded; return whether nearly all do under one."""
    wrong, first, fitted = trials.wrong, None, list[torch.Tensor]()
    with budget.spent():
        seen, changes = set[int](), in_turns(wrong, trials.lines, of_code_alone=bool(trials.where))
    for number, (likelihood, change) in enumerate(changes):
        if first is not None and likelihood > first:
            break  # what is less likely and fits as well would say less
        if budget.left <= 0:
            budget.notes[wrong.operation.tap] = (
                f"{number:,} of {len(changes):,} edits of HF's code were tried in the time for them (--explain-seconds)"
            )
            break
        with budget.spent():
            hypothesis = trials.hypothesis(change)
            if hypothesis is None or (digest := _digest(hypothesis.output)) in seen:
                continue
            seen.add(digest)
            if change.is_fitted and any(is_same(hypothesis.output, output) for output in fitted):
                continue
            fitted += [hypothesis.output] if change.is_fitted else []
            if first is None and trials.share(hypothesis.output) >= _ALL:
                first = likelihood + change.is_fitted
        yield hypothesis
    if trials.num_ended and wrong.operation.tap not in budget.notes:
        budget.notes[wrong.operation.tap] = (
            f"{trials.num_ended:,} edits of HF's code were ended: they took far more memory or time than it does"
        )
    return first is not None


def likely_mistakes(wrong: WrongOperation, *, of_code: bool) -> Iterator[Hypothesis]:
    """Yield what changes of what HF's code holds make of a few rows, whatever was recorded.

    The other rows are as they should be.

    Args:
        wrong: a sound operation.
        of_code: whether changes of the code that have a term of the field come before them.
    """
    trials, seen, num_tried = _Trials.of(wrong), set[int](), 0
    if trials is None or wrong.operation.kind is Kind.CHOICE:
        return
    operations = list(wrong.graph)
    later = operations[operations.index(wrong.operation) + 1 :]
    is_read_by_it = any(op.module == wrong.operation.module for op in later)  # as a sum is by the norm after it
    changes = [(change, False) for change in (changes_of_code(wrong, trials.lines) if of_code else ())]
    if not is_read_by_it:
        changes += [(change, True) for change in changes_of_parameters(wrong, modules_around(wrong)[:1])]
    for change, is_of_parameter in sorted(changes, key=lambda item: item[0].rank):
        if change.is_fitted or change.is_vague:
            continue
        if (num_tried := num_tried + 1) > _MOST_MISTAKES:
            return
        output = trials.output_of_few(change, may_be_right=is_of_parameter)
        if output is None or ((digest := _digest(output)) in seen and not is_of_parameter):
            continue
        seen.add(digest)
        yield Hypothesis(cause=change.tell(1.0).cause, output=output)


def in_turns(wrong: WrongOperation, lines: LinesRun, *, of_code_alone: bool = False) -> list[tuple[int, ModelChange]]:
    """Return the changes around an operation: what is likely and near comes first, with a number for how much.

    A change of the next module outwards comes with the less likely ones of the module inside of it.
    """
    paths = modules_around(wrong)
    changes = [*(() if of_code_alone else changes_of_parameters(wrong, paths)), *changes_of_code(wrong, lines)]
    distance = {path: at for at, path in enumerate(paths) if paths[0].startswith(path)}
    numbered = [(change.rank + distance.get(change.module, 1), change) for change in changes]
    return sorted(numbered, key=lambda item: item[0])


def _writing(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside of one whose forward may write to them."""
    return [inner for inner in module.modules() if not type(inner).__module__.startswith("torch.")]


def _digest(output: torch.Tensor) -> int:
    return hash(output.contiguous().numpy().tobytes())


@dataclass(frozen=True, slots=True)
class _Place:
    """Somewhere to run an edit: the part, or a module of it on a few rows."""

    rerun: Rerun
    places: torch.Tensor
    """[n] int64, of the rows."""
    meter: Meter
    """Of the right run."""
    decode: Decode | None = None
    """What is run instead, if it is not all of the part."""

    def run(self) -> torch.Tensor:
        return self.rerun.run()[self.places] if self.decode is None else self.decode.run()


@dataclass(slots=True, kw_only=True)
class _Trials:
    """The trials of edits on the rows of one wrong operation that stand in one batch."""

    wrong: WrongOperation
    here: torch.Tensor
    """[R] bool: the rows of the batch."""
    part: _Place
    right: torch.Tensor
    """[n, W] what the part gives at these rows."""
    unrecorded: dict[str, torch.Tensor]
    """[n, ...] of each tap at these rows that was not recorded, in the order of the run."""
    arguments: dict[str, tuple[Any, Any]]
    """By module, what it was called with first."""
    lines: LinesRun
    modules: Sequence[nn.Module]
    """Of the part, those whose forward may write to them."""
    few: dict[str, tuple[_Place, torch.Tensor] | None] = field(default_factory=dict)
    """By module: where to run it on a few rows, and their numbers [F] in the batch; None if it cannot be."""
    num_ended: int = 0
    where: str = ""
    """Of the cause: which rows are computed by the changed code, if it is not all."""

    @classmethod
    def in_decode(cls, wrong: WrongOperation) -> "_Trials | None":
        """Go on from the right state of each prompt; None unless a mixer with a state is wrong in decode alone."""
        if wrong.rerun is None or wrong.downstream is not None:
            return None
        modules = _writing(wrong.hf.module(wrong.rerun.part_inputs.call.path))
        try:
            with attributes_kept(modules):
                decode = decode_of(wrong)
                if decode is None:
                    return None
                first, row = decode.first()
                part, few = (_Place(wrong.rerun, torch.arange(0), Meter(), run) for run in (decode, first))
                with part.meter, lines_run() as lines:
                    right = part.run()
                with few.meter:
                    few.run()
        except Exception:  # a mixer that keeps its state elsewhere than in HF's cache
            return None
        if not is_same(right, wrong.expected):
            return None
        return cls(
            wrong=wrong, here=torch.ones(len(wrong.rows), dtype=torch.bool), part=part, right=right, unrecorded={},
            arguments={}, lines=lines, modules=modules, few=dict.fromkeys(modules_around(wrong), (few, row)),
            where="in decode alone: ",
        )  # fmt: skip

    @classmethod
    def of(cls, wrong: WrongOperation) -> "_Trials | None":
        """Run the part once; None if what it gives by itself is not what the model gave."""
        rerun = wrong.rerun
        if rerun is None or wrong.downstream is not None:
            return None
        places = rerun.places(wrong.rows)
        here = places >= 0
        if not bool(here.any()):
            return None
        arguments: dict[str, tuple[Any, Any]] = {}
        handles = [
            wrong.hf.module(path).register_forward_pre_hook(_keep(arguments, path), with_kwargs=True)
            for path in modules_around(wrong)
        ]
        meter = Meter()
        try:
            with meter, lines_run() as lines:
                right = rerun.run()[places[here]]
        finally:
            for handle in handles:
                handle.remove()
        if not is_same(right, wrong.expected[here]):
            return None
        part = _Place(rerun, places[here], meter)
        modules = _writing(wrong.hf.module(rerun.part_inputs.call.path))
        taps = [op.tap for op in wrong.graph if op.tap in wrong.unrecorded and op.tap in rerun.values]
        unrecorded = {tap: rerun.values[tap][places[here]] for tap in taps}
        return cls(
            wrong=wrong, here=here, part=part, right=right, unrecorded=unrecorded, arguments=arguments, lines=lines,
            modules=modules,
        )  # fmt: skip

    def hypothesis(self, change: ModelChange) -> Hypothesis | None:
        """Return what a change gives; None if that is not what was recorded, or the changed code does not run."""
        factor: float | None = 1.0
        if change.is_fitted:
            factor = self._fitted(change)
        elif (few := self._few(change.module)) is not None:
            output = self._under(change, 1.0, few[0])
            if output is None or self.share(output, few[1]) < _SOME:
                return None
        output = None if factor is None else self._under(change, factor, self.part)
        if factor is None or output is None or not bool(output.any()):
            return None  # many edits give zeros, and so does whatever is not computed or not loaded
        if self.share(output, torch.arange(len(output))) < _SOME:
            return None
        told, whole = change.tell(factor), self.wrong.expected.clone()
        whole[self.here] = output
        if self.wrong.operation.kind is Kind.CHOICE:
            return choice(self.wrong, self.where + told.cause, whole)
        return Hypothesis(
            cause=self.where + told.cause,
            output=whole,
            detail=told.detail,
            num_fitted=int(change.is_fitted),
            is_vague=change.is_vague,
            tap=self._changed_tap(),
            unknown=None if bool(self.here.all()) else ~self.here,
        )

    def output_of_few(self, change: ModelChange, *, may_be_right: bool) -> torch.Tensor | None:
        """Return the rows of the operation [R, W], a few under a change; None if it fails or does nothing to code.

        What is done to a parameter does nothing where that holds ones, and another model shows it.
        """
        place, rows = self._few(change.module) or (self.part, torch.arange(len(self.right)))
        output = self._under(change, 1.0, place)
        if output is None or not bool(output.any()) or (is_same(output, self.right[rows]) and not may_be_right):
            return None
        whole = self.wrong.expected.clone()
        whole[self.here.nonzero()[rows, 0]] = output
        return whole

    def _changed_tap(self) -> str | None:
        """Return the first tap that was not recorded and that the latest run of the part gave otherwise, or not."""
        values, places = self.part.rerun.values, self.part.places
        changed = (
            tap
            for tap, right in self.unrecorded.items()
            if tap not in values or not is_same(values[tap][places], right)
        )
        return next(changed, None)

    def _under(self, change: ModelChange, factor: float, place: _Place) -> torch.Tensor | None:
        """Return the rows [n, W] under a change; None if it does not run, or not to such rows."""
        try:
            quiet, meter, budget = warnings.catch_warnings(action="ignore"), place.meter, self.wrong.edit_budget
            with quiet, attributes_kept(self.modules), change.make(factor), limited(meter, budget):
                output = place.run()
        except Exception:  # most changes of a program do not compile or run
            return None
        except TooMuchError:
            self.num_ended += 1
            return None
        return output if output.shape[1:] == self.right.shape[1:] and bool(output.isfinite().all()) else None

    def share(self, output: torch.Tensor, rows: torch.Tensor | None = None) -> float:
        """Return the share of rows that come out as they were recorded: of all, or of those of the batch [n]."""
        here = self.here.nonzero()[:, 0]
        output, at = (output[here], here) if rows is None else (output, here[rows])
        if self.wrong.operation.kind is Kind.CHOICE:
            return float(are_chosen_alike(self.wrong.actual[at], output).double().mean())
        return float(explained(self.wrong, output, at)[1].double().mean())

    def _fitted(self, change: ModelChange) -> float | None:
        """Return the factor under which the rows come nearest to what was recorded; None if they differ otherwise."""
        if self.wrong.operation.kind is Kind.CHOICE:
            return None
        place, rows = self._few(change.module) or (self.part, torch.arange(len(self.right)))
        actual = self.wrong.actual[self.here][rows]
        return fit_factor_near_one(actual, self.right[rows], lambda factor: self._under(change, factor, place))

    def _few(self, path: str) -> tuple[_Place, torch.Tensor] | None:
        if path not in self.few:
            self.few[path] = self._place_of_few(path)
        return self.few[path]

    def _place_of_few(self, path: str) -> tuple[_Place, torch.Tensor] | None:
        """Return where to run a module on a few rows; None if it gives something else than on all."""
        if path not in self.arguments:
            return None
        batch = self.part.rerun.part_inputs.batch
        size = len(batch.sequences), batch.num_tokens
        count = next((n for n in _FEW if n not in _sizes(self.arguments[path])), None)
        if count is None:
            return None
        rows = torch.linspace(0, len(self.right) - 1, count).round().long()
        few = _FewRows(self.part.rerun, self.part.places[rows])
        args, kwargs = tree_map(lambda item: _taken(item, size, few.places), self.arguments[path])
        call = PartCall(path=path, args=args, kwargs=kwargs)
        inputs = PartInputs(batch=cast(PaddedBatch, few), call=call)
        rerun = replace(self.part.rerun, part_inputs=inputs, values={}, recorded={}, calls={})
        place = _Place(rerun, torch.arange(count), Meter())
        try:
            with place.meter:
                output = place.run()
        except Exception:  # it needs to see the other rows
            return None
        return (place, rows) if is_same(output, self.right[rows]) else None


class _FewRows:
    """A batch of one sequence that holds a few rows of another batch."""

    def __init__(self, rerun: Rerun, places: torch.Tensor) -> None:
        self.places, self._rerun = places, rerun
        self.sequences, self.num_tokens, self.num_places = (None,), len(places), len(places)

    def recorded(self, tap: str) -> RecordedRows | None:
        """Return the recorded rows of a tap."""
        recorded = self._rerun.recorded.get(tap)
        if recorded is None:
            return None
        is_there = self.places[:, None] == recorded.places
        at = is_there.any(dim=1)
        which = is_there[at].double().argmax(dim=1)
        return RecordedRows(places=at.nonzero()[:, 0], rows=recorded.rows[which])


def _keep(arguments: dict[str, tuple[Any, Any]], path: str) -> Callable[..., None]:
    """Return a hook that keeps what a module is called with first."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in arguments:
            arguments[path] = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))

    return hook


def _sizes(arguments: Any) -> set[int]:
    sizes = set[int]()
    tree_map(lambda item: sizes.update(item.shape) if isinstance(item, torch.Tensor) else None, arguments)
    return sizes


def _taken(item: Any, size: tuple[int, int], places: torch.Tensor) -> Any:
    """Return the rows of a tensor that counts requests and tokens, as one request; what counts none as it is."""
    if not isinstance(item, torch.Tensor):
        return item
    if item.dim() > 1 and item.shape[:2] == (1, size[1]):  # a table for all requests
        return item[:, places % size[1]]
    dim = token_dim(item, *size)
    if dim is None:
        return item
    if dim == 0:
        return item.unflatten(0, (size[0] * size[1], -1))[places].flatten(0, 1)
    request, token = places // size[1], places % size[1]
    return item[request, token][None] if dim == 1 else item[request, :, token].transpose(0, 1)[None]
