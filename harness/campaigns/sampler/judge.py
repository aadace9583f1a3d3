"""The verdict on the draws: each test gets its share of the false alarms that a sound server may raise."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from harness.campaigns.sampler.evidence import Evidence, JudgedDraw, Power
from harness.errors import Code
from harness.results.check import Finding

FALSE_ALARM = 1e-3
"""Share of runs in which a sound server may alarm, at most, over all tests of a run."""
_NUM_OTHERS = 7
"""Tests beside those of the settings: all draws together; those of one request, and of neighbouring ones, each in two
orders of the tokens; the same seed alone, and again."""
_TESTS_OF_A_SETTING = 3
"""Beside the alternatives: three orders of the tokens."""
_AS_LIKELY = math.log(20)
"""An alternative whose likelihood is within this of the best one's fits as well."""
_NOISE = 2.0
"""A server's distribution may be off by this many times what HF's own is off in the server's dtype."""
_SURE = 0.99
_CENTRE = 0.25
"""Where equal places are put: Kolmogorov's distance sees most of a peak there."""
_AS_ASKED = "as asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The thresholds of all tests of a run, by how many there are (Bonferroni)."""

    num_tests: int

    @classmethod
    def of(cls, evidence: Mapping[str, Evidence]) -> "Levels":
        """Count the tests of a run."""
        num_own = sum(_TESTS_OF_A_SETTING + len(own.names) for own in evidence.values())
        num_names = len({name for own in evidence.values() for name in own.names})
        return cls(num_tests=num_own + num_names + _NUM_OTHERS)

    @property
    def log_ratio(self) -> float:
        """The log likelihood ratio that a sound sampler does not reach."""
        return math.log(self.num_tests / FALSE_ALARM)

    def shift(self, num: int, noise: float) -> float:
        """Return the distance of distribution functions that a sound sampler does not reach (Massart 1990).

        Args:
            num: numbers, independent and uniform for a sound sampler.
            noise: the mean total variation that rounding makes.
        """
        return math.sqrt(math.log(2 * self.num_tests / FALSE_ALARM) / (2 * max(1, num))) + _NOISE * noise

    @property
    def chance(self) -> float:
        """The probability that one test's event must not exceed."""
        return FALSE_ALARM / self.num_tests


def shift(numbers: Sequence[float]) -> float:
    """Return Kolmogorov's distance of numbers to the uniform distribution."""
    num = len(numbers)
    pairs = enumerate(sorted(numbers))
    return max((max((at + 1) / num - number, number - at / num) for at, number in pairs), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingJudgement:
    """The verdict on the draws of one setting."""

    num_outside: int
    shift: float
    shift_bound: float
    follows: str | None
    findings: tuple[Finding, ...]


def all_totals(evidence: Mapping[str, Evidence]) -> dict[str, float]:
    """Return the log likelihood ratios of the alternatives, over all settings that they change."""
    totals = dict[str, float]()
    for own in evidence.values():
        for at, name in enumerate(own.names, 1):
            totals[name] = totals.get(name, 0.0) + sum(draw.ratios[at] for draw in own.draws)
    return totals


def judge_setting(name: str, evidence: Evidence, levels: Levels, over_all: Mapping[str, float]) -> SettingJudgement:
    """Judge the draws of one setting, of which there is one at least.

    Args:
        name: of the setting.
        evidence: its draws.
        levels: of this run.
        over_all: ratios over all settings, which choose between alternatives that fit this one.
    """
    draws = evidence.draws
    noise = sum(draw.noise for draw in draws) / len(draws)
    bound = levels.shift(len(draws), noise)
    shifts = (*_shifts(draws, 0), shift([draw.by_id for draw in draws]))
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
    return shift([draw.by_rank[at] for draw in draws]), shift([draw.by_past[at] for draw in draws])


def _follows(
    evidence: Evidence, totals: Sequence[float], bound: float, over_all: Mapping[str, float], least: float
) -> str | None:
    """Name the alternatives that fit best; None if none fits, or if the draws do not speak for any of them."""
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


def judge_pooled(evidence: Mapping[str, Evidence], levels: Levels, *, is_named: bool) -> Pooled:
    """Judge each alternative over all settings that it changes, and say what so many draws find.

    Args:
        evidence: by setting.
        levels: of this run.
        is_named: whether a setting is wrong: what is wrong is then said there.
    """
    powers, totals = dict[str, Power](), all_totals(evidence)
    for own in evidence.values():
        for name in own.names:
            powers[name] = powers.get(name, Power()).plus(own.powers[name])
    chances = {name: power.chance(levels.log_ratio) for name, power in powers.items() if power.is_any}
    findings = []
    best = max(totals, key=lambda name: totals[name], default=None)
    if best is not None and totals[best] > levels.log_ratio and not is_named:
        message = f"over all settings the draws are rather those of another chain: {best} (e^{totals[best]:.0f} times)"
        findings.append(Finding(code=Code.SAMPLER_DIFFERS, message=message))
    return Pooled(
        would_find=tuple(name for name, chance in chances.items() if chance >= _SURE),
        could_miss=tuple(name for name, chance in chances.items() if chance < _SURE),
        no_change=tuple(name for name in powers if name not in chances),
        findings=tuple(findings),
    )


def judge_independence(
    evidence: Mapping[str, Evidence], levels: Levels, follows: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Judge the places of all draws together, and whether they have to do with each other.

    The differences of neighbouring places, modulo 1, are uniform and independent for a sound sampler.

    Args:
        evidence: by setting.
        levels: of this run.
        follows: the chain that each setting follows, under which its draws have their places; None: left out.
    """
    ranks, ids = list(_places(evidence, follows)), [
        (draw.request, draw.step, draw.by_id)
        for name, own in evidence.items() if follows[name] == _AS_ASKED for draw in own.draws
    ]  # fmt: skip
    draws = [draw for own in evidence.values() for draw in own.draws]
    noise = sum(draw.noise for draw in draws) / max(1, len(draws))
    distance, bound = shift([place for _, _, place in ids]), levels.shift(len(ids), noise)
    if distance > bound:
        message = f"the draws of all settings together are off by {distance:.2f}, at most {bound:.2f}"
        yield Finding(code=Code.SAMPLER_DIFFERS, message=f"{message}: the random numbers are not uniform")
    for what, first in (
        ("the draws of one request depend on each other", 0),
        ("the draws of one request depend on those of the request before", 1),
    ):
        differences = [_differences(places, first) for places in (ranks, ids)]
        worst = max(differences, key=lambda own: shift(own) - levels.shift(len(own), 2 * noise))
        distance, bound = shift(worst), levels.shift(len(worst), 2 * noise)
        if distance > bound:
            message = f"{what}, so no setting's verdict is sure: differences of their places are off by {distance:.2f}"
            yield Finding(code=Code.SAMPLER_DIFFERS, message=f"{message}, at most {bound:.2f}")


def _places(evidence: Mapping[str, Evidence], follows: Mapping[str, str | None]) -> Iterator[tuple[int, int, float]]:
    """Yield request, step and place of all draws whose chain is known."""
    for name, own in evidence.items():
        chain = follows[name]
        if chain != _AS_ASKED and chain not in own.names:
            continue
        at = 0 if chain == _AS_ASKED else 1 + own.names.index(str(chain))
        yield from ((draw.request, draw.step, draw.by_rank[at]) for draw in own.draws)


def _differences(places: Sequence[tuple[int, int, float]], first: int) -> list[float]:
    """Return the differences of neighbouring places, of one request (0) or of one step (1)."""
    ordered = sorted(places, key=lambda place: (place[first], place[1 - first]))
    pairs = ((own, after) for own, after in pairwise(ordered) if own[first] == after[first])
    return [(after[2] - own[2] + _CENTRE) % 1.0 for own, after in pairs]


def judge_seeds(counts: Mapping[str, int], noise: float, levels: Levels) -> tuple[int, list[Finding]]:
    """Judge how many requests drew other tokens with the same seed.

    Args:
        counts: of such requests, by the way they were sent.
        noise: sum of the probabilities that rounding changes a draw, over all draws of these requests.
        levels: of this run.

    Returns:
        How many may differ, and findings.
    """
    excused = _largest_poisson(_NOISE * noise, levels.chance)
    found = []
    for way, count in counts.items():
        if count > excused:
            message = f"{count} requests drew other tokens with the same seed {way}; rounding explains {excused}"
            found.append(Finding(code=Code.SEED_DIFFERS, message=message))
    return excused, found


def _largest_poisson(mean: float, chance: float) -> int:
    """Return the largest count whose excess has at most this probability."""
    term = math.exp(-mean)
    tail, count = 1 - term, 0
    while tail > chance and count < 10_000:
        count += 1
        term *= mean / count
        tail -= term
    return count
