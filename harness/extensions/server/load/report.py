"""A load test of a server for people."""

from collections.abc import Iterator

from harness.extensions.server.load.result import LoadResult
from harness.extensions.server.report import findings, server_headline
from harness.report.check.table import count
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, table_lines

_NAMES = {
    "ttft": "request to first token",
    "tpot": "each later token of an answer",
    "itl": "between two parts of an answer",
    "e2e": "request to end",
}


def load_text(result: LoadResult, *, width: int) -> str:
    """Return a load test as lines of at most `width` columns, but for the table."""
    width = max(width, MIN_WIDTH)
    head = server_headline(result, f"{count(result.num_requests, 'request')}, {result.arrivals}")
    wrong = findings([result.answers], width)
    return blocks_text([[head], _table(result), wrong, fact_lines(_facts(result), width)])


def _table(result: LoadResult) -> list[str]:
    rows = [
        (
            name,
            *(f"{value:,.1f}" for value in (times.mean, times.p50, times.p90, times.p99, times.max)),
            _limit(result, name),
        )
        for name, times in result.times_ms.items()
    ]
    headers = ("ms", "mean", "p50", "p90", "p99", "max", "limit")
    legend = [f"{name:<9}  {_NAMES[name]}" for name in result.times_ms]
    return table_lines(rows, headers, ("left", *["right"] * 6), legend=legend)


def _limit(result: LoadResult, name: str) -> str:
    return f"{result.limits_ms[name]:,g}" if name in result.limits_ms else "-"


def _facts(result: LoadResult) -> Iterator[tuple[str, str]]:
    answered = f"{result.num_answered:,} of {count(result.num_requests, 'request')} in {result.seconds:.2f} s"
    turned_away = f"; {result.num_turned_away:,} turned away (429 or 503)" if result.num_turned_away else ""
    yield "answered", answered + turned_away
    rates = (
        f"{result.requests_per_s:.2f} requests/s, {result.new_tokens_per_s:,.1f} new tokens/s; prompts of "
        f"{count(result.num_prompt_tokens, 'token')}"
    )
    yield "rate", rates
    limits = " and ".join(f"{name} <= {limit:g} ms" for name, limit in result.limits_ms.items()) or "no limit given"
    good = f"{result.goodput_per_s:.2f} requests/s, {100 * result.good_share:.1f} % of all: not wrong, {limits}"
    yield "goodput", good
    tokens = result.answers.tokens
    told = f"{count(result.num_judged, 'answer')}, {tokens.equal + tokens.ties:,} of {tokens.compared:,} tokens right"
    yield "judged", f"{told} ({tokens.ties:,} ties), {result.truth_s:.1f} s"
    late = f"p50 {result.late_ms.p50:.1f} ms, p99 {result.late_ms.p99:.1f} ms, at most {result.late_ms.max:.1f} ms"
    yield "client late", late
    yield from (("note", note) for note in result.notes)
