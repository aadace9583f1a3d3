"""An audit for people: what remains of the hypotheses, one row each, and what a claim is worth."""

from collections.abc import Iterator

from tabulate import tabulate

from harness.report.check.sentences import printable
from harness.report.check.table import count
from harness.report.endpoint.headline import headline
from harness.report.endpoint.text import MIN_WIDTH
from harness.report.wrapped import wrapped
from harness.results.audit import AuditResult, HypothesisResult

_HEADERS = ("hypothesis", "nats a token", "log probabilities", "excluded", "tokens needed")
_ALIGN = ("left", "right", "left", "left", "right")


def audit_text(result: AuditResult, *, width: int) -> str:
    """Return an audit as lines of at most `width` columns, but for the table."""
    width = max(width, MIN_WIDTH)
    blocks = [list(_headline(result, width)), _table(result), list(_facts(result, width))]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _headline(result: AuditResult, width: int) -> Iterator[str]:
    drawn = count(result.num_tokens, "token")
    yield headline(result.outcome, result.server, result.url, result.model, result.dtype, drawn)
    yield from wrapped("  served", printable(_claim(result)), width)


def _claim(result: AuditResult) -> str:
    if result.claim is not None:
        return f"{result.claim}; every other hypothesis is excluded"
    remaining = [each for each in result.hypotheses if not each.is_excluded]
    if not remaining:
        return "none of the hypotheses: all are excluded"
    if len(remaining) == 1:
        words = "every other hypothesis is excluded, but its log probabilities are off by more than rounding"
        return f"no claim: nearest is {remaining[0].name}; {words}"
    return f"no claim: {', '.join(result.remaining)} cannot be told with so many tokens"


def _table(result: AuditResult) -> list[str]:
    best = next((each for each in result.hypotheses if not each.is_excluded), result.hypotheses[0])
    rows = [_row(each, best) for each in result.hypotheses]
    lines = tabulate(rows, _HEADERS, tablefmt="simple", disable_numparse=True, colalign=_ALIGN).splitlines()
    legend = [
        "log probabilities  error over the error of HF's own rounding in the server's dtype",
        f"tokens needed      to exclude the hypothesis in 99 of 100 audits where {printable(best.name)} is served",
    ]
    return [*(f"  {line}".rstrip() for line in lines), "", *(f"  {line}" for line in legend)]


def _row(each: HypothesisResult, best: HypothesisResult) -> tuple[str, ...]:
    reading = min(each.readings, key=lambda own: own.rms_ratio, default=None)
    error = "" if reading is None else f"{reading.rms_ratio:,.2f} {'fits' if each.fits else 'does not fit'}"
    by = [] if each.excluded_after is None else [f"by {each.excluded_after:,} tokens"]
    by += ["by log probabilities"] if each.is_excluded_by_logprobs else []
    needed = best.needed.get(each.name)
    number = "" if each is best else "no number" if needed is None else f"{needed:,}"
    return printable(each.name), f"{each.log_likelihood:.3f}", error, ", ".join(by), number


def _facts(result: AuditResult, width: int) -> Iterator[str]:
    words = f"in less than 1 of {1 / result.false_claim:,.0f} audits, if what is served is among the hypotheses"
    yield from wrapped("  errors", f"a claim is wrong {words}", width)
    if not result.num_logprobs:
        yield from wrapped("  note", "the server gives no log probabilities, which tell with fewer tokens", width)
    for note in result.notes:
        yield from wrapped("  note", printable(note), width)
    yield from wrapped("  timings", f"server {result.server_s:.1f} s, hypotheses {result.truth_s:.1f} s", width)
