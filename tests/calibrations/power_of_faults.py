"""python -m tests.calibrations.power_of_faults [--listed N] [--drawn N] [--out FILE]: is the power of a pass true?

A sound engine is checked, and then the same engine with a fault in it. The power of the sound run says of the mistake
that was planted whether it would have been seen. Each fault is planted as it was declared, in another dtype, and under
short prompts, so that some are out of reach.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from harness.base.metrics import rounding_unit
from harness.errors import HarnessError
from harness.extensions.faults.benchmark import sampled
from harness.extensions.faults.catalogue import choose
from harness.extensions.faults.drawn.draw import KINDS, draw
from harness.extensions.faults.fault import NOTHING, EngineKind, Fault, FaultConfig, Variant
from harness.extensions.faults.subject import opened
from harness.extensions.faults.tools.check import check
from harness.extensions.faults.zoo.quiet import quiet
from harness.formats.taps import site_of
from harness.judge.jobs import check as check_job
from harness.results.check import CheckResult, DetectionPower, KnownMistake, Outcome

ENGINES = (EngineKind.REFERENCE, EngineKind.MODULE, EngineKind.STEP)
SHORT = ((5, 17, 99, 23, 64), (30, 31, 90))
KNOWN = list(KINDS).index("known")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One planted fault, and what the pass of the sound engine says of it."""

    id: str
    setting: str
    is_seen: bool
    """Whether the check of the faulty engine fails."""
    said: str
    """Where the check found it first, and the cause that it named."""
    matches: list[tuple[str, str, float]]
    """Tap, mistake and share of its bound, of the known mistakes that this fault is."""
    also: list[str]
    """Where else the pass says that this fault would not be seen."""

    @property
    def answer(self) -> str:
        """What the power says against what happened."""
        if not self.matches:
            return "seen, not listed" if self.is_seen else "missed, said otherwise" if self.also else "missed, unsaid"
        foretold = {share > 1 for *_, share in self.matches}
        if foretold == {self.is_seen}:
            return "seen, as foretold" if self.is_seen else "missed, as foretold"
        if len(foretold) == 2:
            return "seen, several sizes" if self.is_seen else "missed, several sizes"
        return "seen, not foretold" if self.is_seen else "missed, foretold as seen"


def trials(faults: Iterable[Fault]) -> Iterator[Trial]:
    """Plant each fault under each of its settings."""
    for fault in faults:
        for setting in _settings(fault):
            if (sound := _sound(fault.engine, _Key(setting))) is not None:
                planted = replace(fault, setting=setting)
                if (result := _checked(planted)) is not None:
                    yield _trial(planted, sound, result)


def _settings(fault: Fault) -> Iterator[FaultConfig]:
    yield fault.setting
    yield replace(fault.setting, dtype="float32" if fault.setting.dtype != "float32" else "bfloat16")
    if fault.setting.schedule in ("plain", "batched"):
        yield replace(fault.setting, prompts=SHORT, max_new_tokens=2)


class _Key:
    """A setting by what it holds, since its mappings have no hash."""

    def __init__(self, setting: FaultConfig) -> None:
        self.setting, self.text = setting, repr(setting)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, key: object) -> bool:
        return isinstance(key, _Key) and key.text == self.text


@cache
def _sound(engine: EngineKind, key: _Key) -> CheckResult | None:
    """Return the check of the engine without the fault; None if it does not pass."""
    result = _checked(Variant(id="sound", summary="", setting=key.setting, engine=engine))
    return result if result is not None and result.power is not None else None


def _checked(entry: Fault | Variant) -> CheckResult | None:
    """Return a check; None if the engine raises, does not open, or never ran the code of its fault."""
    try:
        with quiet(), opened(entry) as (subject, planted):
            result = check(subject)
    except (HarnessError, TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError):
        return None
    return None if isinstance(entry, Fault) and not planted.num_calls else result


def _trial(fault: Fault, sound: CheckResult, result: CheckResult) -> Trial:
    assert sound.power is not None
    (run,) = result.runs
    first = run.first_divergence or next((finding for finding in run.findings if finding.tap), None)
    cause = first.explanation.cause if first and first.explanation and first.explanation.is_cause else ""
    matches = _matches(fault, sound.power.mistakes, cause)
    setting = fault.setting
    prompts = "short" if setting.prompts is SHORT else ""
    (sound_run,) = sound.runs
    sites = {site_of(tap.name) for tap in sound_run.taps if fault.is_at(tap.name)}
    where = sites & {*sound.power.not_covered, *map(site_of, sound.power.not_tried)}
    coverage = sound_run.coverage
    return Trial(
        id=fault.id,
        setting=" ".join((setting.model, setting.dtype, setting.schedule, prompts)),
        is_seen=result.outcome is Outcome.MISMATCH,
        said=f"{first.tap if first else ''}: {cause}",
        matches=[(item.tap, item.mistake, item.bound_share) for item in matches] or _of_any_change(sound.power, result),
        also=[*sorted(where), *(f"not reached: {what}" for what in coverage.not_reached)],
    )


def _matches(fault: Fault, mistakes: tuple[KnownMistake, ...], cause: str) -> list[KnownMistake]:
    """Return the mistakes that the fault is: the cause by its name, or what its declaration takes for true."""
    named = [item for item in mistakes if item.mistake in cause.split(", or ")]
    if named or fault.cause == NOTHING:
        return named
    sites = {site_of(item.tap) for item in mistakes if fault.is_at(item.tap)}
    return [item for item in mistakes if site_of(item.tap) in sites and fault.is_cause(item.mistake)]


def _of_any_change(power: DetectionPower, result: CheckResult) -> list[tuple[str, str, float]]:
    """Return what is said of a change of any kind, where the first wrong operation has no mistake by name."""
    first = result.runs[0].first_divergence
    if first is None:
        return []
    if site_of(first.tap) in power.bit_for_bit:
        return [(first.tap, "any bit", float("inf"))]
    if not power.smallest_change or first.local_roundings is None:
        return []
    change = first.local_roundings * rounding_unit(getattr(torch, result.dtype))
    return [(first.tap, "any change of a row", change / power.smallest_change)]


def _drawn(number: int, seed: int) -> Iterator[Fault]:
    for at in range(number):
        with quiet():
            fault = draw(seed, at * len(KINDS) + KNOWN)
        if fault is not None:
            yield fault


def main() -> None:
    """Plant, count and print; each trial is a line of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listed", type=int, default=80, help="faults of the catalogue [default: 80]")
    parser.add_argument("--drawn", type=int, default=40, help="known mistakes at drawn places [default: 40]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON lines")
    options = parser.parse_args()
    check_job._POWER_SHARE = float("inf")  # the power of every operation, at any cost
    listed = [fault for fault in choose(kinds=ENGINES) if not fault.equivalent and fault.suite is None and fault.tap]
    answers = Counter[str]()
    for trial in trials(chain(sampled(listed, options.listed, options.seed), _drawn(options.drawn, options.seed))):
        answers[trial.answer] += 1
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps({"answer": trial.answer, **asdict(trial)}) + "\n")
    for answer, number in answers.most_common():
        print(f"{answer}: {number}")


if __name__ == "__main__":
    main()
