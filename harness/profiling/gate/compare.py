"""Does a profile need more than its baseline? Counts are exact, amounts may move a little, times are no part of it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.profiling.gate.baseline import (
    Baseline,
    BaselineEntry,
    PhaseNeeds,
    changing,
    read_baseline,
    read_profile,
    write_baseline,
)
from harness.results.gate import GateChange, GateResult

AMOUNT_TOLERANCE = 0.005
"""FLOPs, bytes and the peak may move by this share: padding and the allocator's rounding do."""


def run_gate(profile: Path, baseline: Path, *, accept: bool = False, command: str = "--accept") -> GateResult:
    """Hold a profile against a baseline file.

    Another machine's or other work's entries in the baseline are left alone. `accept` makes the profile the baseline,
    and the changes are what was accepted; `command` is what to type to accept.

    Raises:
        HarnessError: BAD_PROFILE, BAD_BASELINE, CANNOT_WRITE; unless `accept`, BASELINE_MISSING and OTHER_BASELINE.
    """
    entry = read_profile(profile)
    if accept:
        return _accept(entry, baseline)
    stored = read_baseline(baseline)
    if stored is None:
        hint = f"{command} to write one from this profile"
        raise HarnessError(Code.BASELINE_MISSING, "there is no baseline", where=baseline, hint=hint)
    before = stored.matching(entry.key)
    if before is None:
        raise _other_baseline(entry.key, stored, baseline, command)
    return GateResult(key=entry.key, changes=compare(before, entry), not_measured=entry.not_measured)


def _accept(entry: BaselineEntry, path: Path) -> GateResult:
    with changing(path):
        stored = read_baseline(path) or Baseline()
        write_baseline(stored.with_entry(entry), path)
    before = stored.matching(entry.key)
    changes = compare(before, entry) if before else ()
    return GateResult(key=entry.key, changes=changes, is_accepted=True, not_measured=entry.not_measured)


def compare(before: BaselineEntry, after: BaselineEntry) -> tuple[GateChange, ...]:
    """Return what differs between two entries of one key by more than it may."""
    changes = [change for phase, needs in after.phases.items() for change in _phase(phase, before.phases[phase], needs)]
    return tuple(sorted(changes, key=lambda change: not change.is_regression))


def _phase(name: str, before: PhaseNeeds, after: PhaseNeeds) -> Iterator[GateChange]:
    for operation in dict.fromkeys([*after.operators, *before.operators]):
        old, new = before.operators.get(operation, {}), after.operators.get(operation, {})
        for change in _changes(name, operation, old, new, 0.0):
            yield replace(change, places=_places(before, after, operation, change.measure))
    yield from _changes(name, None, before.counts, after.counts, 0.0)
    yield from _changes(name, None, before.amounts, after.amounts, AMOUNT_TOLERANCE)


def _places(before: PhaseNeeds, after: PhaseNeeds, operation: str, operator: str) -> tuple[str, ...]:
    """Return the functions that dispatch an operator more or less often, those that changed most first.

    An operation is charged with everything since the one before it, so that the operation alone may name a neighbour.
    """
    old, new = (needs.places.get(operation, {}).get(operator, {}) for needs in (before, after))
    changes = {place: abs(new.get(place, 0) - old.get(place, 0)) for place in {**new, **old}}
    return tuple(sorted((place for place in changes if changes[place]), key=lambda place: (-changes[place], place)))


def _changes(
    phase: str, operation: str | None, before: Mapping[str, int], after: Mapping[str, int], tolerance: float
) -> Iterator[GateChange]:
    for measure in dict.fromkeys([*after, *before]):
        old, new = before.get(measure, 0), after.get(measure, 0)
        if abs(new - old) > tolerance * old:
            yield GateChange(phase=phase, operation=operation, measure=measure, before=old, after=new)


def _other_baseline(key: Mapping[str, str], stored: Baseline, path: Path, command: str) -> HarnessError:
    """Say what this profile is of, and what the nearest entry has instead."""
    differing = [{name for name in key if entry.key.get(name) != key[name]} for entry in stored.entries]
    names, nearest = min(
        zip(differing, stored.entries, strict=True), key=lambda pair: len(pair[0]), default=(set(key), None)
    )
    shown = [name for name in key if name in names]
    return HarnessError(
        Code.OTHER_BASELINE,
        "the baseline has nothing of this machine, these versions and this work",
        where=path,
        expected=", ".join(f"{name}: {key[name]}" for name in shown),
        actual=", ".join(f"{name}: {nearest.key.get(name)}" for name in shown) if nearest else "no entry",
        hint=f"{command} to add this one; what is there stays",
    )
