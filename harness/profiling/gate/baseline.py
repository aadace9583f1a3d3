"""The limits of a profile, stored: one entry for each kind of machine, set of versions and piece of work.

A baseline file is read in review, so it is sorted, with one count a line. It holds no time: times differ between
machines. `compare` compares a profile with an entry: counts exactly, amounts within a tolerance.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from harness.base.files import parse_json, read_bytes, read_text, write_text, writing
from harness.errors import Code, HarnessError
from harness.results.gate import GateChange, GateResult

Figures = TypeVar("Figures")
PROFILE_NAME = "profile.json"
"""Name of the file with the whole profile, in the folder of its captures."""
_COUNTS = ("num_python_calls", "num_allocations", "num_kept")
_AMOUNTS = ("flops", "bytes_moved", "bytes_allocated", "kv_bytes", "peak_bytes")
_VERSIONS = ("torch", "transformers", "machine", "cpu_capability", "gpu")
_WORK = ("engine", "dtype", "device", "batch_size", "prompt_tokens", "max_new_tokens")


class PhaseNeeds(BaseModel):
    """Counts and amounts of one phase. Sums over its steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operators: dict[str, dict[str, int]]
    """Times that each operator is dispatched, by operation and operator."""
    places: dict[str, dict[str, dict[str, int]]] = {}
    """By operation and operator, the functions that dispatch it. Never compared: they show the place of a change."""
    counts: dict[str, int]
    """Python calls, allocations, frees: exact."""
    amounts: dict[str, int]
    """FLOPs and bytes: equal within a tolerance."""


class BaselineEntry(BaseModel):
    """One profile's needs, and the conditions that they hold under."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: dict[str, str]
    """Machine kind, versions and work; a profile is compared with the entry of an equal key only."""
    phases: dict[str, PhaseNeeds]

    @property
    def not_measured(self) -> tuple[str, ...]:
        """Counts and amounts that no phase has."""
        measured = {name for needs in self.phases.values() for name in (*needs.counts, *needs.amounts)}
        return tuple(name for name in (*_COUNTS, *_AMOUNTS) if name not in measured)

    @model_validator(mode="after")
    def _has_the_phases_of_its_key(self) -> "BaselineEntry":
        expected = [steps.partition("=")[0] for steps in self.key.get("steps", "").split()]
        if sorted(expected) != sorted(self.phases):
            raise ValueError(f"phases {sorted(self.phases)} where the key has {sorted(expected)}")
        return self


class Baseline(BaseModel):
    """A baseline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    entries: list[BaselineEntry] = []

    def matching(self, key: Mapping[str, str]) -> BaselineEntry | None:
        """Return the entry with exactly this key."""
        return next((entry for entry in self.entries if entry.key == key), None)

    def with_entry(self, entry: BaselineEntry) -> "Baseline":
        """Return the baseline with the entry in the place of that of the same key, or added."""
        others = [kept_entry for kept_entry in self.entries if kept_entry.key != entry.key]
        return Baseline(entries=sorted([*others, entry], key=lambda entry: sorted(entry.key.items())))


def profile_file(path: Path) -> Path:
    """Return the file of a profile that is named by its folder or by the file itself."""
    return path / PROFILE_NAME if path.is_dir() else path


def read_profile(path: Path) -> BaselineEntry:
    """Read what a profile needed, from its folder or its `profile.json`.

    Raises:
        HarnessError: BAD_PROFILE.
    """
    return from_profile(path, _entry)


def from_profile(path: Path, read: Callable[[Any], Figures]) -> Figures:
    """Return what `read` finds in a profile, which is named by its folder or its `profile.json`.

    Raises:
        HarnessError: BAD_PROFILE: there is none, or `read` does not find what it looks for.
    """
    file = profile_file(path)
    hint = "the folder that was given to harness profile --out"
    try:
        return read(parse_json(read_text(file)))
    except OSError as error:
        what = f"the profile cannot be read: {error.strerror}"
        raise HarnessError(Code.BAD_PROFILE, what, where=file, hint=hint) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else "it is not what harness profile writes"
        raise HarnessError(Code.BAD_PROFILE, f"the file is no profile: {missing}", where=file, hint=hint) from error


def read_baseline(path: Path) -> Baseline | None:
    """Read a baseline; None if there is no file.

    Raises:
        HarnessError: BAD_BASELINE.
    """
    try:
        return Baseline.model_validate_json(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else _first(error)
        hint = "take it back from version control, or write a new one with --accept"
        what = f"the baseline cannot be used: {reason}"
        raise HarnessError(Code.BAD_BASELINE, what, where=path, hint=hint) from error


def write_baseline(baseline: Baseline, path: Path) -> None:
    """Write a baseline whole, or leave the old file.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    write_text(path, json.dumps(baseline.model_dump(), indent=1, sort_keys=True) + "\n")


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Keep other processes, those of pytest-xdist for instance, from changing a baseline between reading and writing.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)  # the file itself is replaced, and a lock on it with it
    try:
        with writing(path):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _key(document: Mapping[str, Any]) -> dict[str, str]:
    environment = document["environment"]
    steps = " ".join(f"{phase['name']}={phase['num_steps']}" for phase in document["phases"])
    lengths = [f"{num_prompt}+{num_new}" for num_prompt, num_new in document.get("lengths", ())]
    return {
        **{name: str(environment.get(name, "")) for name in _VERSIONS},
        "python": ".".join(str(environment["python"]).split(".")[:2]),
        **{name: str(document[name]) for name in _WORK},
        "model": PurePath(document["model"]).name,  # folders differ from machine to machine
        "options": str(environment.get("options", "")),
        "steps": steps,
        **({"lengths": " ".join(lengths)} if len(set(lengths)) > 1 else {}),
    }


def _entry(document: Mapping[str, Any]) -> BaselineEntry:
    return BaselineEntry(key=_key(document), phases={phase["name"]: _needs(phase) for phase in document["phases"]})


def _needs(phase: Mapping[str, Any]) -> PhaseNeeds:
    operators: dict[str, dict[str, int]] = {}
    places: dict[str, dict[str, dict[str, int]]] = {}
    for count in phase["counts"]:
        operators.setdefault(count["operation"], {})[count["operator"]] = count["count"]
        if count.get("places"):
            places.setdefault(count["operation"], {})[count["operator"]] = dict(count["places"])
    return PhaseNeeds(
        operators=operators,
        places=places,
        counts=_measured({name: phase[name] for name in _COUNTS}),
        amounts=_measured(
            {
                "flops": phase["flops_measured"],
                "bytes_moved": sum(count["bytes_moved"] for count in phase["counts"]),
                "bytes_allocated": phase["bytes_allocated"],
                "kv_bytes": phase["kv_bytes_measured"],
                "peak_bytes": phase["peak_bytes"],
            }
        ),
    )


def _measured(needs: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in needs.items() if value is not None}


def _first(error: ValidationError) -> str:
    """Return the first of a file's errors, with its place."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


AMOUNT_TOLERANCE = 0.005
"""FLOPs, bytes and the peak may change by this share: padding and the allocator's rounding change them."""


def run_gate(profile: Path, baseline: Path, *, accept: bool = False, command: str = "--accept") -> GateResult:
    """Compare a profile with a baseline file.

    Entries of other machines and other work stay as they are. `accept` makes the profile the baseline, and the result
    lists the accepted changes; `command` is the command that accepts.

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
    """Return the figures of two entries of one key that differ by more than the tolerance."""
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

    An operation is charged with everything since the operation before it, so its name alone may point at a neighbour.
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
    """Return what this profile describes, and how the nearest entry differs."""
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
