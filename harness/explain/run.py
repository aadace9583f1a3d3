"""What went wrong, for every operation that a comparison found wrong."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch

from harness.compare.align import Locator, Rows, is_readback, match_requests
from harness.compare.cache import cache_errors
from harness.compare.history import attention_inputs
from harness.compare.local import LocalErrors, local_errors
from harness.compare.prefixes import Prefixes
from harness.compare.shapes import engine_dtype
from harness.errors import Code, HarnessError
from harness.explain.memory import Memory
from harness.explain.scene import Scene, gathered, row_inputs
from harness.explain.scope import scope
from harness.explain.tokens import explain_token
from harness.explain.try_all import try_all
from harness.explain.view import View
from harness.oracle.precision import TRUTH_DTYPE
from harness.oracle.replay import Replayer
from harness.recording import Recording
from harness.results import Explanation, Finding, RunResult
from harness.taps import DecoderGraph, Kind, Operation

MAX_ROWS = 192
"""Wrong rows of an operation that are looked at."""
MAX_VIEWS = 6
MAX_ROWS_OF_VIEW = 24
MAX_LAYERS = 3
"""Layers of which one and the same operation is explained: one fault repeats itself in every layer."""

_EXPLAINED = (Code.LOCAL_ERROR, Code.NOT_FINITE, Code.CACHE_DIFFERS)


def explain_run(
    run: RunResult, recording: Recording, expected: Recording, replayer: Replayer, noise: Mapping[str, torch.Tensor]
) -> RunResult:
    """Return the result with an explanation for each finding that is about wrong numbers of one operation.

    Args:
        run: what `compare_run` found.
        recording: the engine's.
        expected: the golden that it was compared with.
        replayer: the oracle's operations.
        noise: HF's own error per tap and row of the golden.
    """
    if not any(finding.tap for finding in run.findings):
        return run
    explainer = _Explainer(recording, expected, replayer, noise)
    findings = tuple(explainer.explained(finding) for finding in run.findings)
    by_tap = {finding.tap: finding.explanation for finding in findings if finding.code in _EXPLAINED}
    first = run.first_divergence
    if first is not None and first.tap in by_tap:
        first = replace(first, explanation=by_tap[first.tap])
    return replace(run, findings=findings, first_divergence=first)


def _failed(error: Exception) -> Explanation:
    """Return what stands in for an explanation that raised."""
    return Explanation(
        cause="no explanation: looking for one failed",
        scope="",
        residual_before=None,
        residual_after=None,
        num_rows=0,
        num_explained=0,
        detail=f"{type(error).__name__}: {error}",
    )


class _Explainer:
    """Explains the operations of one recording."""

    def __init__(
        self, recording: Recording, expected: Recording, replayer: Replayer, noise: Mapping[str, torch.Tensor]
    ) -> None:
        self.recording, self.replayer, self.noise = recording, replayer, noise
        self.expected = Locator(expected, match_requests(expected, recording))
        self.decoder = replayer.decoder
        self.locator, self.memory = Locator(recording), Memory(recording)
        self.dtype = engine_dtype(recording)
        self._num_explained = Counter[str]()

    def explained(self, finding: Finding) -> Finding:
        """Return the finding with its explanation, if it has one."""
        if finding.code is Code.TOKENS_DIFFER and finding.request is not None and finding.position is not None:
            return replace(finding, explanation=explain_token(self.recording, finding.request, finding.position))
        operation = self.decoder.graph.by_tap().get(finding.tap or "")
        if finding.code not in _EXPLAINED or operation is None or self._num_explained[operation.site] == MAX_LAYERS:
            return finding
        self._num_explained[operation.site] += 1
        try:
            explanation = self.explain(operation)
        except HarnessError:
            raise
        except Exception as error:  # a bug of an explanation must not cost the verdict
            explanation = _failed(error)
        return replace(finding, explanation=explanation)

    def explain(self, operation: Operation) -> Explanation | None:
        """Explain one operation; None where its rows are not wrong by themselves."""
        errors = self._errors(operation)
        if errors is None or not bool(errors.bad.any()):
            return None
        chosen = _chosen(errors)
        is_cache = operation.kind is Kind.CACHE
        with torch.no_grad(), nullcontext() if is_cache else self.replayer.layer(operation.layer):
            views = self._views(operation, errors) if operation.kind is Kind.ATTENTION else ()
            if operation.kind is Kind.ATTENTION:
                chosen = _positions_of(errors.rows, views)
            scene = self._scene(operation, errors.rows.select(chosen), views)
            if scene is None:
                return None
            where = scope(errors.rows, errors.bad, self.recording)
            return try_all(scene, errors.roundings[chosen], errors.bound[chosen], where)

    def _errors(self, operation: Operation) -> LocalErrors | None:
        graph = DecoderGraph((operation,))
        if operation.kind is Kind.CACHE:
            return next((errors for _, errors in cache_errors(self.locator, graph, self.expected, self.noise)), None)
        return next((errors for _, errors in local_errors(self.recording, graph, self.replayer)), None)

    def _scene(self, operation: Operation, rows: Rows, views: tuple[View, ...]) -> Scene | None:
        actual = gathered(self.locator, operation.tap, rows)
        if operation.kind is Kind.CACHE:
            written = self._written(operation.inputs[0], rows)
            if written is None:
                return None
            inputs, expected = [written], written
        elif operation.kind is Kind.ATTENTION:
            inputs = []
            expected = torch.cat([view.attend() for view in views]) if views else torch.empty(0)
        else:
            own_inputs = row_inputs(self.locator, operation, rows)
            if own_inputs is None:
                return None
            inputs = own_inputs
            expected = self.replayer.replay(operation, inputs, rows.position).expected.cpu().flatten(1)
        if actual is None or expected.shape != actual.shape:
            return None
        return Scene(
            operation=operation,
            decoder=self.decoder,
            recording=self.recording,
            locator=self.locator,
            rows=rows,
            actual=actual,
            expected=expected.to(TRUTH_DTYPE),
            inputs=inputs,
            dtype=self.dtype,
            views=views,
            memory=self.memory,
        )

    def _written(self, tap: str, rows: Rows) -> torch.Tensor | None:
        """Return what a cache was to hold: the row itself, that of whoever has the same tokens, or the golden's."""
        found = self.locator.find(tap, rows)
        prefixes = Prefixes(self.recording.manifest.requests)
        others = sorted(request.id for request in self.recording.manifest.requests)
        for row, request in enumerate(others):
            missing = (found[:, 0] < 0).nonzero()[:, 0]
            position = rows.position[missing]
            same = missing[prefixes.table[row, position] == prefixes.of(rows.select(missing))]
            there = Rows(
                request=torch.full_like(same, request), position=rows.position[same], step=torch.zeros_like(same)
            )
            found[same] = self.locator.find(tap, there)
        is_golden = found[:, 0] < 0
        golden = self.expected.find(tap, rows.select(is_golden))
        if bool((golden[:, 0] < 0).any()):
            return None
        parts = [
            locator.gather(tap, places).to(TRUTH_DTYPE).flatten(1)
            for locator, places in ((self.locator, found[~is_golden]), (self.expected, golden))
            if len(places)
        ]
        order = torch.cat([(~is_golden).nonzero()[:, 0], is_golden.nonzero()[:, 0]]).argsort()
        return torch.cat(parts)[order]

    def _views(self, operation: Operation, errors: LocalErrors) -> tuple[View, ...]:
        """Return the wrong rows request by request, with the history that each was to read."""
        steps = [step for step in self.recording.steps if not is_readback(step)]
        prefixes = Prefixes(self.recording.manifest.requests)
        wrong = set(_identities(errors.rows.select(errors.bad)))
        views: list[View] = []
        for rows, _, inputs in attention_inputs(operation, steps, prefixes):
            here = [at for at, identity in enumerate(_identities(rows)) if identity in wrong]
            if not here or len(views) == MAX_VIEWS:
                continue
            keep = torch.tensor(_spread(here, MAX_ROWS_OF_VIEW))
            order = inputs.key_position.argsort()
            steps_of = {position: step for _, position, step in _identities(rows)}
            key_step = [steps_of.get(position, -1) for position in inputs.key_position[order].tolist()]
            module = self.decoder.layers[operation.layer or 0].self_attn
            views.append(
                View(
                    rows=rows.select(keep),
                    query=self._heads(inputs.query[keep]),
                    key=self._heads(inputs.key[order]),
                    value=self._heads(inputs.value[order]),
                    key_step=torch.tensor(key_step),
                    scale=float(module.scaling),  # type: ignore[arg-type, union-attr]
                    window=self.replayer.window(module),
                )
            )
        return tuple(views)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.to("cpu", TRUTH_DTYPE).flatten(1).unflatten(-1, (-1, self.decoder.head_dim()))
        return heads


def _chosen(errors: LocalErrors) -> torch.Tensor:
    """Return the indices of the wrong rows that are looked at, the first among them, spread over all of them."""
    order = torch.argsort(errors.rows.request * (1 << 32) + errors.rows.position, stable=True)
    bad = order[errors.bad[order]].tolist()
    return torch.tensor(_spread(bad, MAX_ROWS))


def _spread(items: list[int], count: int) -> list[int]:
    if len(items) <= count:
        return items
    return [items[at * len(items) // count] for at in range(count)]


def _positions_of(rows: Rows, views: tuple[View, ...]) -> torch.Tensor:
    """Return where the rows of the views stand among `rows`, in the order of the views."""
    where = {identity: at for at, identity in enumerate(_identities(rows))}
    return torch.tensor([where[identity] for view in views for identity in _identities(view.rows)], dtype=torch.int64)


def _identities(rows: Rows) -> Iterator[tuple[int, int, int]]:
    return zip(rows.request.tolist(), rows.position.tolist(), rows.step.tolist(), strict=True)
