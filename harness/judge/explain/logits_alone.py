"""The mistake of an engine that shows its logits alone: HF's model is run whole with one change of its code.

Without a tap nothing says where an error begins. But what a port does otherwise, it mostly does in every layer, and HF
has one line of code for it. So each change is made in all modules of a class at once, or in what one module holds, and
the model computes the shortest of the wrong requests with it. What gives the recorded logits is held to the others.

`R` rows of logits, `V` tokens in the vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording
from harness.judge.compare.align import Locator, Rows, match_requests, step_rows
from harness.judge.compare.propagated import RATIO_BOUND, propagated_errors
from harness.judge.compare.sequences import SlotHistory
from harness.judge.compare.shapes import engine_dtype
from harness.judge.explain.core.fit import fit_factor_near_one
from harness.judge.explain.core.formats import HALF_DTYPES, name_of
from harness.judge.explain.core.rerun import Budget, attributes_kept
from harness.judge.explain.core.wrong_operation import (
    ALLOWANCE,
    Hypothesis,
    WrongOperation,
    explained,
    gathered,
    hypotheses,
)
from harness.judge.explain.edits.change import LIKELY, ModelChange, ToldChange
from harness.judge.explain.edits.code import lines_run
from harness.judge.explain.edits.everywhere import are_weights_held, changes_of_model
from harness.judge.explain.edits.limits import Meter, TooMuchError, limited
from harness.judge.explain.trial.description import scope
from harness.judge.explain.trial.ranking import rank_hypotheses
from harness.oracle.golden import Golden
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


def explain_logits(
    recording: Recording, golden: Golden, hf: HFModel, locator: Locator, budget: Budget
) -> Explanation | None:
    """Return the change of the model that gives the recorded logits; None if no row of them is wrong.

    Args:
        recording: the engine's, with logits alone.
        golden: with HF's own errors.
        hf: the model in the engine's dtype.
        locator: of the recording.
        budget: time for the trials.
    """
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(parts_kept(hf))
        stack.enter_context(all_parts_held(hf))
        stack.enter_context(eager_experts(*hf.configs))
        trials = _Trials.of(recording, golden, hf, locator, budget)
        if trials is None:
            return None
        rows, wrong = trials.wrong.rows, trials.wrong
        where = scope(rows, torch.ones(len(rows), dtype=torch.bool), recording)
        explanation = rank_hypotheses(wrong, where, stages=([trials.right_rows], [trials.hypotheses]))
        if explanation.is_cause:
            return explanation
        return replace(explanation, detail="; ".join((explanation.detail, *trials.sizes)))


@dataclass(slots=True, kw_only=True)
class _Trials:
    """Runs of the model over requests whose logits are wrong."""

    wrong: WrongOperation
    """The wrong rows of the logits, those of the shortest request first."""
    requests: Sequence[tuple[list[int], torch.Tensor]]
    """Tokens of each request, and the positions of its rows."""
    left_out: frozenset[int]
    """Requests with wrong rows that are not run."""
    meter: Meter = field(default_factory=Meter)
    """Of the right run over the first request."""
    sizes: Sequence[str] = ()
    """What makes errors of this size, in words."""

    @classmethod
    def of(
        cls, recording: Recording, golden: Golden, hf: HFModel, locator: Locator, budget: Budget
    ) -> "_Trials | None":
        """Run the model once; None if nothing is wrong, or the logits are not finite."""
        chosen = _wrong_rows(recording, golden, hf)
        if chosen is None:
            return None
        rows, noise, requests, left_out = chosen
        operation, dtype = hf.graph[hf.graph.logits], engine_dtype(recording)
        actual = gathered(locator, operation.tap, rows)
        expected = torch.cat([_logits(hf, *item) for item in requests])
        if actual is None or actual.shape != expected.shape or not bool(actual.isfinite().all()):
            return None
        unit = rounding_unit(dtype)
        wrong = WrongOperation(
            operation=operation,
            rows=rows,
            expected=expected,
            inputs=[],
            roundings=(actual - expected).norm(dim=1) / expected.norm(dim=1) / unit,
            bound=RATIO_BOUND / 2 * noise / unit,  # a trial allows twice as much
            dtype=dtype,
            hf=hf,
            recording=recording,
            locator=locator,
            actual=actual,
            slot_history=SlotHistory(recording),
            edit_budget=budget,
        )
        return cls(wrong=wrong, requests=requests, left_out=left_out)

    def right_rows(self, wrong: WrongOperation) -> Iterator[Hypothesis]:
        """Yield what a right model gives whose rows are returned in another form or in another's place."""
        yield from hypotheses({
            "log-softmax is returned in place of the logits": wrong.expected.log_softmax(dim=1),
            "softmax is returned in place of the logits": wrong.expected.softmax(dim=1),
        })  # fmt: skip
        yield Hypothesis(
            cause="the logits of the token before are returned",
            output=torch.cat([_logits(wrong.hf, tokens, (at - 1).clamp(min=0)) for tokens, at in self.requests]),
        )
        factor = float((wrong.actual * wrong.expected).sum() / wrong.expected.square().sum())
        yield Hypothesis(
            cause=f"the logits are scaled by {factor:.4g}: a temperature, or the weight of the final norm or head",
            output=factor * wrong.expected,
            num_fitted=1,
        )
        output = self._rows_of_others()
        if output is not None:
            yield Hypothesis(cause="the logits of another request of the step are returned", output=output)

    def _rows_of_others(self) -> torch.Tensor | None:
        """Return in each row's place the nearest one of the other requests in its step; None if a row has none."""
        wrong, output = self.wrong, self.wrong.expected.clone()
        right, tap = dict(zip(wrong.rows.identities(), wrong.expected, strict=True)), wrong.operation.tap
        for number in wrong.rows.step.unique().tolist():
            step = wrong.recording.steps[number]
            shown = list(zip(step_rows(step, tap).identities(), step.tap(tap).double(), strict=True))
            for index in (wrong.rows.step == number).nonzero()[:, 0].tolist():
                unlike = {int(wrong.rows.request[index]), *self.left_out}
                others = [right.get(place, row) for place, row in shown if place[0] not in unlike]
                if not others:
                    return None
                output[index] = min(others, key=lambda row: float((row - wrong.actual[index]).norm()))
        return output

    def hypotheses(self, _wrong: WrongOperation) -> Iterator[Hypothesis]:
        """Yield what the model gives with one change of it, where that comes near to what was recorded."""
        budget, first = self.wrong.edit_budget, None
        assert budget is not None
        with budget.spent(), self.meter, lines_run() as lines:
            _logits(self.wrong.hf, *self.requests[0])
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
                hypothesis = self._hypothesis(change)
            if hypothesis is not None:
                first = likelihood if first is None else first
                yield hypothesis
        if not_tried:
            budget.notes[self.wrong.operation.tap] = _NOT_TRIED

    def _sizes(self) -> Iterator[str]:
        """Yield the coarser dtypes in which HF itself makes errors of this size, with how much larger they are here."""
        for dtype in HALF_DTYPES if self.wrong.dtype == torch.float32 else ():
            make = partial(_autocast, self.wrong.hf, dtype)
            ratio = self._times(ModelChange(module="", rank=LIKELY, make=make, tell=lambda _: ToldChange(cause="")))
            if ratio is not None and 1 / _ALIKE <= ratio <= _ALIKE:
                yield f"{ratio:.2g} times the error that HF makes with products in {name_of(dtype)}"

    def _times(self, change: ModelChange) -> float | None:
        """Return how many times larger the error is than that of a change in the first request; None without one."""
        output, count = self._under(change, self.requests[:1], 1.0), len(self.requests[0][1])
        if output is None:
            return None
        error, made = ((x - self.wrong.expected[:count]).norm(dim=1) for x in (self.wrong.actual[:count], output))
        ratio = float((error / made).median())
        return ratio if math.isfinite(ratio) else None

    def _hypothesis(self, change: ModelChange) -> Hypothesis | None:
        count = len(self.requests[0][1])
        wrong = self.wrong.take(torch.arange(count))
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
        told = change.tell(factor)
        return None if output is None else Hypothesis(
            cause=told.cause, output=output, detail=told.detail, num_fitted=int(change.is_fitted),
            is_vague=change.is_vague, allowance=allowance,
        )  # fmt: skip

    def _under(
        self, change: ModelChange, requests: Sequence[tuple[list[int], torch.Tensor]], factor: float
    ) -> torch.Tensor | None:
        """Return the logits [R, V] under a change; None if it does not run."""
        hf = self.wrong.hf
        try:
            with attributes_kept(hf.model.modules()), change.make(factor), limited(self.meter, self.wrong.edit_budget):
                output = torch.cat([_logits(hf, *item) for item in requests])
        except (Exception, TooMuchError):  # most changes of a program do not compile or run
            return None
        has_shape = output.shape[1:] == self.wrong.actual.shape[1:]
        return output if has_shape and bool(output.isfinite().all()) and bool(output.any()) else None


def _wrong_rows(
    recording: Recording, golden: Golden, hf: HFModel
) -> tuple[Rows, torch.Tensor, list[tuple[list[int], torch.Tensor]], frozenset[int]] | None:
    """Return rows beyond HF's noise, that noise [R], tokens and positions of each request, and those left out."""
    truth, tap = golden.truth, hf.graph.logits
    theirs = Locator(truth.recording, match_requests(truth.recording, recording, is_pool=truth.is_pool))
    errors = propagated_errors(recording, theirs, truth.noise, hf.graph, {tap}, sketched=truth.sketched).errors.get(tap)
    if errors is None or not bool(errors.is_bad.any()):
        return None
    rows, error = errors.rows.select(errors.is_bad), errors.metrics.relative_l2[errors.is_bad]
    noise = (error / errors.ratio[errors.is_bad]).nan_to_num(nan=0.0)
    tokens = {request.id: list(request.token_ids) for request in recording.manifest.requests}
    order, requests, num_tokens = list[torch.Tensor](), list[tuple[list[int], torch.Tensor]](), 0
    last = {request: int(rows.position[rows.request == request].max()) for request in rows.request.unique().tolist()}
    for request in sorted(last, key=lambda item: last[item]):
        num_tokens += last[request] + 1
        if requests and num_tokens > _MAX_TOKENS:
            break
        here = (rows.request == request).nonzero()[:, 0]
        order.append(here)
        requests.append((tokens[request][: last[request] + 1], rows.position[here]))
    chosen = torch.cat(order)
    left_out = frozenset(last) - set(rows.request[chosen].tolist())
    return rows.select(chosen), noise[chosen], requests, left_out


def _share(wrong: WrongOperation, output: torch.Tensor, allowance: float) -> float:
    """Return the share of the rows that come out as they were recorded."""
    return float(explained(wrong, output, allowance=allowance)[1].double().mean())


def _autocast(hf: HFModel, dtype: torch.dtype, _factor: float) -> AbstractContextManager[None]:
    return torch.autocast(hf.device.type, dtype=dtype)


def _logits(hf: HFModel, tokens: list[int], positions: torch.Tensor) -> torch.Tensor:
    """Return the logits of a request at some positions: [n, V] float64."""
    output = hf.run(input_ids=torch.tensor([tokens], device=hf.device), use_cache=False).logits
    return output[0, positions.to(output.device)].to("cpu", torch.float64)  # type: ignore[no-any-return]
