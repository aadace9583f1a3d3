"""Sentences that all forms for people share: headline, culprit, findings, and facts below the table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import PurePath

from harness.errors import Code, printable, some_of
from harness.report.check.table import count, merge_taps, number, sum_coverage, sum_seconds, sum_tokens
from harness.results.check import (
    AsServed,
    CheckResult,
    Coverage,
    DetectionPower,
    Divergence,
    Explanation,
    Extent,
    Finding,
    KnownMistake,
    LogitResult,
    Outcome,
    Provenance,
    Reference,
    RunResult,
    SeenTensors,
    ServedStatus,
    TokenResult,
    VerifiedStep,
)
from harness.results.merging import largest, smallest

MAX_FINDINGS = 12
MAX_FINDINGS_OF_A_CODE = 3
MAX_NAMES = 8
MAX_EXAMPLES = 2
NOT_ASKED = (
    "whether requests are right that are aborted, that have the id or the memory of an ended one, or whose tokens are "
    "not chosen greedily; with more threads or on another machine; with values larger than those of these rows"
)
"""What no schedule of a check does on purpose."""


def model_name(model: str) -> str:
    """Return a model's hub id, which says who made it; of a folder on this machine the name."""
    return PurePath(model).name if model.startswith(("/", ".")) else model


def subject(result: CheckResult) -> list[str]:
    """Return what was checked: engine, model, dtype, device."""
    return [printable(part) for part in (result.engine, model_name(result.model), result.dtype, result.device)]


def extent(result: CheckResult) -> list[str]:
    """Return the extent of the check: requests, rows, taps, schedules."""
    num_taps = len({tap.name for run in result.runs for tap in run.taps if tap.num_rows})
    num_rows = sum(run.num_rows for run in result.runs)
    schedules = printable(", ".join(run.schedule for run in result.runs)) or "no schedule"
    return [count(result.num_requests, "request"), count(num_rows, "row"), count(num_taps, "tap"), schedules]


def divergence_place(divergence: Divergence) -> str:
    """Return where the first divergence is, beyond its tap."""
    parts = [f"request {divergence.request}", f"position {divergence.position}"]
    if divergence.step is not None:
        parts.append(f"step {divergence.step}")
    if divergence.phase:
        parts.append(printable(divergence.phase))
    if divergence.schedule:
        parts.append(f"schedule {printable(divergence.schedule)}")
    return ", ".join(parts)


def divergence_size(divergence: Divergence) -> str:
    """Return how far off the first divergence is."""
    parts = []
    if divergence.local_roundings is not None:
        bound = f" against a bound of {number(divergence.bound_roundings)}" if divergence.bound_roundings else ""
        parts.append(f"{number(divergence.local_roundings)} roundings{bound}")
    if divergence.propagated_ratio is not None:
        begins = ", which begins here or in an operation before it" if divergence.local_roundings is None else ""
        parts.append(f"propagated error {number(divergence.propagated_ratio)} times HF's own{begins}")
    return "; ".join(parts) or f"verdict {divergence.verdict}"


def divergence_lines(divergence: Divergence) -> Iterator[tuple[str, str]]:
    """Yield the facts of a divergence with their labels: the tap first, the cause last."""
    yield "First divergence:", printable(divergence.tap)
    yield "", divergence_place(divergence)
    yield "", f"{divergence_size(divergence)} ({divergence.code})"
    source = source_sentence(divergence)
    if source is not None:
        yield "", f"in the engine: {source}"
    if divergence.explanation:
        cause, *rest = explanation_lines(divergence.explanation)
        yield f"{explanation_label(divergence.explanation)}:".rjust(17), cause
        yield from (("", line) for line in rest)


def source_sentence(divergence: Divergence) -> str | None:
    """Return the engine's tensor and its line of code; None if an adapter names the tensors."""
    source = divergence.source
    if source is None:
        return None
    return printable(source.tensor + (f" at {source.code}" if source.code else ""))


def explanation_label(explanation: Explanation) -> str:
    """Return the word before an explanation: only a cause that is asserted is called one."""
    return "Cause" if explanation.is_cause else "Seen"


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the mistake, its rows, how well it fits, and whose content a wrong place of the cache holds."""
    yield printable(explanation.cause)
    fit = printable(explanation.scope)
    if explanation.residual_after is not None:
        change = f"{number(explanation.residual_before)} to {number(explanation.residual_after)} roundings"
        fit += f"; it takes the median error from {change}"
        fitted = f", {count(explanation.num_fitted, 'number')} fitted to them" if explanation.num_fitted else ""
        fit += f" ({explanation.num_explained:,} of {count(explanation.num_rows, 'row')}{fitted})"
    yield fit
    if explanation.tap is not None:
        yield printable(f"it is a mistake of {explanation.tap}, which was not recorded")
    if explanation.detail:
        yield printable(explanation.detail)
    if explanation.provenance:
        yield _provenance(explanation.provenance)


def _provenance(provenance: Provenance) -> str:
    head = "" if provenance.head is None else f", KV head {provenance.head}"
    place = f"layer {provenance.layer}{head}: position {provenance.position} of request {provenance.request}"
    if provenance.slot is not None:
        place += f" (block {provenance.block}, slot {provenance.slot}"
        if provenance.writer_request is None:
            place += ", which no recorded step wrote)"
        else:
            place += f", written last by request {provenance.writer_request} in step {provenance.writer_step})"
    return printable(f"{place} holds {provenance.holds}")


def finding_lines(result: CheckResult) -> tuple[list[tuple[str, str]], str | None]:
    """Return (code, sentence) of the findings worth reading first, and a line for the rest of them.

    A finding that several schedules share appears once; of one code only the first few appear.
    """
    schedules: dict[Finding, list[str]] = {}
    for run in result.runs:
        for finding in run.findings:
            schedules.setdefault(replace(finding, explanation=_cause_only(finding.explanation)), []).append(
                run.schedule
            )
    shown, left, seen = list[tuple[str, str]](), Counter[str](), Counter[str]()
    for finding, names in schedules.items():
        seen[finding.code] += 1
        if seen[finding.code] > MAX_FINDINGS_OF_A_CODE or len(shown) == MAX_FINDINGS:
            left[finding.code] += 1
            continue
        only = "" if len(names) == len(result.runs) else f" [{', '.join(names)}]"
        shown.append((finding.code.value, printable(finding_sentence(finding) + only)))
    rest = ", ".join(f"{number_left:,} more {code}" for code, number_left in left.items())
    return shown, f"and {rest}" if left else None


def _cause_only(explanation: Explanation | None) -> Explanation | None:
    """Leave out what differs between schedules that share a cause."""
    if explanation is None:
        return None
    nothing = {"scope": "", "detail": "", "provenance": None, "num_rows": 0, "num_explained": 0}
    return replace(explanation, residual_before=None, residual_after=None, **nothing)  # type: ignore[arg-type]


def finding_sentence(finding: Finding) -> str:
    """Return a finding in words, with its place and its cause."""
    tap = f"{finding.tap}: " if finding.tap and finding.tap not in finding.message else ""
    place = ", ".join(
        f"{name} {value}"
        for name, value in (("request", finding.request), ("position", finding.position))
        if value is not None and f"{name} {value}" not in finding.message
    )
    cause = f": {finding.explanation.cause}" if finding.explanation and finding.explanation.is_cause else ""
    return f"{tap}{finding.message}{f' ({place})' if place else ''}{cause}"


def facts(result: CheckResult) -> Iterator[tuple[str, str]]:
    """Yield (label, sentence) of everything that is not about one operation; timings last."""
    runs, served = result.runs, result.as_served
    if any(run.tokens.compared for run in runs):
        yield "tokens", _tokens(sum_tokens(runs))
    verified = [step for run in runs for step in run.acceptance]
    if verified:
        yield "acceptance", _acceptance(verified)
    logits = [run.logits for run in runs if run.logits]
    if logits:
        yield "logits", _logits(logits, sum(run.num_rows for run in runs))
    plain = [run.schedule for run in runs if run.propagated_from is Reference.HF]
    if plain:
        under = f" under {printable(', '.join(plain))}" if len(plain) < len(runs) else ""
        yield "propagated", f"from HF in {result.dtype}{under}, in estimated roundings; no verdict needed the truth"
    if served is not None and served.status is not ServedStatus.NOT_DETERMINISTIC:
        others = [run.schedule for run in runs if run.schedule != served.schedule]
        unserved = f"; not run as served: {printable(', '.join(others))}" if others and served.num_rows else ""
        yield "as served", _as_served(served) + unserved
    coverage = sum_coverage(runs)
    yield "coverage", _coverage(coverage)
    reached = [*coverage.triggers, *_extent(coverage.extent)]
    if reached:
        yield "reached", printable(", ".join(reached))
    if coverage.not_reached and result.outcome is Outcome.PASS:
        yield "not reached", printable(", ".join(coverage.not_reached))
    if (sentence := _control(result)) is not None:
        yield "control", sentence
    if result.power is not None:
        yield "power", power_sentence(result.power)
    ways = {tap.name: tap.through for run in runs for tap in run.taps if tap.through}
    if ways:
        longest = max(map(len, ways.values()))
        yield "granularity", f"{count(len(ways), 'tap')} judged through up to {longest} that were not recorded"
    if coverage.not_offered:
        yield "not offered", _not_offered(coverage, result.seen)
    if result.outcome is Outcome.PASS:
        yield "not judged", _not_judged(coverage)
        yield "not asked", NOT_ASKED
    for note in result.notes:
        yield "note", printable(note)
    timings = _timings(result.golden_s, runs)
    if timings:
        yield "timings", timings


def power_sentence(power: DetectionPower) -> str:
    """Return how many known mistakes a pass would have shown, and what the others need."""
    total = f"{power.num_seen:,} of {count(len(power.mistakes), 'known mistake')}"
    seen = f"{total} in {count(len(power.tried), 'operation')} would have been seen"
    parts = [seen if power.tried else "no known mistake was tried"]
    if power.not_tried:
        parts.append(f"there was no time for {count(len(power.not_tried), 'operation')} ({_names(power.not_tried)})")
    if power.in_part:
        parts.append(f"not all mistakes tried in {len(power.in_part):,} of the {len(power.tried):,}, for want of time")
    if power.not_covered:
        parts.append(f"none tried in {_names(power.not_covered)}")
    if power.failures:
        parts.append(f"{count(len(power.failures), 'explanation')} could not be tried")
    if power.smallest_change:
        change = number(100 * power.smallest_change)
        parts.append(f"a change by {change} % of any row that was tried would have been seen")
    if power.bit_for_bit:
        parts.append(f"{_names(power.bit_for_bit)} would have shown any other bit")
    for needs, mistakes in _by_need(power):
        parts.append(f"{len(mistakes):,} need {needs} ({_examples(mistakes)})")
    return printable("; ".join(parts))


def _by_need(power: DetectionPower) -> list[tuple[str, list[KnownMistake]]]:
    unseen = sorted((mistake for mistake in power.mistakes if not mistake.is_seen), key=_need)
    return [(needs, list(mistakes)) for needs, mistakes in groupby(unseen, key=_need)]


def _need(mistake: KnownMistake) -> str:
    return mistake.needs or ""


def _examples(mistakes: Sequence[KnownMistake]) -> str:
    """Name a few mistakes, each with the operations that it was tried in."""
    taps: dict[str, list[str]] = {}
    for mistake in mistakes:
        taps.setdefault(mistake.mistake, []).append(mistake.tap)
    shown = [
        f"{mistake}, in {names[0] if len(names) == 1 else count(len(names), 'operation')}"
        for mistake, names in list(taps.items())[:MAX_EXAMPLES]
    ]
    return "; ".join(shown) + ("; ..." if len(taps) > MAX_EXAMPLES else "")


def seen_sentence(result: CheckResult) -> str | None:
    """Return how an engine's tensors were seen; None if an adapter names them and it is deterministic.

    This stands above all findings, so it says first that two runs of an engine differ.
    """
    seen, served = result.seen, result.as_served
    parts = list[str]()
    if served is not None and served.status is ServedStatus.NOT_DETERMINISTIC:
        parts.append(_as_served(served))
    if seen is None:
        return "; ".join(parts) or None
    parts.append(seen.attached)
    if seen.num_forwards is not None:
        least, most = seen.num_forwards
        parts.append(f"{count(least, 'forward') if least == most else f'{least} to {most} forwards'} in a step")
    parts.append(f"rows told by {seen.rows_by}")
    ways = ", ".join(f"{number_of_taps} by {way}" for way, number_of_taps in seen.num_taps.items())
    parts.append(f"{count(sum(seen.num_taps.values()), 'tap')} among {count(seen.num_tensors, 'tensor')}: {ways}")
    coverage = sum_coverage(result.runs)
    if coverage.rows_ambiguous:
        parts.append(f"{count(coverage.rows_ambiguous, 'row')} cannot be told from others, and are not judged")
    share = coverage.judged_compute_of_rows
    if share is not None:
        parts.append(f"judged rows are {number(100 * share)} % of the model's multiply-adds")
    return printable("; ".join(parts))


def _not_offered(coverage: Coverage, seen: SeenTensors | None) -> str:
    """Return the names of what an engine does not show, by the reason for it."""
    reasons: dict[str, list[str]] = {}
    for name in coverage.not_offered:
        reasons.setdefault(seen.lost.get(name, "") if seen else "", []).append(name)
    parts = [_names(names) + (f" ({printable(reason)})" if reason else "") for reason, names in reasons.items()]
    return "; ".join(parts)


def _control(result: CheckResult) -> str | None:
    """Return the error of HF itself on the engine's inputs, if measured."""
    taps = [tap for tap in merge_taps(result.runs) if tap.control_bound_share_max is not None and not tap.convention]
    if not taps:
        return None
    share = largest(tap.control_bound_share_max for tap in taps)
    bounded = sum(tap.is_bounded_by_control for tap in taps)
    text = f"HF itself in {printable(result.dtype)}, on the same inputs, takes {number(share)} of the bounds at most"
    return f"{text}; it makes the bounds of {count(bounded, 'tap')}" if bounded else text


def _tokens(tokens: TokenResult) -> str:
    differ = tokens.compared - tokens.equal - tokens.ties
    parts = [f"{tokens.equal:,} of {tokens.compared:,} equal"]
    parts += [f"{count(tokens.ties, 'tie')} (margin below the noise)"] if tokens.ties else []
    parts += [f"{differ:,} differ"] if differ else []
    return ", ".join(parts)


def _acceptance(steps: Sequence[VerifiedStep]) -> str:
    num_drafts, num_accepted = sum(step.num_drafts for step in steps), sum(step.num_accepted for step in steps)
    least, most = sum(step.truth_least for step in steps), sum(step.truth_most for step in steps)
    truth = f"{least:,}" if least == most else f"{least:,} to {most:,} (ties within rounding)"
    parts = [f"{num_accepted:,} of {count(num_drafts, 'draft')} in {count(len(steps), 'step')}, by HF's logits {truth}"]
    if wrong := [step for step in steps if step.differs]:
        first, truth_range = wrong[0], f"{wrong[0].truth_least} to {wrong[0].truth_most}"
        expected = truth_range if first.truth_least < first.truth_most else str(first.truth_most)
        where = f"request {first.request}, position {first.position}, step {first.step}"
        parts.append(f"another number in {count(len(wrong), 'step')}: {first.num_accepted} for {expected} at {where}")
    parts.append("by greedy choices; an engine's own rule of acceptance is not asked")
    return "; ".join(parts)


def _logits(logits: Sequence[LogitResult], num_all: int) -> str:
    num_rows = sum(part.num_rows for part in logits)
    agreement = sum(part.top1_agreement * part.num_rows for part in logits) / max(1, num_rows)
    kl, margin = largest(part.kl_max for part in logits), smallest(part.margin_min for part in logits)
    parts = [f"top-1 agrees in {number(100 * agreement)} % of {count(num_rows, 'row')}"]
    rest = f"; none in the other {count(num_all - num_rows, 'row')}" if num_all > num_rows else ""
    return ", ".join([*parts, f"KL up to {number(kl)} nats", f"smallest margin {number(margin)}"]) + rest


def _as_served(served: AsServed) -> str:
    """Return what the logits are with nothing attached to the engine."""
    rows, name = count(served.num_rows, "row"), printable(served.schedule)
    noise = f"{number(served.ratio_max)} times HF's own noise, {number(served.allowed_ratio)} allowed"
    match served.status:
        case ServedStatus.NOT_RUN:
            trust = "what was recorded is taken for what the engine serves"
            return printable(f"not run, because {served.reason}: {trust}")
        case ServedStatus.NOT_DETERMINISTIC:
            return f"{Code.RUNS_DIFFER}: not deterministic: two watched runs under {name} differ by up to {noise}"
        case ServedStatus.EQUAL:
            return f"{rows} of logits under {name} equal the watched ones, bit for bit"
        case ServedStatus.WITHIN_NOISE:
            return f"{rows} of logits under {name} differ from the watched ones by up to {noise}"
    return f"{served.num_different:,} of {rows} of logits under {name} differ from the watched ones"


def _coverage(coverage: Coverage) -> str:
    total = f"{coverage.recorded:,} of {coverage.expected:,} rows of taps recorded"
    missing = f", {coverage.missing:,} missing" if coverage.missing else ""
    names = f": {_names(coverage.missing_taps)}" if coverage.missing_taps else ""
    seen = coverage.rows_seen_before
    seen_before = f"; {seen:,} rows as in an earlier schedule, judged there" if seen else ""
    steps = count(coverage.steps_mislabelled, "step")
    label = f"; {steps} labelled decode, with tokens of a prompt" if coverage.steps_mislabelled else ""
    return f"{total}{missing}{names}{seen_before}{label}"


def _extent(extent: Extent) -> Iterator[str]:
    """Yield how many requests, positions and token ids were reached."""
    if extent.requests_at_once:
        of_all = f"{count(extent.requests or 0, 'request')} and {count(extent.steps or 0, 'step')} in a schedule"
        yield f"at most {count(extent.requests_at_once, 'request')} in a step, {of_all}"
        yield f"steps of {_sizes(extent.step_sizes)} tokens"
        yield f"prompts of at least {count(extent.shortest_prompt or 0, 'token')}"
    if extent.chunks:
        yield f"chunks of {_sizes(extent.chunks)} tokens, at most {extent.most_chunks or 0:,} of a prompt"
    if extent.longest_pause:
        yield f"pauses of at most {count(extent.longest_pause, 'step')}"
    if extent.most_hits:
        found_by = f"each by at most {count(extent.most_hits, 'request')}"
        yield f"beginnings of {_sizes(extent.hit_sizes)} tokens in the cache, {found_by}"
    if extent.taken_back:
        yield f"at most {count(extent.taken_back, 'token')} taken back at once"
    for number_of, whole, what in (
        (extent.positions, extent.all_positions, "position"),
        (extent.token_ids, extent.all_token_ids, "token id"),
    ):
        if number_of:
            yield count(number_of, what) if whole is None else f"{number_of:,} of {count(whole, what)}"


def _sizes(sizes: Sequence[int]) -> str:
    """Return some sizes, the largest among them."""
    largest = f" up to {max(sizes):,}" if len(sizes) > MAX_NAMES else ""
    return _names([f"{size:,}" for size in sorted(sizes)]) + largest


def _not_judged(coverage: Coverage) -> str:
    """Return what a pass does not cover."""
    parts = [_names(coverage.not_judged)] if coverage.not_judged else []
    if coverage.experts_not_chosen:
        experts = count(len(coverage.experts_not_chosen), "expert")
        parts.append(f"{experts} that no row chose: {_experts(coverage.experts_not_chosen)}")
    if coverage.only_through:
        parts.append(f"only through what is computed from them: {_names(coverage.only_through)}")
    if coverage.rows_ambiguous:
        parts.append(f"{count(coverage.rows_ambiguous, 'row')} that cannot be told from others of the same tokens")
    if coverage.rows_not_judged:
        rows = count(coverage.rows_not_judged, "row")
        parts.append(f"{rows} whose inputs were not recorded, of {_names(coverage.taps_partly_judged)}")
    if coverage.rows_left_out:
        parts.append(f"products and attention in {count(coverage.rows_left_out, 'row')} outside of the sample")
    if coverage.states_left_out:
        parts.append(f"states after some positions: {_names(coverage.states_left_out)}")
    if coverage.judged_compute_of_rows is not None and coverage.judged_compute_of_rows < 1:
        share = 1 - coverage.judged_compute_of_rows
        parts.append(f"{number(100 * share)} % of the model's multiply-adds, over all rows")
    return "; ".join(parts) or "nothing"


def _experts(names: Sequence[str]) -> str:
    """Return experts by router: `model.layers.0.mlp.gate [0, 3, 5]`."""
    routers = {router: list(group) for router, group in groupby(names, key=lambda name: name.rpartition("[")[0])}
    return _names(
        [
            f"{router} [{', '.join(name.rpartition('[')[2][:-1] for name in experts[:MAX_NAMES])}"
            + (f", ... {len(experts)} in all]" if len(experts) > MAX_NAMES else "]")
            for router, experts in routers.items()
        ]
    )


def _names(names: Sequence[str]) -> str:
    return printable(some_of(names, MAX_NAMES))


def _timings(golden_s: float | None, runs: Sequence[RunResult]) -> str:
    seconds = {
        "golden": golden_s,
        "engine": sum_seconds([run.engine_s for run in runs]),
        "compare": sum_seconds([run.compare_s for run in runs]),
    }
    return ", ".join(f"{name} {number(value)} s" for name, value in seconds.items() if value is not None)
