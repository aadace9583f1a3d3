"""Compare one recording with one golden: judge every tap, and combine the judgements into a result."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from harness.base.progress import Progress
from harness.base.threads import Workers
from harness.formats.recording import Recording
from harness.formats.taps import Graph
from harness.judge.compare.align import Locator, Rows, all_rows, is_readback, match_requests
from harness.judge.compare.batch import RowSample, rows_standing_out
from harness.judge.compare.cache import cache_errors, reads_unwritten
from harness.judge.compare.conventions.linear import QUANTISED_INPUTS
from harness.judge.compare.coverage import (
    Requirements,
    check_caches,
    check_coverage,
    check_tokens,
    judged_compute,
    unjudged,
)
from harness.judge.compare.evidence import Evidence
from harness.judge.compare.judged import (
    TapJudgement,
    bad_finding,
    choice_finding,
    first_divergence,
    judge,
    oracle_finding,
    rest_finding,
    systematic_finding,
    tap_result,
)
from harness.judge.compare.local import LocalJudgement, local_errors, needs_control, replay_dtype
from harness.judge.compare.propagated import Propagation, position_errors, propagated_errors
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.seen import SeenRows
from harness.judge.compare.sequences import slot_conflicts
from harness.judge.compare.shapes import check_taps, refuse_other_dtype, refuse_part
from harness.judge.compare.states import StateRuns, judge_states
from harness.judge.compare.tokens import compare_acceptance, compare_tokens, tie_margin
from harness.judge.compare.triggers import Traits
from harness.oracle.golden import LOGIT_NOISE, Golden
from harness.oracle.model import HFModel
from harness.results.check import Coverage, Finding, LogitResult, Outcome, Reference, RunResult, TokenResult

TOKENS = "tokens"
"""The unsupported tap of an engine that cannot report its own choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison, and the evidence for the causes."""

    result: RunResult
    expected: Golden
    """What the recording was compared with; the truth of a plain golden if a verdict asked for it."""
    errors: Mapping[str, LocalErrors]
    """By tap: errors of operations that were judged separately, and of the caches and states read back."""
    evidence: Mapping[str, Evidence]
    """By tap: wrong rows of operations that were judged separately, and of states."""
    sound: Mapping[str, Evidence] = field(default_factory=dict)
    """By tap: some rows of one sound operation of each site."""
    states: StateRuns | None = None
    """Runs the high-precision model over recorded rows, and returns the resulting states."""


def compare_run(
    actual: Recording,
    expected: Golden,
    *,
    hf: HFModel | None = None,
    requirements: Requirements | None = None,
    truth: str = "auto",
    stops_early: bool = False,
    sample: RowSample | None = None,
    progress: Progress | None = None,
    seen: SeenRows | None = None,
) -> Comparison:
    """Compare the recording of an engine with a golden, or with the recording of another engine.

    Args:
        actual: what the engine recorded.
        expected: the golden, or another recording without noise. The truth of a plain golden is asked for where a
            verdict depends on it: where not every operation was judged by itself, or anything differs.
        hf: the model that replays every operation separately; without it, rows are only compared.
        requirements: what `actual` must hold to pass; by default the taps of `expected`, and a decode step.
        truth: precision in which operations are replayed: `float64`, `float32` or `auto`.
        stops_early: stop at the first wrong operation.
        sample: sample of the positions at which products and attention are judged; None for all.
        progress: called with the current stage.
        seen: rows of earlier schedules, which are not judged again.

    Raises:
        HarnessError: the recordings have different prompts or dtypes, or one of them is damaged.
    """
    begin, required, expected = time.perf_counter(), requirements or Requirements(), expected.at_hand
    sides = _sides(actual, expected, hf)
    judgements = _judge(sides, hf, truth=truth, stops_early=stops_early, sample=sample, progress=progress, seen=seen)
    comparison = _combined(sides, expected, hf, judgements, required)
    if expected.is_plain and _asks_for_truth(sides, judgements, comparison.result, required):
        expected = expected.truth
        sides = _sides(actual, expected, hf)
        judgements = _judge(sides, hf, truth=truth, replayed=judgements)
        comparison = _combined(sides, expected, hf, judgements, required)
    for recording in (actual, expected.recording):
        recording.verify_all()
    return replace(comparison, result=replace(comparison.result, compare_s=time.perf_counter() - begin))


def _asks_for_truth(sides: "_Sides", judgements: "_Judgements", result: RunResult, required: Requirements) -> bool:
    """Whether a verdict depends on the truth, or the report of a failure states distances from it."""
    is_through_others = any(judged.errors is None and judged.is_in_graph for judged in judgements.judged)
    return (
        bool(result.findings or judgements.propagation.other_choices)
        or is_through_others
        or any(bool(judged.only_propagated.any()) for judged in _of_hfs_rounding(judgements))
        or result.tokens.equal < result.tokens.compared
        or any(step.differs for step in result.acceptance)
        or "near_tie" in required.require
        or reads_unwritten(sides.ours, sides.graph, sides.usable)
    )


def _combined(
    sides: "_Sides", expected: Golden, hf: HFModel | None, judgements: "_Judgements", required: Requirements
) -> Comparison:
    """Combine the judgements into a result."""
    actual = sides.actual
    tokens, coverage, gaps = _tokens_and_coverage(sides, expected, hf, judgements, required)
    findings = [*sides.findings, *_findings(sides, judgements), *gaps]
    num_tokens = tokens.compared if required.accepts_tokens else 0
    misshapen = [finding.tap for finding in sides.findings if finding.tap is not None]
    result = RunResult(
        schedule=actual.manifest.schedule or "recorded",
        outcome=_outcome(judgements.judged, coverage, num_tokens, findings, required.least_compute),
        num_rows=sum(step.entry.num_rows for step in actual.steps if step.phase != "readback"),
        taps=tuple(tap_result(judgement) for judgement in judgements.judged),
        findings=tuple(findings),
        first_divergence=first_divergence(judgements.judged, misshapen, sides.graph, actual),
        tokens=tokens,
        logits=judgements.propagation.logits,
        coverage=coverage,
        propagated_from=_propagated_from(expected),
        positions=position_errors(judgements.propagation, sides.graph),
        bits=actual.bits,
        acceptance=compare_acceptance(
            actual, sides.theirs, sides.graph.logits, tie_margin(sides.noise.get(LOGIT_NOISE))
        ),
    )
    return Comparison(
        result=result,
        expected=expected,
        errors=judgements.errors,
        evidence={**judgements.local.evidence, **judgements.states.evidence},
        sound={**judgements.local.sound, **judgements.states.sound},
        states=judgements.runs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """Two recordings of the same requests, with taps named as in the graph."""

    actual: Recording
    graph: Graph
    usable: set[str]
    """Recorded taps whose shape and dtype match."""
    findings: Sequence[Finding]
    """Findings on taps whose shape or dtype does not match."""
    ours: Locator
    theirs: Locator
    noise: Mapping[str, torch.Tensor]
    sketched: Collection[str]
    """Taps for which the golden holds only sketches."""
    is_plain: bool
    """Whether the golden is HF's run in the engine's dtype, whose caches no bound holds for."""


def _sides(actual: Recording, expected: Golden, hf: HFModel | None) -> _Sides:
    """Match the requests of both recordings, and use the same names of taps."""
    for recording in (expected.recording, actual):
        refuse_part(recording)
    refuse_other_dtype(expected.recording, actual)
    aliases = match_requests(expected.recording, actual, is_pool=expected.is_pool)
    if hf is not None:
        hf.has_images = any(request.inputs for request in expected.recording.manifest.requests)
    graph = expected.graph if hf is None else hf.graph
    for recording in (actual, expected.recording):
        recording.with_names(graph.aliases)
    findings, usable = check_taps(actual, expected.recording, graph, expected.sketched)
    return _Sides(
        actual=actual,
        graph=graph,
        usable=usable,
        findings=findings,
        ours=Locator(actual),
        theirs=Locator(expected.recording, aliases),
        noise=expected.noise,
        sketched=expected.sketched,
        is_plain=expected.is_plain,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgements:
    """All judgements on the taps."""

    local: LocalJudgement
    errors: Mapping[str, LocalErrors]
    """Errors of operations that were judged separately, and of caches and states read back."""
    states: LocalJudgement
    runs: StateRuns | None
    propagation: Propagation
    judged: Sequence[TapJudgement]


def _judge(
    sides: _Sides,
    hf: HFModel | None,
    *,
    truth: str,
    stops_early: bool = False,
    sample: RowSample | None = None,
    progress: Progress | None = None,
    replayed: _Judgements | None = None,
    seen: SeenRows | None = None,
) -> _Judgements:
    """Judge each operation separately, the caches and states, and the propagated errors.

    Only the latter two are judged if the operations were `replayed` before.
    """
    actual, graph, usable = sides.actual, sides.graph, sides.usable
    local, done = LocalJudgement() if replayed is None else replayed.local, list[Propagation]()
    numbered = None
    if hf is not None and seen is not None and sample is None and not needs_control(graph, usable):
        numbered = seen.number(actual, hf, usable)
    distances = partial(propagated_errors, actual, sides.theirs, sides.noise, graph, usable, sketched=sides.sketched)
    if numbered is not None:
        known = numbered.seen.distances(sides.theirs.recording)
        distances = partial(distances, contents=numbered.contents, known=known)
    with Workers[Propagation](min(1, torch.get_num_threads() - 1)) as beside:
        beside.submit(distances)
        if replayed is None and sample is not None:  # the sample includes outliers, so propagation is needed first
            done = list(beside.finished())
            sample = replace(sample, standing_out=rows_standing_out(done[0]))
        if replayed is None and hf is not None:
            local = local_errors(
                actual,
                hf,
                usable,
                truth=truth,
                stops_early=stops_early,
                sample=sample,
                progress=progress,
                numbered=numbered,
            )
        (propagation,) = done or beside.finished()
    theirs = sides.theirs if _runs_as_the_golden(local) and not sides.is_plain else None
    caches = cache_errors(sides.ours, graph, usable, theirs, sides.noise, sketched=sides.sketched)
    errors = {**local.errors, **{op.tap: cache for op, cache in caches}}
    states, runs = (LocalJudgement(), None) if replayed is None else (replayed.states, replayed.runs)
    if replayed is None and hf is not None and not local.is_partial:
        runs = StateRuns(actual, hf, usable, replay_dtype(truth, actual, hf))
        states = judge_states(runs, graph, usable)
    errors |= states.errors
    judged = judge(graph, errors, propagation)
    if local.is_partial:  # the other taps may be wrong, or may have wrong inputs
        judged = [judgement for judgement in judged if judgement.errors is not None]
    return _Judgements(local=local, errors=errors, states=states, runs=runs, propagation=propagation, judged=judged)


def _propagated_from(expected: Golden) -> Reference:
    if expected.is_plain:
        return Reference.HF
    return Reference.TRUTH if expected.noise else Reference.RECORDING


def _runs_as_the_golden(local: LocalJudgement) -> bool:
    """Whether only rounding separates the engine from the golden.

    Not if the inputs of products are quantised. The expected content of a cache is then known only from the recording.
    """
    quantised = QUANTISED_INPUTS.partition("{")[0]
    return not any((errors.convention or "").startswith(quantised) for errors in local.errors.values())


def _tokens_and_coverage(
    sides: _Sides, expected: Golden, hf: HFModel | None, judgements: _Judgements, required: Requirements
) -> tuple[TokenResult, Coverage, list[Finding]]:
    """Compare the tokens and measure the coverage; return differences and gaps as findings."""
    graph, ours, noise = sides.graph, sides.ours, sides.noise.get(LOGIT_NOISE)
    is_other = bool(judgements.propagation.other_choices)
    sound = ours if _own_logits_decide(judgements.judged, graph.logits, has_other_choices=is_other) else None
    tokens, differences = compare_tokens(sides.actual, sides.theirs, graph.logits, noise, sound=sound)
    coverage, gaps = check_coverage(
        ours,
        graph,
        [entry.name for entry in expected.recording.taps] if required.wanted is None else required.wanted,
        required,
        traits=None if hf is None else Traits.of(hf),
        also=_ties(judgements.propagation.logits, noise),
    )
    gaps += [] if TOKENS in required.not_offered else check_tokens(ours, tokens.compared)
    sampled = judgements.local.sampled
    coverage = replace(
        coverage,
        states_left_out=judgements.states.left_out,
        rows_seen_before=judgements.local.num_seen,
        rows_left_out=sampled.left_out,
        least_rows_found=sampled.least_found,
        experts_not_chosen=tuple(
            f"{tap}[{expert}]" for tap, experts in judgements.local.not_chosen.items() for expert in experts
        ),
    )
    return tokens, _with_what_was_judged(coverage, sides, judgements, hf), [*differences, *gaps]


def _findings(sides: _Sides, judgements: _Judgements) -> list[Finding]:
    """Return the findings on operations, the oracle, and the cache and its slots."""
    not_finite = oracle_finding(judgements.propagation)
    findings = [bad_finding(judgement) for judgement in judgements.judged if judgement.is_bad] + (
        [not_finite] if not_finite else []
    )
    findings += [systematic_finding(judgement) for judgement in judgements.judged if judgement.effect is not None]
    findings += filter(None, map(rest_finding, _of_hfs_rounding(judgements)))
    judged = {judgement.operation.tap for judgement in judgements.judged}
    findings += [
        choice_finding(*choice) for choice in judgements.propagation.other_choices.items() if choice[0] not in judged
    ]
    if _runs_as_the_golden(judgements.local):
        findings += check_caches(
            sides.ours, sides.graph, sides.usable, [judgement.operation.tap for judgement in judgements.judged]
        )
    return findings + slot_conflicts(sides.actual)


def _of_hfs_rounding(judgements: _Judgements) -> Sequence[TapJudgement]:
    """Return the judgements if distances from the golden tell whether rows are wrong, and all were to be judged.

    Other experts and conventions move sound rows farther than rounding does, and a sample leaves rows out.
    """
    has_conventions = any(judged.errors is not None and judged.errors.convention for judged in judgements.judged)
    is_sampled = judgements.local.sampled.left_out > 0
    return () if has_conventions or is_sampled or judgements.propagation.other_choices else judgements.judged


def _own_logits_decide(judged: Sequence[TapJudgement], logits: str, *, has_other_choices: bool = False) -> bool:
    """Whether tokens are compared with the logits of the engine: it follows a convention, or routes to other experts.

    This requires that no operation is wrong, and that the logits were judged separately.
    """
    is_sound = not any(judgement.is_wrong for judgement in judged)
    by_itself = {
        judgement.operation.tap for judgement in judged if judgement.errors and not judgement.operation.is_kept
    }
    has_conventions = any(judgement.errors is not None and judgement.errors.convention for judgement in judged)
    return is_sound and logits in by_itself and (has_conventions or has_other_choices)


def _ties(logits: LogitResult | None, noise: torch.Tensor | None) -> tuple[str, ...]:
    """Return the trigger `near_tie` if the two best logits were ever closer than twice the error of HF."""
    if logits is None or noise is None or not len(noise):
        return ()
    return ("near_tie",) if logits.margin_min <= 2 * float(noise.max()) else ()


def _with_what_was_judged(coverage: Coverage, sides: _Sides, judgements: _Judgements, hf: HFModel | None) -> Coverage:
    """Add the taps and rows that were not judged, and the judged share of the compute of the model."""
    judged = [judgement for judgement in judgements.judged if judgement.is_in_graph and len(judgement.rows)]
    only_through, not_judged = unjudged(sides.graph, {judgement.operation.tap for judgement in judged})
    by_golden = {judgement.operation.tap for judgement in _of_hfs_rounding(judgements)}
    left = {} if coverage.rows_left_out else _rows_not_judged(judged, by_golden)
    coverage = replace(
        coverage,
        only_through=only_through,
        not_judged=not_judged,
        rows_not_judged=sum(left.values()),
        taps_partly_judged=tuple(left),
    )
    if hf is None or not judged:
        return coverage
    longest = max(len(request.token_ids) for request in sides.actual.manifest.requests)
    share_of = partial(judged_compute, hf, num_tokens=max(1, longest // 2))
    whole = {judgement.operation.tap: 1.0 for judgement in judged}
    of_rows = whole if coverage.rows_left_out else _shares_of_rows(sides.actual, judged, by_golden)
    return replace(coverage, judged_compute=share_of(whole), judged_compute_of_rows=share_of(of_rows))


def _rows_not_judged(judged: Sequence[TapJudgement], by_golden: Collection[str]) -> dict[str, int]:
    """Return the number of rows, by tap, that neither replay nor the golden can judge."""
    return {
        judgement.operation.tap: int(judgement.only_propagated.sum())
        for judgement in judged
        if judgement.operation.tap not in by_golden and bool(judgement.only_propagated.any())
    }


def _shares_of_rows(
    actual: Recording, judged: Sequence[TapJudgement], by_golden: Collection[str]
) -> Mapping[str, float]:
    """Return the share of the engine's rows in which each tap was judged; of the head, the share of its rows."""
    steps = [all_rows(step) for step in actual.steps if not is_readback(step)]
    num_rows = len(Rows.concat(steps).keys.unique())
    shares = dict[str, float]()
    for judgement in judged:
        tap, shown = judgement.operation.tap, judgement.rows.keys
        if judgement.propagated is not None:
            shown = torch.cat([shown, judgement.propagated.rows.keys])
        num_shown = len(shown.unique())
        num_judged = num_shown if tap in by_golden else len(judgement.rows.keys.unique())
        shares[tap] = num_judged / max(1, num_shown if judgement.operation.sampled_only else num_rows)
    return shares


def _outcome(
    judged: Sequence[TapJudgement], coverage: Coverage, num_tokens: int, findings: Sequence[Finding], least: float
) -> Outcome:
    if findings:
        return Outcome.MISMATCH
    compared = any(len(judgement.rows) for judgement in judged if judgement.is_in_graph)
    is_enough = coverage.judged_compute is None or coverage.judged_compute >= least
    return Outcome.PASS if num_tokens or (compared and is_enough) else Outcome.NOTHING
