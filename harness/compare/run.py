"""One recording against one golden: every judgement there is, put together into a result."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.compare.align import Locator, Rows, check_same_prompts
from harness.compare.cache import cache_errors
from harness.compare.coverage import check_coverage
from harness.compare.local import LocalErrors, local_errors
from harness.compare.propagated import RATIO_BOUND, PropagatedErrors, Propagation, propagated_errors
from harness.compare.tokens import compare_tokens
from harness.errors import Code
from harness.metrics import rounding_unit
from harness.oracle.golden import LOGIT_NOISE
from harness.oracle.replay import Replayer
from harness.recording import Recording
from harness.recording.tensors import TORCH_DTYPES
from harness.results import Divergence, Finding, Outcome, RowId, RunResult, TapResult, Verdict
from harness.taps import DecoderGraph, Kind, Operation, graph_of_taps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """All that is known of one tap before it is summed up."""

    operation: Operation
    local: LocalErrors | None
    cache: LocalErrors | None
    propagated: PropagatedErrors | None
    judges_by_propagation: bool

    @property
    def rows(self) -> Rows:
        source = self.local or self.cache or self.propagated
        assert source is not None
        return source.rows

    @property
    def bad(self) -> torch.Tensor:
        """[rows] bool: out of bounds by the sharpest judgement there is."""
        exact = self.local or self.cache
        if exact is not None:
            return exact.bad
        assert self.propagated is not None
        if not self.judges_by_propagation:
            return torch.zeros(len(self.propagated.rows), dtype=torch.bool)
        return ~(self.propagated.ratio <= RATIO_BOUND)


def compare_run(
    actual: Recording,
    expected: Recording,
    *,
    noise: Mapping[str, torch.Tensor] | None = None,
    replayer: Replayer | None = None,
    wanted: Iterable[str] | None = None,
    not_offered: Sequence[str] = (),
    require: Sequence[str] = ("decode",),
    engine_s: float | None = None,
) -> RunResult:
    """Compare an engine's recording with a golden, or with another engine's recording.

    Args:
        actual: what the engine recorded.
        expected: the golden.
        noise: HF's own error per tap and row of the golden.
        replayer: the oracle's operations; without it nothing is judged locally.
        wanted: taps that must have been recorded; by default those of `expected`.
        not_offered: sites that the engine declares it cannot record; reported only.
        require: triggers the workload must have reached.
        engine_s: seconds the engine took, for the report.

    Raises:
        HarnessError: the recordings hold different prompts, or one of them is damaged.
    """
    begin, noise = time.perf_counter(), noise or {}
    check_same_prompts(expected, actual)
    graph = replayer.decoder.graph if replayer else graph_of_taps(entry.name for entry in expected.manifest.taps)
    depths = {operation.tap: depth for depth, operation in enumerate(graph, start=1)}
    findings, usable = _check_taps(actual, expected)
    local: dict[str, LocalErrors] = {}
    if replayer is not None:
        local = {op.tap: errors for op, errors in local_errors(actual, usable_graph(graph, usable), replayer)}
    ours, theirs = Locator(actual), Locator(expected)
    caches = {operation.tap: errors for operation, errors in cache_errors(ours, graph)}
    propagation = propagated_errors(actual, theirs, noise, depths)
    findings += [finding for finding in propagation.findings if finding.tap in usable]
    judged = _judge(graph, local, caches, propagation)
    findings += _findings(judged, propagation)
    tokens, differences = compare_tokens(actual, theirs, noise.get(LOGIT_NOISE))
    coverage, gaps = check_coverage(
        ours, _wanted(wanted, expected), not_offered=not_offered, require=_applicable(require, actual)
    )
    findings += differences + gaps
    actual.verify_all()
    expected.verify_all()
    return RunResult(
        schedule=actual.manifest.schedule or "recorded",
        outcome=_outcome(judged, tokens.compared, findings),
        num_rows=sum(step.entry.num_rows for step in actual.steps if step.phase != "readback"),
        taps=tuple(_tap_result(each) for each in judged),
        findings=tuple(findings),
        first_divergence=_first_divergence(judged, actual),
        tokens=tokens,
        logits=propagation.logits,
        coverage=coverage,
        engine_s=engine_s,
        compare_s=time.perf_counter() - begin,
    )


def usable_graph(graph: DecoderGraph, usable: set[str]) -> DecoderGraph:
    """Return the operations whose output and inputs all have the shape and dtype they must have."""
    return DecoderGraph(tuple(op for op in graph if {op.tap, *op.inputs} <= usable))


def _wanted(wanted: Iterable[str] | None, expected: Recording) -> list[str]:
    return list(wanted) if wanted is not None else [entry.name for entry in expected.manifest.taps]


def _applicable(require: Sequence[str], actual: Recording) -> Sequence[str]:
    """Return nothing for a recording without steps: its coverage says that it reached nothing."""
    return require if actual.steps else ()


def _check_taps(actual: Recording, expected: Recording) -> tuple[list[Finding], set[str]]:
    """Look at shapes and dtypes before any value: return what is wrong, and the names of the taps that can be used."""
    shapes = {entry.name: entry.shape for entry in expected.manifest.taps}
    unit = rounding_unit(getattr(torch, actual.manifest.dtype))
    findings, usable = [], set[str]()
    for entry in actual.manifest.taps:
        dtype = TORCH_DTYPES[entry.dtype]
        message = None
        if not dtype.is_floating_point:
            message = f"dtype of {entry.name} is {entry.dtype}, expected a floating-point dtype"
        elif rounding_unit(dtype) > unit * 1.001:
            message = f"dtype of {entry.name} is {entry.dtype}, coarser than the engine's {actual.manifest.dtype}"
        elif entry.name in shapes and _num_elements(entry.shape) != _num_elements(shapes[entry.name]):
            there, here = list(shapes[entry.name]), list(entry.shape)
            message = f"shape of {entry.name} differs: expected {there}, actual {here} per row"
        if message is None:
            usable.add(entry.name)
        else:
            findings.append(Finding(code=Code.TAP_MISMATCH, message=message, tap=entry.name))
    return findings, usable


def _num_elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _judge(
    graph: DecoderGraph, local: Mapping[str, LocalErrors], caches: Mapping[str, LocalErrors], propagation: Propagation
) -> list[_Judged]:
    """Put the judgements of each tap together, in graph order; taps outside of the graph come last, unjudged."""
    known = graph.by_tap()
    others = [Operation(tap=tap, kind=Kind.ADD, inputs=()) for tap in propagation.errors if tap not in known]
    return [
        _Judged(
            operation=operation,
            local=local.get(operation.tap),
            cache=caches.get(operation.tap),
            propagated=propagation.errors.get(operation.tap),
            judges_by_propagation=operation.tap in known,
        )
        for operation in (*graph, *others)
        if operation.tap in local or operation.tap in caches or operation.tap in propagation.errors
    ]


def _outcome(judged: Sequence[_Judged], num_tokens: int, findings: Sequence[Finding]) -> Outcome:
    if findings:
        return Outcome.MISMATCH
    compared = any(len(each.rows) for each in judged)
    return Outcome.PASS if compared or num_tokens else Outcome.NOTHING


def _code(each: _Judged, at: int) -> Code:
    """Say how a bad row is bad."""
    errors = each.local or each.cache
    if errors is None:
        assert each.propagated is not None
        finite = each.propagated.metrics.is_finite[at]
        return Code.PROPAGATED_ERROR if finite else Code.NOT_FINITE
    if each.cache is not None and each.local is None:
        return Code.CACHE_DIFFERS
    return Code.LOCAL_ERROR if torch.isfinite(errors.roundings[at]) else Code.NOT_FINITE


def _first_divergence(judged: Sequence[_Judged], actual: Recording) -> Divergence | None:
    for each in judged:
        if bool(each.bad.any()):
            return _divergence(each, actual)
    return None


def _divergence(each: _Judged, actual: Recording) -> Divergence:
    at = each.rows.first(each.bad)
    errors = each.local or each.cache
    step = int(each.rows.step[at])
    request, position = int(each.rows.request[at]), int(each.rows.position[at])
    return Divergence(
        tap=each.operation.tap,
        request=request,
        position=position,
        verdict=Verdict.BUG,
        code=_code(each, at),
        local_roundings=None if errors is None else float(errors.roundings[at]),
        bound_roundings=None if errors is None else float(errors.bound[at]),
        propagated_ratio=_ratio_at(each.propagated, request, position),
        schedule=actual.manifest.schedule,
        step=step,
        phase=actual.steps[step].phase,
    )


def _ratio_at(propagated: PropagatedErrors | None, request: int, position: int) -> float | None:
    if propagated is None:
        return None
    here = (propagated.rows.request == request) & (propagated.rows.position == position)
    return float(propagated.ratio[here].max()) if bool(here.any()) else None


def _findings(judged: Sequence[_Judged], propagation: Propagation) -> list[Finding]:
    """One finding per operation that is out of bounds, and one per side that is not finite where it should be."""
    findings = [_bad_finding(each) for each in judged if bool(each.bad.any())]
    for tap, errors in propagation.errors.items():
        broken = ~torch.isfinite(errors.metrics.expected_norm)
        if bool(broken.any()):
            at = errors.rows.first(broken)
            request, position = int(errors.rows.request[at]), int(errors.rows.position[at])
            message = f"the expected side of {tap} is not finite at request {request}, position {position}"
            findings.append(
                Finding(code=Code.ORACLE_NOT_FINITE, message=message, tap=tap, request=request, position=position)
            )
            break
    return findings


def _bad_finding(each: _Judged) -> Finding:
    at, tap = each.rows.first(each.bad), each.operation.tap
    request, position = int(each.rows.request[at]), int(each.rows.position[at])
    code, place = _code(each, at), f"request {request}, position {position}"
    count = f"{int(each.bad.sum())} of {len(each.rows)} rows"
    errors = each.local or each.cache
    if code is Code.NOT_FINITE:
        message = f"{tap} is not finite in {count} though its inputs are, the first at {place}"
    elif code is Code.CACHE_DIFFERS:
        message = (
            f"{tap} read back through the block table differs from what was written in {count}, the first at {place}"
        )
    elif errors is not None:
        share = f"{float(errors.roundings[at]):.3g} roundings, bound {float(errors.bound[at]):.3g}"
        message = f"{tap} is out of bounds in {count}, the first at {place}: {share}"
    else:
        ratio = _ratio_at(each.propagated, request, position)
        message = f"{tap} is {ratio:.3g} times as far from the truth as HF in {count}, the first at {place}"
    return Finding(code=code, message=message, tap=tap, request=request, position=position)


def _verdict(each: _Judged) -> Verdict:
    if bool(each.bad.any()):
        return Verdict.BUG
    errors = each.local or each.cache
    if errors is None:
        assert each.propagated is not None
        if float(each.propagated.ratio.max()) == 0:
            return Verdict.EXACT
        return Verdict.NOISE if each.judges_by_propagation else Verdict.UNJUDGED
    if errors.exact:
        return Verdict.EXACT
    return Verdict.CONVENTION if errors.convention else Verdict.NOISE


def _tap_result(each: _Judged) -> TapResult:
    errors, propagated = each.local or each.cache, each.propagated
    judged_by = (
        "local" if each.local else "cache" if each.cache else "propagated" if each.judges_by_propagation else "none"
    )
    figures: dict[str, Any] = {} if errors is None else _local_figures(errors)
    figures |= {} if propagated is None else _propagated_figures(propagated)
    score = errors.roundings if errors is not None else propagated.ratio if propagated is not None else torch.empty(0)
    at = int(torch.nan_to_num(score, nan=-1.0).argmax())
    return TapResult(
        name=each.operation.tap,
        site=each.operation.site,
        layer=each.operation.layer,
        kind=each.operation.kind.value,
        num_rows=len(each.rows),
        verdict=_verdict(each),
        judged_by=judged_by,
        convention=errors.convention if errors else None,
        worst=_row_id(each, at),
        num_bad_rows=int(each.bad.sum()),
        first_bad=_row_id(each, each.rows.first(each.bad)) if bool(each.bad.any()) else None,
        **figures,
    )


def _row_id(each: _Judged, at: int) -> RowId:
    """Name a row, and within it the element that is furthest off where that was measured."""
    index = None
    if each.propagated is not None and len(each.propagated.rows) == len(each.rows):
        index = int(each.propagated.metrics.worst_index[at])
        index = None if index < 0 else index
    return RowId(request=int(each.rows.request[at]), position=int(each.rows.position[at]), index=index)


def _local_figures(errors: LocalErrors) -> dict[str, float]:
    known = errors.roundings[~errors.roundings.isnan()]
    if not len(known):
        return {}
    share = torch.where(known == 0, 0.0, known / errors.bound[~errors.roundings.isnan()])
    return {
        "local_roundings_median": float(known.median()),
        "local_roundings_p99": float(known.quantile(0.99)) if bool(known.isfinite().all()) else float(known.max()),
        "local_roundings_max": float(known.max()),
        "local_bound_share_max": float(share.max()),
    }


def _propagated_figures(propagated: PropagatedErrors) -> dict[str, float | int]:
    metrics = propagated.metrics
    return {
        "propagated_relative_l2_max": float(metrics.relative_l2.max()),
        "propagated_ratio_median": float(propagated.ratio.median()),
        "propagated_ratio_max": float(propagated.ratio.max()),
        "max_abs": float(metrics.max_abs.max()),
        "max_ulp": float(metrics.max_ulp.max()),
        "cosine_min": float(metrics.cosine.min()),
        "sqnr_db_min": float(metrics.sqnr_db.min()),
        "num_nan": metrics.num_nan,
        "num_inf": metrics.num_inf,
    }
