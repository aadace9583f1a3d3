"""Find the cause of every wrong operation of a comparison."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

import torch

from harness.base.files import scratch_folder
from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation, layer_of
from harness.judge.compare.align import Locator, Prefixes, Rows, match_requests
from harness.judge.compare.batch import spread
from harness.judge.compare.evidence import MAX_ROWS, Evidence, guarded
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.run import Comparison
from harness.judge.compare.sequences import SlotHistory
from harness.judge.compare.shapes import engine_dtype
from harness.judge.explain.core.rerun import Budget, Rerun, replay
from harness.judge.explain.core.wrong_operation import WrongOperation, gathered
from harness.judge.explain.experts.router import explain_count
from harness.judge.explain.logits_alone import explain_logits
from harness.judge.explain.products.linear import declared_failures
from harness.judge.explain.tokens import explain_token
from harness.judge.explain.trial.description import first_bad_row, scope
from harness.judge.explain.trial.direction import explain_direction
from harness.judge.explain.trial.ranking import MIN_SHARE, rank_hypotheses, with_failures
from harness.oracle.golden import Golden
from harness.oracle.make_golden import make_golden
from harness.oracle.model import HFModel
from harness.oracle.precision import upcast
from harness.oracle.requests import Prompt
from harness.oracle.watch import watching
from harness.results.check import Explanation, Finding, RunResult, Verdict

_EXPLAINED = (Code.LOCAL_ERROR, Code.NOT_FINITE, Code.CACHE_DIFFERS, Code.STATE_DIFFERS, Code.SYSTEMATIC_ERROR)
_SOUND = (Verdict.EXACT, Verdict.NOISE, Verdict.CONVENTION)
_FALL = 0.5
_MAX_ROWS = 192
_EDIT_SECONDS = 5.0
"""Time that all edits of HF's code may take together, if nothing else is said."""


def explain_run(
    comparison: Comparison, recording: Recording, expected: Golden, hf: HFModel, edit_budget: Budget | None = None
) -> RunResult:
    """Return the result with an explanation for each finding on wrong values of one operation.

    Args:
        comparison: of the recording with the golden.
        recording: the engine's.
        expected: the golden.
        hf: the model in the engine's dtype.
        edit_budget: time that is left for trying edits of HF's code; None for a time of its own.
    """
    run = comparison.result
    if not any(finding.tap for finding in run.findings):
        return run
    with ExitStack() as stack:
        explainer = Explainer(comparison, recording, expected, hf, stack, edit_budget)
        findings = tuple(explainer.explained(finding) for finding in run.findings)
    by_tap = {finding.tap: finding.explanation for finding in findings if finding.explanation is not None}
    first = run.first_divergence
    if first is not None and first.tap in by_tap:
        first = replace(first, explanation=by_tap[first.tap])
    return replace(run, findings=findings, first_divergence=first)


@contextmanager
def wrong_operation(
    comparison: Comparison, recording: Recording, expected: Golden, hf: HFModel, tap: str
) -> Iterator[WrongOperation | None]:
    """Yield the wrong rows of a tap's operation, with its part of the model in float64; None without evidence."""
    evidence = comparison.evidence.get(tap)
    with torch.no_grad(), ExitStack() as stack:
        explainer = Explainer(comparison, recording, expected, hf, stack)
        explainer.hold(hf.graph[tap], stack)
        yield None if evidence is None else explainer.wrong_operation(evidence, stack)


def _not_looked_for(errors: LocalErrors, where: str, begins: str) -> Explanation:
    """Return a placeholder for an explanation if too many taps before this one were not recorded."""
    return Explanation(
        cause="no cause was looked for: too much on the way to this tap was not recorded",
        scope=where,
        residual_before=float(errors.roundings[errors.bad].median()),
        num_rows=int(errors.bad.sum()),
        is_cause=False,
        detail=begins,
    )


def _explained(wrong: WrongOperation, where: str) -> Explanation:
    """Return the best explanation of the rows as they are, or under the conventions that the engine declares."""
    explanation = rank_hypotheses(wrong, where)
    if explanation.is_cause:
        return explanation
    failures = list[str]()
    with guarded(declared_failures.__name__, failures):
        for declared in declared_failures(wrong):
            if wrong.edit_budget is not None:
                wrong.edit_budget.begin_explanation()
            under_convention = rank_hypotheses(declared, where)
            if under_convention.is_cause:
                return under_convention
    return with_failures(explanation, failures)


class Explainer:
    """Explains the operations of one recording."""

    def __init__(
        self,
        comparison: Comparison,
        recording: Recording,
        expected: Golden,
        hf: HFModel,
        stack: ExitStack,
        edit_budget: Budget | None = None,
    ) -> None:
        self.comparison, self.recording, self.golden, self.hf = comparison, recording, expected, hf
        self._stack = stack
        self.locator, self.slot_history = Locator(recording), SlotHistory(recording)
        self.dtype = engine_dtype(recording)
        self.usable = frozenset(self.locator.taps()) & {tap.name for tap in comparison.result.taps}
        self.sound = frozenset(tap.name for tap in comparison.result.taps if tap.verdict in _SOUND)
        self.modules = {path for path, _ in hf.model.named_modules()}
        self._known: dict[str, Explanation | None] = {}
        self._edit_budget = edit_budget or Budget(_EDIT_SECONDS)

    def explained(self, finding: Finding) -> Finding:
        """Return the finding with its explanation, if it has one."""
        explanation, failures = None, list[str]()
        with guarded("the explanation", failures):
            explanation = self._explanation(finding)
        if failures:
            cause = "no explanation: looking for one failed"
            explanation = Explanation(cause=cause, is_cause=False, detail="; ".join(failures))
        return finding if explanation is None else replace(finding, explanation=explanation)

    def _explanation(self, finding: Finding) -> Explanation | None:
        if finding.code is Code.TOKENS_DIFFER and finding.request is not None and finding.position is not None:
            return explain_token(self.recording, self.hf.graph.logits, finding.request, finding.position)
        tap = finding.tap or ""
        if finding.code is Code.PROPAGATED_ERROR and self.usable == {tap} == {self.hf.graph.logits}:
            return self._explanation_of_logits()
        if finding.code is Code.TAP_MISMATCH and tap in self.hf.graph:
            return explain_count(self.hf.graph[tap], self.recording)
        return self.explain(self.hf.graph[tap]) if finding.code in _EXPLAINED and tap in self.hf.graph else None

    def _explanation_of_logits(self) -> Explanation | None:
        """Explain an engine that shows its logits alone."""
        self._edit_budget.begin_explanation()
        return explain_logits(self.recording, self.comparison.expected, self.hf, self.locator, self._edit_budget)

    def explain(self, operation: Operation) -> Explanation | None:
        """Explain one operation, and add where it begins to be wrong; None if no row of it is wrong."""
        explanation = self._explain(operation)
        if (explanation is None or not explanation.is_cause) and (state := self._state_behind(operation)) is not None:
            return state
        errors = self.comparison.errors.get(operation.tap)
        if errors is None or not bool(errors.bad.any()):
            return explanation
        size = self.slot_history.block_size
        config = self.hf.config_of(operation.layer)
        where, is_edge = first_bad_row(errors, self.recording, config, size)
        if explanation is None:
            return _not_looked_for(errors, scope(errors.rows, errors.bad, self.recording), where)
        begins_late = not explanation.is_cause and not explanation.scope.startswith("every row")
        if not is_edge and not begins_late:
            return explanation
        return replace(explanation, detail="; ".join(text for text in (explanation.detail, where) if text))

    def _explain(self, operation: Operation) -> Explanation | None:
        """Explain one operation, and cache the result; None if there is no evidence on its rows."""
        if operation.tap not in self._known:
            self._edit_budget.begin_explanation()
            self._known[operation.tap] = self._with_note(self._search(operation), operation.tap)
        return self._known[operation.tap]

    def _with_note(self, explanation: Explanation | None, tap: str) -> Explanation | None:
        """Add what was not tried of a tap, if no cause is asserted."""
        note = self._edit_budget.notes.get(tap)
        if note is None or explanation is None or explanation.is_cause:
            return explanation
        return replace(explanation, detail="; ".join(text for text in (explanation.detail, note) if text))

    def _search(self, operation: Operation) -> Explanation | None:
        errors, evidence = self.comparison.errors.get(operation.tap), self.comparison.evidence.get(operation.tap)
        if errors is None or not (bool(errors.bad.any()) or errors.effect):
            return None
        if operation.kind is Kind.CACHE:
            if (silent := self._layer_not_run(operation)) is not None:
                return silent
            evidence = self._cache_evidence(operation, errors)
        is_bad = bool(errors.bad.any())
        where = scope(errors.rows, errors.bad, self.recording) if is_bad else ""
        with torch.no_grad(), ExitStack() as stack:
            self.hold(operation, stack)
            if evidence is None and not is_bad:
                return None
            if evidence is None:
                return layers_that_did_not_run(operation, errors, self.hf, self.locator, self.dtype, where)
            has_direction = errors.effect is not None and not is_bad
            # So many edits would fit a direction that some do by chance.
            wrong = self.wrong_operation(evidence, stack, tries_edits=not has_direction)
            if wrong is not None and errors.effect is not None and has_direction:
                return explain_direction(wrong, errors.effect)
            return None if wrong is None else _explained(wrong, where)

    def hold(self, operation: Operation, stack: ExitStack) -> None:
        """Hold the weights of the part of the model with an operation, in float64."""
        if not operation.is_kept and operation.module in self.modules:
            part = self.hf.part_of(operation.module)
            stack.enter_context(self.hf.weights.held(part))
            stack.enter_context(upcast(torch.float64, self.hf.module(part)))

    def _state_behind(self, operation: Operation) -> Explanation | None:
        """Return the cause of a wrong state from which the operation continues, if there is one."""
        for op in self.hf.graph.of_layer(operation.layer):
            is_behind = op.kind is Kind.STATE and f"{operation.module}.".startswith(f"{op.module}.")
            if (
                is_behind
                and op is not operation
                and (explanation := self._explain(op)) is not None
                and explanation.is_cause
            ):
                return replace(explanation, cause=f"{op.tap} {explanation.cause}")
        return None

    def _layer_not_run(self, cache: Operation) -> Explanation | None:
        """Return the cause of a later operation, if the cause is that the layer of the cache did not run.

        That is looked for where an operation has no evidence: see `layers_that_did_not_run`.
        """
        for tap, errors in self.comparison.errors.items():
            is_of_layer = any(layer_of(unrecorded) == cache.layer for unrecorded in errors.unrecorded)
            if is_of_layer and tap not in self.comparison.evidence:
                explanation = self._explain(self.hf.graph[tap])
                return explanation if explanation is not None and explanation.is_cause else None
        return None

    def wrong_operation(
        self, evidence: Evidence, stack: ExitStack, *, tries_edits: bool = True
    ) -> WrongOperation | None:
        """Return the wrong rows of an operation with what was recorded around them; None if they were not recorded."""
        actual = gathered(self.locator, evidence.operation.tap, evidence.rows)
        if actual is None or actual.shape != evidence.expected.shape:
            return None
        rerun = None
        if evidence.part_inputs is not None:
            rerun = Rerun(
                hf=self.hf,
                watch=stack.enter_context(watching(self.hf)),
                part_inputs=evidence.part_inputs,
                operation=evidence.operation,
                usable=self.usable,
            )
        return WrongOperation(
            **vars(evidence),
            hf=self.hf,
            recording=self.recording,
            locator=self.locator,
            actual=actual,
            slot_history=self.slot_history,
            states=self.comparison.states,
            sound=self.sound,
            rerun=rerun,
            edit_budget=self._edit_budget if tries_edits else None,
        )

    def _cache_evidence(self, operation: Operation, errors: LocalErrors) -> Evidence | None:
        """Return the wrong rows of a cache with their expected content."""
        order = torch.argsort(errors.rows.keys, stable=True)
        chosen = torch.tensor(spread(order[errors.bad[order]].tolist(), MAX_ROWS))
        rows = errors.rows.select(chosen)
        written = self._written(operation.inputs[0], rows)
        if written is None:
            return None
        return Evidence(
            operation=operation,
            rows=rows,
            expected=written,
            inputs=[written],
            roundings=errors.roundings[chosen],
            bound=errors.bound[chosen],
            dtype=self.dtype,
        )

    def _written(self, tap: str, rows: Rows) -> torch.Tensor | None:
        """Return the expected content of a cache: from the recorded row, a row with the same tokens, or the golden."""
        places = self.locator.find(tap, rows)
        prefixes = Prefixes(self.recording.manifest.requests)
        others = sorted(request.id for request in self.recording.manifest.requests)
        for row, request in enumerate(others):
            missing = (places[:, 0] < 0).nonzero()[:, 0]
            position = rows.position[missing]
            same = missing[prefixes.table[row, position] == prefixes.of(rows.select(missing))]
            there = Rows(
                request=torch.full_like(same, request), position=rows.position[same], step=torch.zeros_like(same)
            )
            places[same] = self.locator.find(tap, there)
        is_golden = places[:, 0] < 0
        expected = self._golden_of_caches if bool(is_golden.any()) else self.locator
        golden = expected.find(tap, rows.select(is_golden))
        if bool((golden[:, 0] < 0).any()):
            return None
        parts = [
            locator.gather(tap, chosen).to(torch.float64).flatten(1)
            for locator, chosen in ((self.locator, places[~is_golden]), (expected, golden))
            if len(chosen)
        ]
        order = torch.cat([(~is_golden).nonzero()[:, 0], is_golden.nonzero()[:, 0]]).argsort()
        return torch.cat(parts)[order]

    @cached_property
    def _golden_of_caches(self) -> Locator:
        """The golden with full values of all cached taps; made again in a scratch folder if it holds only sketches."""
        golden, kept = self.golden.truth, {tap for op in self.hf.graph if op.kind is Kind.CACHE for tap in op.inputs}
        aliases = match_requests(golden.recording, self.recording, is_pool=golden.is_pool)
        if golden.info is not None and kept & golden.sketched.keys():
            prompts = [
                Prompt(
                    token_ids=tuple(request.token_ids),
                    max_new_tokens=1,
                    prompt_length=request.prompt_length,
                    inputs=request.inputs,
                )
                for request in golden.requests
            ]
            folder = self._stack.enter_context(scratch_folder("harness-golden-"))
            truth = str(golden.info.key["truth"]).removeprefix("torch.")
            golden = make_golden(self.hf, prompts, folder / "golden", truth=truth, keeps_values=False, whole=kept)
        return Locator(golden.recording, aliases)


def layers_that_did_not_run(
    operation: Operation, errors: LocalErrors, hf: HFModel, locator: Locator, dtype: torch.dtype, where: str
) -> Explanation | None:
    """Explain an operation after layers of which nothing was recorded; None if there are no such layers."""
    computed = {op.tap for op in hf.graph if not op.is_kept} & set(locator.taps())
    silent = [layer for layer in hf.graph.layers if not any(op.tap in computed for op in hf.graph.of_layer(layer))]
    layers = sorted({layer for layer in silent for op in hf.graph.of_layer(layer) if op.tap in errors.unrecorded})
    if not layers:
        return None
    names = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
    rows = errors.rows.select(errors.bad.nonzero()[:_MAX_ROWS, 0])
    before = hf.graph.of_layer(layers[0])[0].inputs[0]
    actual, stream = gathered(locator, operation.tap, rows), gathered(locator, before, rows)
    output = None if stream is None else replay(hf, operation, [stream])
    roundings, bound = errors.roundings[errors.bad][:_MAX_ROWS], errors.bound[errors.bad][:_MAX_ROWS].clamp(min=1)
    residual = torch.full_like(roundings, torch.inf)
    if output is not None and actual is not None and output.shape == actual.shape:
        residual = (actual - output).norm(dim=1) / output.norm(dim=1) / rounding_unit(dtype)
    holds = (residual <= bound) & (residual <= _FALL * roundings)
    did_not_run = bool(holds.float().mean() >= MIN_SHARE)
    nothing = f"no tap of {names} was seen"
    return Explanation(
        cause=f"{names} did not run: {nothing}, and this fits {before}" if did_not_run else nothing,
        scope=where,
        residual_before=float(roundings.median()),
        residual_after=float(residual[holds].median()) if did_not_run else None,
        num_rows=len(rows),
        num_explained=int(holds.sum()) if did_not_run else 0,
        is_cause=did_not_run,
    )
