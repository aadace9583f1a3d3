"""A check of a server's sampler for people: verdict, a table of settings, findings, what could have been missed."""

from collections.abc import Iterator

from tabulate import tabulate

from harness.report.check.sentences import printable
from harness.report.check.table import count
from harness.report.endpoint.headline import headline, not_judged
from harness.report.endpoint.request import curl
from harness.report.endpoint.text import MIN_WIDTH
from harness.report.wrapped import wrapped
from harness.results.check import Finding
from harness.results.sampler import SamplerResult, SettingResult

_HEADERS = ("setting", "parameters", "draws", "outside", "off by", "verdict")
_ALIGN = ("left", "left", "right", "right", "left", "left")


def sampler_text(result: SamplerResult, *, width: int) -> str:
    """Return a check of a sampler as lines of at most `width` columns, but for the table."""
    width = max(width, MIN_WIDTH)
    blocks = [
        list(_headline(result, width)),
        _table(result),
        list(_findings(result, width)),
        list(_facts(result, width)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _headline(result: SamplerResult, width: int) -> Iterator[str]:
    draws = count(result.num_draws, "draw")
    yield headline(result.outcome, result.server, result.url, result.model, result.dtype, draws)
    yield from wrapped("  not judged", not_judged(result.not_judged), width)


def _table(result: SamplerResult) -> list[str]:
    rows = [_row(setting) for setting in result.settings]
    lines = tabulate(rows, _HEADERS, tablefmt="simple", disable_numparse=True, colalign=_ALIGN).splitlines()
    legend = [
        "outside    drawn tokens that the parameters exclude, and no rounding explains",
        "off by     largest distance of the draws' distribution to the exact one, and the bound",
    ]
    return [*(f"  {line}".rstrip() for line in lines), "", *(f"  {line}" for line in legend)]


def _row(setting: SettingResult) -> tuple[str, ...]:
    own = {name: value for name, value in setting.settings.items() if name != "logit_bias"}
    words = " ".join(f"{name}={value:g}" for name, value in own.items())
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


def _facts(result: SamplerResult, width: int) -> Iterator[str]:
    order = " → ".join(result.order)
    yield from wrapped("  order", order, width)
    if result.definitions:
        fitting = [each.name for each in result.definitions if each.fits]
        yield from wrapped("  logprobs", " or ".join(fitting) or "of no distribution that is known", width)
    if result.seeds is not None:
        seeds = result.seeds
        other = f"{seeds.num_alone} differ alone, {seeds.num_again} a second time"
        words = f"of {count(seeds.num_requests, 'request')} with the same seed {other}"
        yield from wrapped("  seeds", f"{words}; rounding explains {seeds.num_excused}", width)
    share = 1 / result.false_alarm
    words = f"a sound server alarms in less than 1 of {share:,.0f} runs, over {result.num_tests:,} tests"
    yield from wrapped("  errors", words, width)
    yield from wrapped("  finds", f"in 99 of 100 runs: {'; '.join(result.would_find) or 'nothing'}", width)
    if result.could_miss:
        yield from wrapped("  may miss", f"more --draws find them: {'; '.join(result.could_miss)}", width)
    if result.no_change:
        yield from wrapped("  untold", f"they change nothing for this model: {'; '.join(result.no_change)}", width)
    for note in result.notes:
        yield from wrapped("  note", printable(note), width)
    yield from wrapped("  timings", f"server {result.server_s:.1f} s, truth {result.truth_s:.1f} s", width)
