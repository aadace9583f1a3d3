"""A check of a server's sampler for people: verdict, a table of settings, findings, what could have been missed."""

from collections.abc import Iterator

from harness.errors import printable
from harness.extensions.server.report import curl, not_judged, server_headline
from harness.extensions.server.sampler.result import SamplerResult, SettingResult
from harness.report.check.table import count
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, table_lines, wrapped
from harness.results.check import Finding

_HEADERS = ("setting", "parameters", "draws", "outside", "off by", "verdict")
_ALIGN = ("left", "left", "right", "right", "left", "left")


def sampler_text(result: SamplerResult, *, width: int) -> str:
    """Return a check of a sampler as lines of at most `width` columns, but for the table."""
    width = max(width, MIN_WIDTH)
    head = [server_headline(result, count(result.num_draws, "draw")), *fact_lines([not_judged(result)], width)]
    return blocks_text([head, _table(result), _findings(result, width), fact_lines(_facts(result), width)])


def _table(result: SamplerResult) -> list[str]:
    rows = [_row(setting) for setting in result.settings]
    legend = [
        "outside    drawn tokens that the parameters exclude, and no rounding explains",
        "off by     largest distance of the draws' distribution to the exact one, and the bound",
    ]
    return table_lines(rows, _HEADERS, _ALIGN, legend=legend)


def _row(setting: SettingResult) -> tuple[str, ...]:
    shown = {name: value for name, value in setting.settings.items() if name != "logit_bias"}
    words = " ".join(f"{name}={value:g}" for name, value in shown.items())
    if "logit_bias" in setting.settings:
        words += " logit_bias"
    if not setting.num_draws:
        return setting.name, words, "0", "", "", "wrong" if setting.findings else "not judged"
    sign = "≤" if setting.shift <= setting.shift_bound else ">"
    verdict = "sound" if setting.follows == "as asked" else "wrong" if setting.is_claimed else "see note"
    figures = f"{setting.shift:.3f} {sign} {setting.shift_bound:.3f}"
    return setting.name, words, f"{setting.num_draws:,}", str(setting.num_outside), figures, verdict


def _findings(result: SamplerResult, width: int) -> Iterator[str]:
    wrong = [setting for setting in result.settings if setting.findings]
    for setting in wrong:
        yield from (line for finding in setting.findings[:3] for line in _finding(finding, width))
    yield from (line for finding in result.findings for line in _finding(finding, width))
    if wrong and wrong[0].body is not None:
        yield f"  one such request: {curl(f'{result.url}/v1/completions', wrong[0].body)}"


def _finding(finding: Finding, width: int) -> Iterator[str]:
    place = "" if finding.request is None else f"request {finding.request}: "
    yield from wrapped(f"  {finding.code}", printable(place + finding.message), width, indent=8)


def _facts(result: SamplerResult) -> Iterator[tuple[str, str]]:
    yield "order", " → ".join(result.order)
    if result.definitions:
        fitting = [definition.name for definition in result.definitions if definition.fits]
        yield "logprobs", " or ".join(fitting) or "of no distribution that is known"
    if result.seeds is not None:
        seeds = result.seeds
        differing = f"{seeds.num_alone} differ alone, {seeds.num_again} a second time"
        words = f"of {count(seeds.num_requests, 'request')} with the same seed {differing}"
        yield "seeds", f"{words}; rounding explains {seeds.num_excused}"
    share = 1 / result.false_alarm
    words = f"a sound server alarms in less than 1 of {share:,.0f} runs, over {result.num_tests:,} tests"
    yield "errors", words
    yield "finds", f"in 99 of 100 runs: {'; '.join(result.would_find) or 'nothing'}"
    if result.could_miss:
        yield "may miss", f"more --draws find them: {'; '.join(result.could_miss)}"
    if result.no_change:
        yield "no effect", f"they change nothing for this model: {'; '.join(result.no_change)}"
    yield from (("note", note) for note in result.notes)
    yield "timings", f"server {result.server_s:.1f} s, truth {result.truth_s:.1f} s"
