"""The verdict on the draws: each test gets its share of the false alarms that a sound server may raise."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.errors import Code, some_of
from harness.extensions.server.sampler.evidence import JudgedDraw, Power, SamplerEvidence
from harness.results.check import Finding

FALSE_ALARM = 1e-3
"""Share of runs in which a sound server may alarm, at most, over all tests of a run."""
_NUM_OTHERS = 9
"""Tests beside those of the settings: all draws together; the first of each request, in two orders of the tokens; those
of one request, and of neighbouring ones, in the same two orders; the same seed alone, and again."""
_TESTS_OF_A_SETTING = 3
"""Beside the alternatives: three orders of the tokens."""
_AS_LIKELY = math.log(20)
"""An alternative whose likelihood is within this of the best one's fits as well."""
_NOISE = 2.0
"""A server's distribution may be off by this many times what HF's own is off in the server's dtype."""
_SURE = 0.99
_ORDERS = 2
"""Of the tokens, in which sums of probabilities may be inverted."""
_SHARED = 0.9
"""Share of neighbouring draws that the alternative gives one random number: rounding may part some."""
_AS_ASKED = "as asked"
_MOST_PLACES = 3
"""Settings that are named of those in which a mistake alone may be missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The thresholds of all tests of a run, by how many there are (Bonferroni)."""

    num_tests: int
    false_alarm: float = FALSE_ALARM
    """Of all tests together."""

    @classmethod
    def of(cls, evidence: Mapping[str, SamplerEvidence]) -> "Levels":
        """Count the tests of a run."""
        num_of_settings = sum(_TESTS_OF_A_SETTING + len(setting.names) for setting in evidence.values())
        num_names = len({name for setting in evidence.values() for name in setting.names})
        return cls(num_tests=num_of_settings + num_names + _NUM_OTHERS)

    @property
    def log_ratio(self) -> float:
        """The log likelihood ratio that a sound sampler does not reach."""
        return math.log(self.num_tests / self.false_alarm)

    def shift(self, num: int, noise: float) -> float:
        """Return the distance of distribution functions that a sound sampler does not reach (Massart 1990).

        The `num` numbers are independent and uniform for a sound sampler; `noise` is the mean total variation that
        rounding makes.
        """
        return math.sqrt(math.log(2 * self.num_tests / self.false_alarm) / (2 * max(1, num))) + _NOISE * noise

    @property
    def chance(self) -> float:
        """The probability that one test's event must not exceed."""
        return self.false_alarm / self.num_tests


def kolmogorov_distance(numbers: Sequence[float]) -> float:
    """Return Kolmogorov's distance of numbers to the uniform distribution."""
    num = len(numbers)
    pairs = enumerate(sorted(numbers))
    return max((max((at + 1) / num - number, number - at / num) for at, number in pairs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingJudgement:
    """The verdict on the draws of one setting."""

    num_outside: int = 0
    shift: float = 0.0
    shift_bound: float = 0.0
    follows: str | None = None
    findings: tuple[Finding, ...] = ()


def total_log_ratios(evidence: Mapping[str, SamplerEvidence]) -> dict[str, float]:
    """Return the log likelihood ratios of the alternatives, over all settings that they change."""
    totals = dict[str, float]()
    for setting in evidence.values():
        for at, name in enumerate(setting.names, 1):
            totals[name] = totals.get(name, 0.0) + sum(draw.ratios[at] for draw in setting.draws)
    return totals


def judge_setting(
    name: str, evidence: SamplerEvidence, levels: Levels, over_all: Mapping[str, float]
) -> SettingJudgement:
    """Judge the draws of one setting, of which there is one at least.

    The ratios `over_all` settings choose between alternatives that fit this one.
    """
    draws = evidence.draws
    noise = sum(draw.noise for draw in draws) / len(draws)
    bound = levels.shift(len(draws), noise)
    shifts = (*_shifts(draws, 0), kolmogorov_distance([draw.by_id for draw in draws]))
    outside = [draw for draw in draws if draw.is_outside]
    totals = [sum(draw.ratios[at] for draw in draws) for at in range(1 + len(evidence.names))]
    is_off = bool(outside) or max(shifts) > bound or max(totals) > levels.log_ratio
    follows = _follows(evidence, totals, bound, over_all, levels.log_ratio) if is_off else _AS_ASKED
    return SettingJudgement(
        num_outside=len(outside),
        shift=max(shifts),
        shift_bound=bound,
        follows=follows,
        findings=tuple(_findings(name, draws, outside, follows, max(shifts), bound, max(totals))) if is_off else (),
    )


def _shifts(draws: Sequence[JudgedDraw], at: int) -> tuple[float, float]:
    return kolmogorov_distance([draw.by_rank[at] for draw in draws]), kolmogorov_distance(
        [draw.by_past[at] for draw in draws]
    )


def _follows(
    evidence: SamplerEvidence, totals: Sequence[float], bound: float, over_all: Mapping[str, float], least: float
) -> str | None:
    """Name the alternatives that fit best; None if none fits, or if the draws are no evidence for any of them."""
    best = max(totals[1:], default=0.0)
    if best < least:
        return None
    names = [
        name
        for at, name in enumerate(evidence.names, 1)
        if totals[at] > best - _AS_LIKELY and max(_shifts(evidence.draws, at)) <= bound
    ]
    best = max((over_all[name] for name in names), default=0.0)
    return " or ".join(name for name in names if over_all[name] > best - _AS_LIKELY) or None


def _findings(
    name: str,
    draws: Sequence[JudgedDraw],
    outside: Sequence[JudgedDraw],
    follows: str | None,
    distance: float,
    bound: float,
    log_ratio: float,
) -> Iterator[Finding]:
    what = f"the draws are not those of the parameters: {follows or 'no known chain of steps fits'}"
    reasons = [f"{len(outside)} of {len(draws)} tokens are outside of the set that may be drawn"] if outside else []
    if distance > bound:
        reasons.append(f"distribution off by {distance:.2f}, at most {bound:.2f}")
    if follows is not None:
        reasons.append(f"e^{log_ratio:.0f} times as likely over {len(draws)} draws")
    first = outside[0] if outside else None
    yield Finding(
        code=Code.SAMPLER_DIFFERS,
        message=f"{name}: {what} ({'; '.join(reasons)})",
        request=None if first is None else first.request,
    )
    if first is not None:
        message = f"{name}: new token {first.step} is {first.token_id}, which may not be drawn there"
        yield Finding(code=Code.SAMPLER_DIFFERS, message=message, request=first.request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """The alternatives over all settings."""

    would_find: tuple[str, ...]
    could_miss: tuple[str, ...]
    no_change: tuple[str, ...]
    findings: tuple[Finding, ...]


def judge_pooled(evidence: Mapping[str, SamplerEvidence], levels: Levels, *, is_named: bool) -> Pooled:
    """Judge each alternative over all settings that it changes, and say which of them the draws find.

    `is_named` says whether a setting is wrong: what is wrong is then said there.
    """
    powers, totals = dict[str, Power](), total_log_ratios(evidence)
    for setting in evidence.values():
        for name in setting.names:
            powers[name] = powers.get(name, Power()).plus(setting.powers[name])
    chances = {name: power.chance(levels.log_ratio) for name, power in powers.items() if power.has_effect}
    findings = []
    best = max(totals, key=lambda name: totals[name], default=None)
    if best is not None and totals[best] > levels.log_ratio and not is_named:
        message = f"over all settings the draws fit another chain better: {best} (e^{totals[best]:.0f} times)"
        findings.append(Finding(code=Code.SAMPLER_DIFFERS, message=message))
    would_find = tuple(name for name, chance in chances.items() if chance >= _SURE)
    alone = {name: dict(_hidden(name, evidence, levels)) for name in would_find}
    return Pooled(
        would_find=would_find,
        could_miss=(*(name for name in chances if name not in would_find), *_in_some(alone, has_effect=True)),
        no_change=(*(name for name in powers if name not in chances), *_in_some(alone, has_effect=False)),
        findings=tuple(findings),
    )


def _hidden(name: str, evidence: Mapping[str, SamplerEvidence], levels: Levels) -> Iterator[tuple[str, bool]]:
    """Yield the settings in which an alternative is not found if it holds there alone, and whether it changes any row.

    A server may read a parameter otherwise for some values alone: an engine's top_k may end at a number.
    """
    for setting, of_setting in evidence.items():
        if name in of_setting.of_values and (power := of_setting.powers[name]).chance(levels.log_ratio) < _SURE:
            yield setting, power.has_effect


def _in_some(alone: Mapping[str, Mapping[str, bool]], *, has_effect: bool) -> Iterator[str]:
    for name, settings in alone.items():
        if places := [setting for setting, changes in settings.items() if changes is has_effect]:
            yield f"{name} (in {some_of(places, _MOST_PLACES)} alone)"


def judge_independence(
    evidence: Mapping[str, SamplerEvidence], levels: Levels, follows: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Judge the random numbers of all draws and of first draws, and whether neighbouring draws share one.

    Two draws of one random number come from numbers that lie in both spans. Independent ones come from them with the
    product of the probabilities: the ratio of both has the mean 1 for a sound sampler, whatever came before. `follows`
    names the chain of each setting; draws of those that are as asked are judged.
    """
    draws = [draw for name, setting in evidence.items() if follows[name] == _AS_ASKED for draw in setting.draws]
    noise = sum(draw.noise for draw in draws) / max(1, len(draws))
    distance, bound = kolmogorov_distance([draw.by_id for draw in draws]), levels.shift(len(draws), noise)
    if distance > bound:
        message = f"the draws of all settings together are off by {distance:.2f}, at most {bound:.2f}"
        yield Finding(code=Code.SAMPLER_DIFFERS, message=f"{message}: the random numbers are not uniform")
    firsts = [draw for draw in draws if draw.step == 0]
    noise = sum(draw.noise for draw in firsts) / max(1, len(firsts))
    distances = [kolmogorov_distance(column) for column in ([d.by_id for d in firsts], [d.by_rank[0] for d in firsts])]
    if max(distances) > (bound := levels.shift(len(firsts), noise)):
        message = f"the first draws of the requests are off by {max(distances):.2f}, at most {bound:.2f}"
        yield Finding(code=Code.SAMPLER_DIFFERS, message=f"{message}: the first new token is drawn otherwise")
    for what, pairs in (
        ("the draws of one request depend on each other", _neighbours(draws, lambda draw: (draw.request, draw.step))),
        (
            "the draws of one request depend on those of the request before",
            _neighbours(draws, lambda draw: (draw.step, draw.request)),
        ),
    ):
        log_ratio = max(sum(_log_shared(*pair, order) for pair in pairs) for order in range(_ORDERS))
        if log_ratio > levels.log_ratio:
            message = f"{what}, so no setting's verdict is sure: one random number for both is e^{log_ratio:.0f} times"
            yield Finding(code=Code.SAMPLER_DIFFERS, message=f"{message} as likely over {len(pairs)} pairs")


def _neighbours(
    draws: Sequence[JudgedDraw], place: Callable[[JudgedDraw], tuple[int, int]]
) -> list[tuple[JudgedDraw, JudgedDraw]]:
    """Return pairs of draws that follow each other in an order, the first part of their place being the same."""
    return [(draw, after) for draw, after in pairwise(sorted(draws, key=place)) if place(draw)[0] == place(after)[0]]


def _log_shared(before: JudgedDraw, after: JudgedDraw, order: int) -> float:
    """Return how much likelier two draws are by one random number, as a logarithm."""
    (start, end), (other_start, other_end) = before.spans[order], after.spans[order]
    product = (end - start) * (other_end - other_start)
    shared = max(0.0, min(end, other_end) - max(start, other_start))
    return math.log1p(_SHARED * (shared / product - 1)) if product > 0 else 0.0


def judge_seeds(counts: Mapping[str, int], noise: Sequence[float], levels: Levels) -> tuple[int, list[Finding]]:
    """Judge how many requests drew other tokens with the same seed.

    The counts are by the way the requests were sent. `noise` is for each of them the sum of the probabilities that
    rounding changes a draw.

    Returns:
        How many may differ, and findings.
    """
    excused = _largest_count([min(1.0, _NOISE * flips) for flips in noise], levels.chance)
    findings = []
    for way, count in counts.items():
        if count > excused:
            message = f"{count} requests drew other tokens with the same seed {way}; rounding explains {excused}"
            findings.append(Finding(code=Code.SEED_DIFFERS, message=message))
    return excused, findings


def _largest_count(chances: Sequence[float], level: float) -> int:
    """Return the least number of events, independent with these chances, that is exceeded with at most this level."""
    shares = [1.0]
    for chance in chances:
        shares = [
            (1 - chance) * stays + chance * rises for stays, rises in zip([*shares, 0.0], [0.0, *shares], strict=True)
        ]
    count = len(chances)
    while count and math.fsum(shares[count:]) <= level:
        count -= 1
    return count
