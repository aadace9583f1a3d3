"""A check of a server for people at a terminal: verdict, what it can do, a table of schedules, findings."""

from collections import Counter
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from harness.report.check.sentences import MAX_FINDINGS, MAX_FINDINGS_OF_A_CODE, number, printable
from harness.report.check.table import count
from harness.report.endpoint.headline import headline
from harness.report.wrapped import wrapped
from harness.results.check import Finding, Outcome
from harness.results.endpoint import EndpointResult, LogprobResult, ScheduleResult

MIN_WIDTH = 80
_HEADERS = ("schedule", "requests", "tokens", "ties", "logprobs", "rms", "max", "verdict")
_ALIGN = ("left", "right", "right", "right", "left", "left", "left", "left")


def endpoint_text(result: EndpointResult, *, width: int) -> str:
    """Return a check of a server as lines of at most `width` columns, but for the table (about 95)."""
    width = max(width, MIN_WIDTH)
    blocks = [[_headline(result)], _table(result), list(findings(result.runs, width)), list(_facts(result, width))]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _headline(result: EndpointResult) -> str:
    prompts = count(result.num_requests, "prompt")
    return headline(result.outcome, result.server, result.url, result.model, result.dtype, prompts)


def _table(result: EndpointResult) -> list[str]:
    rows = [row for run in result.runs for row in _rows(run)]
    lines = tabulate(rows, _HEADERS, tablefmt="simple", disable_numparse=True, colalign=_ALIGN).splitlines()
    legend = [
        "rms, max   error of the log probabilities, as multiples of HF's own in this dtype, and the bound",
        "ties       tokens that are not HF's, where HF's own margin is below its noise",
    ]
    return [*(f"  {line}".rstrip() for line in lines), "", *(f"  {line}" for line in legend)]


def _rows(run: ScheduleResult) -> Iterator[tuple[str, ...]]:
    answered = run.num_requests - run.num_failed
    requests = str(answered) if not run.num_failed else f"{answered} of {run.num_requests}"
    tokens = f"{run.tokens.equal + run.tokens.ties:,} of {run.tokens.compared:,}"
    head = (run.schedule, requests, tokens, f"{run.tokens.ties:,}")
    verdict = {Outcome.PASS: "sound", Outcome.MISMATCH: "wrong", Outcome.NOTHING: "not judged"}[run.outcome]
    if not run.logprobs:
        yield (*head, "-", "", "", verdict)
    for at, logprobs in enumerate(run.logprobs):
        yield (*(head if at == 0 else ("",) * 4), *_figures(logprobs), verdict if at == 0 else "")


def _figures(logprobs: LogprobResult) -> tuple[str, ...]:
    label = f"{logprobs.kind}, {logprobs.num_values:,}"
    rms, max = (logprobs.rms_ratio, logprobs.rms_bound), (logprobs.max_ratio, logprobs.max_bound)
    return (
        label,
        *(f"{number(ratio)} {'≤' if ratio <= bound else '>'} {number(bound)}" for ratio, bound in (rms, max)),
    )


def findings(runs: Sequence[ScheduleResult], width: int) -> Iterator[str]:
    """Yield the findings worth reading first, each once for all schedules that share it."""
    schedules: dict[Finding, list[str]] = {}
    for run in runs:
        for finding in run.findings:
            schedules.setdefault(finding, []).append(run.schedule)
    seen, left = Counter[str](), 0
    for finding, names in schedules.items():
        seen[finding.code] += 1
        if seen[finding.code] > MAX_FINDINGS_OF_A_CODE or seen.total() - left > MAX_FINDINGS:
            left += 1
            continue
        yield from wrapped(f"  {finding.code}", _sentence(finding, names), width, indent=8)
    if left:
        yield f"        and {left:,} more"


def _sentence(finding: Finding, schedules: Sequence[str]) -> str:
    place = [f"request {finding.request}"] if finding.request is not None else []
    place += [f"position {finding.position}"] if finding.position is not None else []
    return printable(f"{', '.join([*schedules, *place])}: {finding.message}")


def _facts(result: EndpointResult, width: int) -> Iterator[str]:
    able = [each for each in result.capabilities if each.is_there]
    ignored = [each for each in result.capabilities if each.is_ignored]
    lacking = [each for each in result.capabilities if not each.is_there and not each.is_ignored]
    yield from wrapped("  found", ", ".join(_named(each.name, each.detail) for each in able), width)
    if ignored:
        yield from wrapped("  ignored", ", ".join(_named(each.name, each.detail) for each in ignored), width)
    if lacking:
        yield from wrapped("  not found", "; ".join(_named(each.name, each.detail[:80]) for each in lacking), width)
    differences = [
        f"{run.schedule} {number(run.max_difference)}" for run in result.runs if run.max_difference is not None
    ]
    if differences:
        yield from wrapped("  nats apart", f"from the first schedule, at most: {', '.join(differences)}", width)
    num_parted = sum(run.num_parted for run in result.runs)
    if num_parted:
        what = f"{count(num_parted, 'answer')} left the first schedule's at a tie; what comes after was not judged"
        yield from wrapped("  parted", what, width)
    for note in result.notes:
        yield from wrapped("  note", printable(note), width)
    seconds = ", ".join(f"{run.schedule} {number(run.seconds)} s" for run in result.runs)
    timings = f"server {number(result.server_s)} s ({seconds}), truth {number(result.truth_s)} s"
    yield from wrapped("  timings", f"{timings}, all {number(result.all_s)} s", width)


def _named(name: str, detail: str) -> str:
    return printable(f"{name} ({detail})" if detail else name)
