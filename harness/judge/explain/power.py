"""The power of a pass: which known mistakes would have been out of bounds in a run that was sound.

Every explanation computes what a mistake makes of the rows of an operation. On sound rows, the distance of that from
the right rows, over the bound of the row, says whether the judge would have seen the mistake. One operation of each
site is tried, on a few of its rows. Where few mistakes are known of an operation, changes of HF's code stand for those
that nobody wrote down.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.compare.evidence import Evidence, guarded
from harness.judge.compare.run import Comparison
from harness.judge.explain.causes import known_mistakes
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.edits import likely_mistakes
from harness.judge.explain.edits.limits import OutOfTimeError, ended_after
from harness.judge.explain.run import Explainer
from harness.oracle.golden import Golden
from harness.oracle.model import HFModel
from harness.results.check import DetectionPower, KnownMistake

_NO_EFFECT = 1e-4
"""Share of the bound below which a mistake changes nothing: what is left is the rounding of the truth."""
_WIDE = 1 << 20
"""Elements of weights from which on one mistake may take much of the time. In a tiny model a look at the clock takes as
long as the function of torch: all mistakes of qwen2-tiny take 3.7 s of CPU time with it, and 2.4 s without."""
_ENOUGH = 8
"""Known mistakes of an operation, from which on HF's code is not changed for more."""


def power_of(
    comparison: Comparison, recording: Recording, expected: Golden, hf: HFModel, *, budget_s: float = float("inf")
) -> DetectionPower:
    """Return what a sound run would have shown of the mistakes that the harness can name.

    Args:
        comparison: of the sound run.
        recording: the engine's.
        expected: the golden.
        hf: the model in the engine's dtype.
        budget_s: seconds that it may take. Each kind of operation comes once before any comes twice, and the mistakes
            that are written down before changes of HF's code, which take the most time. An operation may take an even
            share of what is left.
    """
    operations = _in_turns(comparison, hf)
    with torch.no_grad(), ExitStack() as stack:
        is_wide = any(_size(operation, hf, of_code=True) >= _WIDE for operation in operations)
        explainer = Explainer(comparison, recording, expected, hf, stack)
        search = _Search(explainer, time.perf_counter() + budget_s, is_wide)
        stack.callback(search.held.close)
        for of_code in (False, True):
            search.try_all(operations, of_code=of_code)
    mistakes, cut = search.mistakes, search.cut
    order = [op.tap for op in hf.graph if mistakes.get(op.tap) or (op.tap in mistakes and op.tap not in cut)]
    return DetectionPower(
        mistakes=tuple(mistake for tap in order for mistake in mistakes[tap]),
        tried=tuple(order),
        in_part=tuple(tap for tap in order if tap in cut or tap not in search.changed),
        not_tried=tuple(op.tap for op in operations if op.tap not in order),
        not_covered=_without_sound_rows(comparison, hf),
        bit_for_bit=_sites_of(hf, [tap for tap in comparison.errors if _is_bit_for_bit(comparison, hf, tap)]),
        smallest_change=max((_largest_unseen(comparison.sound[tap]) for tap in order), default=None),
        failures=tuple(search.failures),
    )


@dataclass(slots=True)
class _Search:
    """The mistakes that were made of sound rows so far, in the time that there is."""

    explainer: Explainer
    deadline: float
    is_wide: bool
    """Whether a part of the model is."""
    mistakes: dict[str, list[KnownMistake]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    """Taps of which not all was tried that there was to try."""
    changed: set[str] = field(default_factory=set)
    """Taps of which all changes of code were tried."""
    failures: list[str] = field(default_factory=list)
    held: ExitStack = field(default_factory=ExitStack)
    """Holds the part of the model that is tried, for one operation after the other."""
    part: str | None = None

    def try_all(self, operations: Sequence[Operation], *, of_code: bool) -> None:
        """Try the operations, each for an even share of the time that is left.

        Where that is too short for one mistake of a product, it is too short for larger ones: they come last, each with
        all the time that is left then. Changes of the code around them are left out.
        """
        sizes = {op.tap: _size(op, self.explainer.hf, of_code=of_code) for op in operations}
        too_large, later = math.inf, list[Operation]()
        for place, operation in enumerate(operations):
            begin, size = time.perf_counter(), sizes[operation.tap]
            if size >= too_large:
                later.append(operation)
                continue
            left = sum(sizes[item.tap] < too_large for item in operations[place:])
            is_enough = self._try(operation, begin, begin + (self.deadline - begin) / left, of_code=of_code)
            if not is_enough and size >= _WIDE:
                too_large = size
                later.append(operation)
        for operation in () if of_code else sorted(later, key=lambda item: sizes[item.tap]):
            self._try(operation, time.perf_counter(), self.deadline, of_code=False)
        self.cut |= {operation.tap for operation in later if of_code}

    def _try(self, operation: Operation, begin: float, until: float, *, of_code: bool) -> bool:
        """Try an operation for some time, and return whether that was enough for anything."""
        if begin > self.deadline:
            return True
        known = self.mistakes.setdefault(operation.tap, [])
        num_known = len(known)
        self._hold(operation)
        with ended_after(until - begin) if self.is_wide else nullcontext(), ExitStack() as stack:
            evidence = self.explainer.comparison.sound[operation.tap]
            if (sound := self.explainer.wrong_operation(evidence, stack)) is not None:
                names = len({mistake.mistake for mistake in known}) if of_code else None
                known += _known(sound, names, self.failures, until)
        is_cut = time.perf_counter() > until
        if is_cut:
            self.cut.add(operation.tap)
        elif of_code:
            self.changed.add(operation.tap)
        else:
            self.cut.discard(operation.tap)
        return not is_cut or len(known) > num_known

    def _hold(self, operation: Operation) -> None:
        if operation.is_kept or operation.module not in self.explainer.modules:
            return
        if (part := self.explainer.hf.part_of(operation.module)) != self.part:
            self.held.close()
            self.part = None
            self.explainer.hold(operation, self.held)
            self.part = part


def _size(operation: Operation, hf: HFModel, *, of_code: bool) -> int:
    """Return the elements of what a mistake is computed with: the weight of a product, or the part around it."""
    try:
        module = hf.module(hf.part_of(operation.module) if of_code else operation.module)
    except AttributeError:  # a function that no module shows
        return 0
    if of_code:
        return sum(parameter.numel() for parameter in module.parameters())
    weight = getattr(module, "weight", None)
    return weight.numel() if operation.kind is Kind.LINEAR and isinstance(weight, torch.Tensor) else 0


def _in_turns(comparison: Comparison, hf: HFModel) -> list[Operation]:
    """Return the operations of which sound rows were kept: the first of each kind, then the second of each.

    States come last: each of their mistakes is a further run of the model.
    """
    turns = Counter[Kind]()
    order = list[tuple[bool, int, Operation]]()
    for operation in (op for op in hf.graph if op.tap in comparison.sound):
        turns[operation.kind] += 1
        order.append((operation.kind is Kind.STATE, turns[operation.kind], operation))
    return [operation for *_, operation in sorted(order, key=lambda item: item[:2])]


def _without_sound_rows(comparison: Comparison, hf: HFModel) -> tuple[str, ...]:
    """Return the sites of which no mistake was tried: they were judged only through others."""
    covered = {op.site for op in hf.graph if op.tap in comparison.sound or _is_bit_for_bit(comparison, hf, op.tap)}
    return _sites_of(hf, [op.tap for op in hf.graph if op.site not in covered])


def _is_bit_for_bit(comparison: Comparison, hf: HFModel, tap: str) -> bool:
    """Whether a tap is a cache, and any bit that differs from what was written is out of bounds."""
    errors = comparison.errors.get(tap)
    if errors is None or hf.graph[tap].kind is not Kind.CACHE:
        return False
    return len(errors.bound) > 0 and not bool(errors.bound.any())


def _sites_of(hf: HFModel, taps: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hf.graph[tap].site for tap in taps))


def _largest_unseen(sound: Evidence) -> float:
    """Return the largest relative error of a row that is within its bound; 0 for choices, which have no unit."""
    return 0.0 if sound.operation.kind is Kind.CHOICE else float(sound.bound.max()) * rounding_unit(sound.dtype)


def _known(sound: WrongOperation, num_known: int | None, failures: list[str], until: float) -> Iterator[KnownMistake]:
    """Yield mistakes that can be made in an operation, each once: of the ways that make it, the least seen.

    A way that changes no row is a mistake of its own: no piece of a split history ended before the last row.
    """
    ways = dict[tuple[str, bool], list[tuple[float, str]]]()
    with suppress(OutOfTimeError):
        for hypothesis in mistakes_in(sound, num_known, failures):
            share = _bound_share(sound, hypothesis)
            ways.setdefault((hypothesis.cause, share < _NO_EFFECT), []).append((share, hypothesis.detail))
            if time.perf_counter() > until:
                break
    for (cause, has_no_effect), made in ways.items():
        share, detail = made[0] if has_no_effect else min(made)
        is_seen, is_one_way = share > 1, has_no_effect and (cause, False) in ways
        yield KnownMistake(
            tap=sound.operation.tap,
            mistake=f"{cause} ({detail})" if is_one_way else cause,
            bound_share=share,
            is_seen=is_seen,
            needs=None if is_seen else _needs(share, sound.dtype),
        )


def mistakes_in(sound: WrongOperation, num_known: int | None, failures: list[str]) -> Iterator[Hypothesis]:
    """Yield what mistakes make of the rows of a sound operation.

    Args:
        sound: the operation.
        num_known: None for the mistakes that are written down; for changes of HF's code, how many of those there are.
        failures: gets the names of explanations that raise.
    """
    same = replace(sound, actual=sound.expected, sound=frozenset())  # so nothing is fitted

    def changes_of_hf(wrong: WrongOperation) -> Iterator[Hypothesis]:
        yield from likely_mistakes(wrong, of_code=(num_known or 0) < _ENOUGH)

    for explain in known_mistakes(sound.operation.kind) if num_known is None else (changes_of_hf,):
        with guarded(explain.__name__, failures):
            for hypothesis in explain(same):
                if _is_a_mistake(hypothesis) and hypothesis.output.shape == sound.expected.shape:
                    yield hypothesis


def _is_a_mistake(hypothesis: Hypothesis) -> bool:
    """Whether a hypothesis says in full what was done: nothing in it was fitted to the rows."""
    return hypothesis.is_cause and not hypothesis.num_fitted and not hypothesis.is_vague and not hypothesis.is_fallback


def _bound_share(sound: WrongOperation, mistake: Hypothesis) -> float:
    """Return the largest error of a row that is known under a mistake, as a share of the bound of the row."""
    norm = sound.expected.norm(dim=1)
    error = (mistake.output - sound.expected).norm(dim=1)
    error = error if mistake.unknown is None else error.masked_fill(mistake.unknown, 0.0)
    relative = torch.where(error == 0, 0.0, error / norm) / rounding_unit(sound.dtype)
    share = relative.nan_to_num(nan=torch.inf) / sound.bound.clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.where(relative == 0, 0.0, share).max())


def _needs(share: float, dtype: torch.dtype) -> str:
    """Return what would bring a mistake into sight."""
    if share < _NO_EFFECT:
        return "other prompts, weights or schedules"
    finer = rounding_unit(dtype) / rounding_unit(torch.float32)
    if share * finer > 1:
        return "float32"
    return "rows on which its effect is larger"
