"""An audit for people: the claim, a table of hypotheses, and the rate of wrong claims."""

from collections.abc import Iterator

from harness.errors import printable
from harness.extensions.server.audit.result import AuditResult, HypothesisResult
from harness.extensions.server.report import server_headline
from harness.report.check.table import count
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, table_lines

_HEADERS = ("hypothesis", "nats a token", "log probabilities", "excluded", "tokens needed")
_ALIGN = ("left", "right", "left", "left", "right")


def audit_text(result: AuditResult, *, width: int) -> str:
    """Return an audit as lines of at most `width` columns, but for the table."""
    width = max(width, MIN_WIDTH)
    head = [server_headline(result, count(result.num_tokens, "token"))]
    head += fact_lines([("served", _claim(result))], width)
    return blocks_text([head, _table(result), fact_lines(_facts(result), width)])


def _claim(result: AuditResult) -> str:
    if result.claim is not None:
        return f"{result.claim}; every other hypothesis is excluded"
    remaining = [hypothesis for hypothesis in result.hypotheses if not hypothesis.is_excluded]
    if not remaining:
        return "none of the hypotheses: all are excluded"
    if len(remaining) == 1:
        words = "every other hypothesis is excluded, but its log probabilities are off by more than rounding"
        return f"no claim: nearest is {remaining[0].name}; {words}"
    return f"no claim: {', '.join(result.remaining)} cannot be told apart with so many tokens"


def _table(result: AuditResult) -> list[str]:
    best = next((hypothesis for hypothesis in result.hypotheses if not hypothesis.is_excluded), result.hypotheses[0])
    rows = [_row(hypothesis, best) for hypothesis in result.hypotheses]
    legend = [
        "log probabilities  error over the error of HF's own rounding in the server's dtype",
        f"tokens needed      to exclude the hypothesis in 99 of 100 audits where {printable(best.name)} is served",
    ]
    return table_lines(rows, _HEADERS, _ALIGN, legend=legend)


def _row(hypothesis: HypothesisResult, best: HypothesisResult) -> tuple[str, ...]:
    reading = min(hypothesis.readings, key=lambda reading: reading.rms_ratio, default=None)
    error = "" if reading is None else f"{reading.rms_ratio:,.2f} {'fits' if hypothesis.fits else 'does not fit'}"
    by = [] if hypothesis.excluded_after is None else [f"by {hypothesis.excluded_after:,} tokens"]
    by += ["by log probabilities"] if hypothesis.is_excluded_by_logprobs else []
    needed = best.needed.get(hypothesis.name)
    number = "" if hypothesis is best else "no number" if needed is None else f"{needed:,}"
    return printable(hypothesis.name), f"{hypothesis.log_likelihood:.3f}", error, ", ".join(by), number


def _facts(result: AuditResult) -> Iterator[tuple[str, str]]:
    words = f"in less than 1 of {1 / result.false_claim:,.0f} audits, if what is served is among the hypotheses"
    yield "errors", f"a claim is wrong {words}"
    if not result.num_logprobs:
        yield "note", "the server gives no log probabilities, which tell with fewer tokens"
    yield from (("note", note) for note in result.notes)
    yield "timings", f"server {result.server_s:.1f} s, hypotheses {result.truth_s:.1f} s"
