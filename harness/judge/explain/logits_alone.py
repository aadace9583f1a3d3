"""The mistake of an engine that shows its logits alone: they are returned wrongly, or the model is changed.

`R` rows of logits, `V` tokens in the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from harness.formats.recording import Recording
from harness.judge.compare.align import Locator, match_requests, step_rows
from harness.judge.compare.propagated import PropagatedErrors, propagated_errors
from harness.judge.compare.shapes import engine_dtype
from harness.judge.explain.core.rerun import Budget
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, gathered, hypotheses
from harness.judge.explain.trial.description import scope
from harness.judge.explain.whole_model import ModelTrials, RequestRows, model_held, those_to_run
from harness.oracle.golden import Golden
from harness.oracle.model import HFModel
from harness.results.check import Explanation


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
    with model_held(hf):
        errors = _errors(recording, golden, hf)
        requests = [] if errors is None else _of_requests(errors, errors.is_bad, recording, hf, locator)
        if errors is None or not requests:
            return None
        chosen, right = those_to_run(requests), _of_requests(errors, ~errors.is_bad, recording, hf, locator)
        trials = ModelTrials.of(chosen, right, hf, recording, engine_dtype(recording), budget)
        if trials is None:
            return None
        left_out = {int(item.rows.request[0]) for item in requests[len(chosen) :]}
        returned = _Returned(trials=trials, left_out=left_out)
        return trials.explanation(scope(errors.rows, errors.is_bad, recording), [returned.hypotheses])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Returned:
    """What a right model gives whose rows are returned in another form or in another's place."""

    trials: ModelTrials
    left_out: set[int]
    """Requests with wrong rows that are not run."""

    def hypotheses(self, wrong: WrongOperation) -> Iterator[Hypothesis]:
        """Yield each of these."""
        yield from hypotheses({
            "log-softmax is returned in place of the logits": wrong.expected.log_softmax(dim=1),
            "softmax is returned in place of the logits": wrong.expected.softmax(dim=1),
        })  # fmt: skip
        yield Hypothesis(
            cause="the logits of the token before are returned",
            output=torch.cat([item.run(wrong.hf, shift=-1) for item in self.trials.requests]),
        )
        factor = float((wrong.actual * wrong.expected).sum() / wrong.expected.square().sum())
        yield Hypothesis(
            cause=self._scaled(wrong, factor), output=factor * wrong.expected, num_fitted=1 if factor else 0
        )
        output = self._rows_of_others(wrong)
        if output is not None:
            yield Hypothesis(cause="the logits of another request of the step are returned", output=output)

    def _scaled(self, wrong: WrongOperation, factor: float) -> str:
        """Return what multiplies logits by a factor: weights do it in all rows."""
        outputs = [factor * item.run(wrong.hf) for item in self.trials.right]
        is_everywhere = not outputs or self.trials.leaves_right(torch.cat(outputs))
        if factor:
            weight = ", or the weight of the final norm or head" if is_everywhere else " of these rows alone"
            return f"the logits are scaled by {factor:.4g}: a temperature{weight}"
        if is_everywhere:
            return "all logits are zero: the weight of the head, or of the final norm, is not loaded"
        return "the logits of these rows alone are zero: they were not computed, or not returned"

    def _rows_of_others(self, wrong: WrongOperation) -> torch.Tensor | None:
        """Return in each row's place the nearest one of the other requests in its step; None if a row has none."""
        output = wrong.expected.clone()
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


def _errors(recording: Recording, golden: Golden, hf: HFModel) -> PropagatedErrors | None:
    """Return the distances of the logits to the truth; None if they were not compared, or no row is wrong."""
    truth, tap = golden.truth, hf.graph.logits
    theirs = Locator(truth.recording, match_requests(truth.recording, recording, is_pool=truth.is_pool))
    errors = propagated_errors(recording, theirs, truth.noise, hf.graph, {tap}, sketched=truth.sketched).errors.get(tap)
    return errors if errors is not None and bool(errors.is_bad.any()) else None


def _of_requests(
    errors: PropagatedErrors, chosen: torch.Tensor, recording: Recording, hf: HFModel, locator: Locator
) -> list[RequestRows]:
    """Return the requests with some rows, [rows] bool, the shortest first; none if one is not finite."""
    rows, error = errors.rows.select(chosen), errors.metrics.relative_l2[chosen]
    noise = (error / errors.ratio[chosen]).nan_to_num(nan=0.0)
    tokens = {request.id: request.token_ids for request in recording.manifest.requests}
    requests = list[RequestRows]()
    for number in rows.request.unique().tolist():
        here = (rows.request == number).nonzero()[:, 0]
        of_request = rows.select(here)
        actual = gathered(locator, hf.graph.logits, of_request)
        if actual is None or not bool(actual.isfinite().all()):
            return []
        token_ids = tokens[number][: int(of_request.position.max()) + 1]
        requests.append(RequestRows(token_ids=token_ids, rows=of_request, actual=actual, noise=noise[here]))
    return sorted(requests, key=lambda item: len(item.token_ids))
