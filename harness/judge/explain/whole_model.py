"""HF's model run whole with one change of it, where nothing is known of an engine but rows made of its logits.

Without a tap nothing says where an error begins. But what a port does otherwise, it mostly does in every layer, and HF
has one line of code for it. So each change is made in all modules of a class at once, or in what one module holds, and
the model computes the shortest of the wrong requests with it. What gives the recorded rows is held to the others, and
to the rows that are right: a change that the engine makes everywhere leaves none of them right that it would move.

`R` rows of width `W`, `V` tokens in the vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording
from harness.judge.compare.align import Locator, Rows
from harness.judge.compare.propagated import RATIO_BOUND
from harness.judge.compare.sequences import SlotHistory
from harness.judge.explain.core.fit import fit_factor_near_one
from harness.judge.explain.core.formats import HALF_DTYPES, name_of
from harness.judge.explain.core.rerun import Budget, attributes_kept
from harness.judge.explain.core.wrong_operation import ALLOWANCE, FALL, Explain, Hypothesis, WrongOperation, explained
from harness.judge.explain.edits.change import ModelChange, likely_change
from harness.judge.explain.edits.code import lines_run
from harness.judge.explain.edits.everywhere import are_weights_held, changes_of_model
from harness.judge.explain.edits.limits import Meter, TooMuchError, limited
from harness.judge.explain.trial.ranking import CLEARLY, MIN_SHARE, rank_hypotheses
from harness.oracle.model import HFModel
from harness.oracle.precision import eager_experts
from harness.oracle.untraced import all_parts_held, parts_kept
from harness.results.check import Explanation

_MAX_TOKENS = 512
"""Of the requests that are run, the shortest first; one at least."""
_SOME = 0.5
"""Share of the first request's rows that must come out as recorded, for a change to be tried on the others."""
_ALIKE = 3.0
"""Times an error from which another has not its size."""
_NOT_TRIED = "no change of a weight was tried: there is not enough memory to hold the weights twice"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRows:
    """Rows of one request, [n, W]: all its wrong ones, or all its right ones."""

    token_ids: Sequence[int]
    """As far as the last of the rows."""
    rows: Rows
    actual: torch.Tensor
    """[n, W] float64, finite."""
    noise: torch.Tensor
    """[n] HF's own error, relative to the row."""
    shown: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits
    """From the logits of the rows [n, V] to what is seen of them, [n, W]."""

    def run(self, hf: HFModel, shift: int = 0) -> torch.Tensor:
        """Return what the model gives, [n, W] float64; `shift` tokens later."""
        ids = torch.tensor([list(self.token_ids)], device=hf.device)
        logits = hf.run(input_ids=ids, use_cache=False).logits
        positions = (self.rows.position + shift).clamp(min=0)
        return self.shown(logits[0, positions.to(logits.device)].to("cpu", torch.float64))


def those_to_run(requests: Sequence[RequestRows]) -> list[RequestRows]:
    """Return the requests that are run, the shortest first."""
    chosen, num_tokens = list[RequestRows](), 0
    for request in sorted(requests, key=lambda item: len(item.token_ids)):
        num_tokens += len(request.token_ids)
        if chosen and num_tokens > _MAX_TOKENS:
            break
        chosen.append(request)
    return chosen


@contextmanager
def model_held(hf: HFModel) -> Iterator[None]:
    """Hold the model for trials: nothing of it may change but what a trial changes."""
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(parts_kept(hf))
        stack.enter_context(all_parts_held(hf))
        stack.enter_context(eager_experts(*hf.configs))
        yield


@dataclass(slots=True, kw_only=True)
class ModelTrials:
    """Runs of the model over requests whose rows are wrong. Use it while the model is held."""

    requests: Sequence[RequestRows]
    """The shortest first."""
    wrong: WrongOperation
    """Their rows, with the logits as their operation."""
    right: Sequence[RequestRows] = ()
    """Rows that are right, of these or of other requests."""
    meter: Meter = field(default_factory=Meter)
    """Of the right run over the first request."""
    sizes: Sequence[str] = ()
    """What makes errors of this size, in words."""

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestRows],
        right: Sequence[RequestRows],
        hf: HFModel,
        recording: Recording,
        dtype: torch.dtype,
        budget: Budget,
    ) -> "ModelTrials | None":
        """Run the model once; None if it gives rows of another shape.

        Args:
            requests: those to run.
            right: rows that are right.
            hf: the model in the engine's dtype.
            recording: of these requests.
            dtype: of the engine.
            budget: time for the trials.
        """
        expected, actual = (
            torch.cat(parts) for parts in ([item.run(hf) for item in requests], [item.actual for item in requests])
        )
        if actual.shape != expected.shape:
            return None
        unit = rounding_unit(dtype)
        wrong = WrongOperation(
            operation=hf.graph[hf.graph.logits],
            rows=Rows.concat([item.rows for item in requests]),
            expected=expected,
            inputs=[],
            roundings=(actual - expected).norm(dim=1) / expected.norm(dim=1) / unit,
            bound=RATIO_BOUND / 2 * torch.cat([item.noise for item in requests]) / unit,  # a trial allows twice as much
            dtype=dtype,
            hf=hf,
            recording=recording,
            locator=Locator(recording),
            actual=actual,
            slot_history=SlotHistory(recording),
            edit_budget=budget,
        )
        return cls(wrong=wrong, requests=requests, right=those_to_run(right))

    def explanation(self, scope: str, first: Sequence[Explain] = ()) -> Explanation:
        """Return the change that fits the rows best, after what is tried `first`; see `rank_hypotheses`."""
        explanation = rank_hypotheses(self.wrong, scope, stages=(first, [self.hypotheses]))
        if explanation.is_cause:
            return explanation
        note = self.wrong.edit_budget.notes.get(self.wrong.operation.tap) if self.wrong.edit_budget else None
        notes = (explanation.detail, *self.sizes, note)
        return replace(explanation, detail="; ".join(text for text in notes if text))

    def hypotheses(self, _wrong: WrongOperation) -> Iterator[Hypothesis]:
        """Yield what the model gives with one change of it, where that comes near to what was recorded."""
        budget, first = self.wrong.edit_budget, None
        assert budget is not None
        with budget.spent(), self.meter, lines_run() as lines:
            self.requests[0].run(self.wrong.hf)
        with budget.spent():
            self.sizes = list(self._sizes())
            changes = changes_of_model(self.wrong, lines, self._times)
        not_tried = "" if are_weights_held(self.wrong.hf) else f"; {_NOT_TRIED}"
        for number, (likelihood, change) in enumerate(changes):
            if first is not None and likelihood > first:
                return  # what is less likely and fits as well would say less
            if budget.left <= 0:
                budget.notes[self.wrong.operation.tap] = (
                    f"{number:,} of {len(changes):,} changes of the model were tried in the time for them "
                    f"(--explain-seconds){not_tried}"
                )
                return
            with budget.spent():
                hypothesis = self._hypothesis(change, len(changes))
            if hypothesis is not None:
                first = likelihood if first is None else first
                yield hypothesis
        if not_tried:
            budget.notes[self.wrong.operation.tap] = _NOT_TRIED

    def _sizes(self) -> Iterator[str]:
        """Yield the coarser dtypes in which HF itself makes errors of this size, with how much larger they are here."""
        for dtype in HALF_DTYPES if self.wrong.dtype == torch.float32 else ():
            ratio = self._times(likely_change("", partial(_autocast, self.wrong.hf, dtype)))
            if ratio is not None and 1 / _ALIKE <= ratio <= _ALIKE:
                yield f"{ratio:.2g} times the error that HF makes with products in {name_of(dtype)}"

    def _times(self, change: ModelChange) -> float | None:
        """Return how many times larger the error is than that of a change in the first request; None without one."""
        output, count = self._under(change, self.requests[:1], 1.0), len(self.requests[0].rows)
        if output is None:
            return None
        error, made = ((x - self.wrong.expected[:count]).norm(dim=1) for x in (self.wrong.actual[:count], output))
        ratio = float((error / made).median())
        return ratio if math.isfinite(ratio) else None

    def _hypothesis(self, change: ModelChange, num_tried: int) -> Hypothesis | None:
        wrong = self.wrong.take(torch.arange(len(self.requests[0].rows)))
        factor: float | None = 1.0
        if change.is_fitted:
            run = partial(self._under, change, self.requests[:1])
            factor = fit_factor_near_one(wrong.actual, wrong.expected, run)
        output = None if factor is None else self._under(change, self.requests[:1], factor)
        allowance = max(ALLOWANCE, change.leaves * float((wrong.roundings / wrong.bound).median()))
        if factor is None or output is None or _share(wrong, output, allowance) < _SOME:
            return None
        if len(self.requests) > 1:
            output = self._under(change, self.requests, factor)
        if output is None or self._is_chance(change, allowance, num_tried):
            return None
        if self.right and not self.leaves_right(self._under(change, self.right, factor), allowance):
            return None
        told = change.tell(factor)
        return Hypothesis(
            cause=told.cause, output=output, detail=told.detail, num_fitted=int(change.is_fitted),
            is_vague=change.is_vague, allowance=allowance,
        )  # fmt: skip

    def _is_chance(self, change: ModelChange, allowance: float, num_tried: int) -> bool:
        """Whether some of so many changes would come near to the rows by chance: each of their numbers must."""
        error, bound = self.wrong.roundings, self.wrong.bound.clamp(min=1)
        nearness = (error / torch.minimum(allowance * bound, FALL * error)).log()
        num_values = self.wrong.actual.numel() - change.is_fitted
        return num_values * float(nearness.median()) < math.log(num_tried) + CLEARLY

    def leaves_right(self, output: torch.Tensor | None, allowance: float = ALLOWANCE) -> bool:
        """Whether the right rows are what a change gives, [rows, W] or None where it does not run, up to some."""
        if output is None:
            return False
        actual, noise = (torch.cat([getattr(item, name) for item in self.right]) for name in ("actual", "noise"))
        bound = (RATIO_BOUND / 2 * noise).clamp(min=rounding_unit(self.wrong.dtype))
        is_right = (actual - output).norm(dim=1) <= allowance * bound * actual.norm(dim=1)
        return float(is_right.double().mean()) >= MIN_SHARE

    def _under(self, change: ModelChange, requests: Sequence[RequestRows], factor: float) -> torch.Tensor | None:
        """Return the rows [R, W] under a change; None if it does not run."""
        hf = self.wrong.hf
        try:
            with attributes_kept(hf.model.modules()), change.make(factor), limited(self.meter, self.wrong.edit_budget):
                output = torch.cat([item.run(hf) for item in requests])
        except (Exception, TooMuchError):  # most changes of a program do not compile or run
            return None
        has_shape = output.shape[1:] == self.wrong.actual.shape[1:]
        return output if has_shape and bool(output.isfinite().all()) and bool(output.any()) else None


def _share(wrong: WrongOperation, output: torch.Tensor, allowance: float) -> float:
    """Return the share of the rows that come out as they were recorded."""
    return float(explained(wrong, output, allowance=allowance)[1].double().mean())


def _autocast(hf: HFModel, dtype: torch.dtype, _factor: float) -> AbstractContextManager[None]:
    return torch.autocast(hf.device.type, dtype=dtype)
