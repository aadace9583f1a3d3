"""One recording against one golden: every judgement there is, put together into a result."""

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from harness.compare.align import Locator, match_requests
from harness.compare.cache import cache_errors
from harness.compare.composite import composite_errors
from harness.compare.coverage import check_coverage, check_tokens
from harness.compare.judged import (
    Judged,
    bad_finding,
    divergence,
    judge,
    oracle_finding,
    systematic_finding,
    tap_result,
)
from harness.compare.local import LocalErrors, local_errors
from harness.compare.positions import position_errors
from harness.compare.propagated import propagated_errors
from harness.compare.shapes import check_taps, usable_graph
from harness.compare.tokens import compare_tokens
from harness.compare.traits import Traits
from harness.oracle.golden import LOGIT_NOISE
from harness.oracle.replay import Replayer
from harness.recording import Recording
from harness.results import Divergence, Finding, LogitResult, Outcome, RunResult
from harness.taps import graph_of_taps
from harness.threads import one_thread

TOKENS = "tokens"
"""What an engine that cannot report its own choices declares as lacking."""


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
    aliases = match_requests(expected, actual)
    graph = replayer.decoder.graph if replayer else graph_of_taps(entry.name for entry in expected.manifest.taps)
    depths = {operation.tap: depth for depth, operation in enumerate(graph, start=1)}
    findings, usable = check_taps(actual, expected, graph)
    local: dict[str, LocalErrors] = {}
    if replayer is not None:
        local = {op.tap: errors for op, errors in local_errors(actual, usable_graph(graph, usable), replayer)}
        local |= {op.tap: errors for op, errors in composite_errors(actual, graph, usable, replayer)}
    ours, theirs = Locator(actual), Locator(expected, aliases)
    caches = {op.tap: errors for op, errors in cache_errors(ours, usable_graph(graph, usable), theirs, noise)}
    with one_thread():  # blocks of the cache's size: a second thread is better spent on the digests
        propagation = propagated_errors(actual, theirs, noise, depths, usable)
    judged = judge(graph, local, caches, propagation)
    tokens, differences = compare_tokens(actual, theirs, noise.get(LOGIT_NOISE))
    wanted = [entry.name for entry in expected.manifest.taps] if wanted is None else wanted
    coverage, gaps = check_coverage(
        ours,
        wanted,
        not_offered=not_offered,
        require=require if actual.steps else (),
        traits=_traits(replayer),
        also=_ties(propagation.logits, noise.get(LOGIT_NOISE)),
    )
    not_finite = oracle_finding(propagation)
    findings += [bad_finding(each) for each in judged if each.is_bad] + ([not_finite] if not_finite else [])
    findings += [systematic_finding(each) for each in judged if each.is_systematic]
    findings += differences + gaps + ([] if TOKENS in not_offered else check_tokens(ours, tokens.compared))
    actual.verify_all()
    expected.verify_all()
    return RunResult(
        schedule=actual.manifest.schedule or "recorded",
        outcome=_outcome(judged, tokens.compared, findings),
        num_rows=sum(step.entry.num_rows for step in actual.steps if step.phase != "readback"),
        taps=tuple(tap_result(each) for each in judged),
        findings=tuple(findings),
        first_divergence=_first_divergence(judged, actual),
        tokens=tokens,
        logits=propagation.logits,
        coverage=coverage,
        engine_s=engine_s,
        compare_s=time.perf_counter() - begin,
        positions=position_errors(propagation, graph),
    )


def _traits(replayer: Replayer | None) -> Traits | None:
    if replayer is None:
        return None
    decoder = replayer.decoder
    return Traits.of(decoder.config, [replayer.window(layer.self_attn) for layer in decoder.layers])


def _ties(logits: LogitResult | None, noise: torch.Tensor | None) -> tuple[str, ...]:
    """Name the trigger of a near-tie if the truth's two best logits were ever nearer than two errors of HF's own."""
    if logits is None or noise is None or not len(noise):
        return ()
    return ("near_tie",) if logits.margin_min <= 2 * float(noise.max()) else ()


def _first_divergence(judged: Sequence[Judged], actual: Recording) -> Divergence | None:
    """Describe the first operation that is out of bounds; where none is, the first that is systematically off."""
    first = next((each for each in judged if each.is_bad), next((each for each in judged if each.is_systematic), None))
    return None if first is None else divergence(first, actual)


def _outcome(judged: Sequence[Judged], num_tokens: int, findings: Sequence[Finding]) -> Outcome:
    if findings:
        return Outcome.MISMATCH
    compared = any(len(each.rows) for each in judged)
    return Outcome.PASS if compared or num_tokens else Outcome.NOTHING
