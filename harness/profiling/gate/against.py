"""An engine of now against another version of it: two warm processes, timed in turn, and pair after pair of them.

Two processes that run the same code differ by some percent for as long as they live, because their memory lies
elsewhere (Mytkowicz et al. 2009; 2 % in the prefill of a tiny model). More blocks do not average that out, so each
round has a new pair of processes. Both are forked from one that has imported torch: they share what differs between
processes, and start quickly.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import resolve
from harness.profiling.gate.paired_timing import MIN_BLOCKS, paired_ratio
from harness.profiling.gate.versions import Version, engine_packages, installed_version, stored_version
from harness.profiling.gate.worker import ForkServer, PhaseSeconds, Worker
from harness.results.gate import Clock, PhaseTime

_Block = tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds, PhaseSeconds]
"""Then, now, now, then."""
BLOCKS_OF_A_ROUND = 8
"""Blocks of a pair of processes."""
ROUNDS_OF_A_SERVER = 4
"""Rounds until the process that both are forked from is started again."""
MIN_ROUNDS = 8
"""Rounds until a ratio may be taken as sure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingLength:
    """When to stop: the blocks are there, the time is up, or the interval is no wider than the tolerance."""

    num_blocks: int = 400
    """Most blocks A B B A; at least 5."""
    seconds: float = 240.0


def time_against(
    against: str,
    profile: Mapping[str, Any],
    *,
    length: TimingLength,
    tolerance: float,
    repository: Path | None = None,
    packages: tuple[str, ...] = (),
    progress: Progress = no_progress,
) -> dict[str, PhaseTime]:
    """Time the engine and the work of a profile against another version of the engine.

    `against` is a revision of git, a wheel, or a folder that holds the packages; of a revision the repository is None
    for the checkout that the engine is imported from. The two versions differ in the top-level `packages`; empty: those
    of the engine's adapter. A slowdown of `tolerance` is worth an alarm.

    Returns:
        The ratio of each phase.

    Raises:
        HarnessError: BAD_OPTION: no such version; SAME_VERSION: both would be the same code; ENGINE_FAILED: one of
            the two does not run.
    """
    names = packages or engine_packages(profile["engine"])
    now = installed_version(names)
    with stored_version(against, names, now=now, repository=repository) as stored:
        timing = _Timing(stored, now, _spec(profile, names), length, tolerance, progress)
        timing.run()
        return timing.times()


@dataclass
class _Timing:
    """Rounds of blocks, each in a pair of processes, until enough is known or the time is up."""

    _before: Version
    _after: Version
    _spec: Mapping[str, Any]
    _length: TimingLength
    _tolerance: float
    _progress: Progress
    may_be_same: bool = False
    """Whether a version may be timed against itself, to see what noise alone does."""
    _rounds: list[list[_Block]] = field(default_factory=list)
    _clock: Clock = Clock.CPU
    _begin: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        while not self._is_done():
            with ForkServer() as server:
                for _ in range(ROUNDS_OF_A_SERVER):
                    if not self._is_done():
                        self._run_round(server)

    def times(self) -> dict[str, PhaseTime]:
        """Return the ratio of each phase."""
        return {phase: self._phase_time(phase) for phase in self._rounds[0][0][0]}

    def _run_round(self, server: ForkServer) -> None:
        spec = {**self._spec, "placement": len(self._rounds)}
        with Worker(server, self._before, spec) as old, Worker(server, self._after, spec) as new:
            for worker in (old, new):
                worker.wait_until_loaded()
            if not self.may_be_same:
                _refuse_same(old, new)
            is_cuda = torch.device(self._spec["device"]).type == "cuda"
            self._clock = Clock.WALL if is_cuda or new.num_threads > 1 else Clock.CPU
            self._rounds.append([])
            end = time.perf_counter() + self._length.seconds / MIN_ROUNDS
            for _ in range(min(BLOCKS_OF_A_ROUND, self._length.num_blocks - self._num_blocks)):
                self._progress("timing in pairs", self._num_blocks, self._length.num_blocks)
                self._rounds[-1].append((old.run(), new.run(), new.run(), old.run()))
                if time.perf_counter() > end:  # a slow engine: rather more rounds than more blocks
                    return

    @property
    def _num_blocks(self) -> int:
        return sum(map(len, self._rounds))

    def _is_done(self) -> bool:
        """Whether all blocks are there, or enough of them: by how sure the ratio is, never by what it says."""
        if self._num_blocks >= self._length.num_blocks:
            return True
        if self._num_blocks < MIN_BLOCKS:
            return False
        if time.perf_counter() - self._begin > self._length.seconds:
            return True
        if len(self._rounds) < MIN_ROUNDS:
            return False
        decisive = [found.decisive.ratio for found in self.times().values()]
        return all(ratio.high - ratio.low <= self._tolerance for ratio in decisive)

    def _phase_time(self, phase: str) -> PhaseTime:
        ratios = {
            clock: paired_ratio(
                [tuple(run[phase][clock.value] for run in block) for own in self._rounds for block in own],  # type: ignore[misc]
                tolerance=self._tolerance,
                groups=[index for index, own in enumerate(self._rounds) for _ in own],
            )
            for clock in Clock
        }
        return PhaseTime(clock=self._clock, cpu=ratios[Clock.CPU], wall=ratios[Clock.WALL])


def _refuse_same(before: Worker, after: Worker) -> None:
    if not after.sources or {name: own[1] for name, own in before.sources.items()} != {
        name: own[1] for name, own in after.sources.items()
    }:
        return
    files = [file for file, _ in after.sources.values()]
    is_same_place = files == [file for file, _ in before.sources.values()]
    raise HarnessError(
        Code.SAME_VERSION,
        "both workers import the very same files" if is_same_place else "both versions have the same code",
        where=f"--against {before.version.label}",
        expected="two versions of " + ", ".join(after.sources),
        actual=files[0] if is_same_place else "not one byte of it differs",
        hint="--against-package names the package that has changed, --against-repo its repository",
    )


def _spec(profile: Mapping[str, Any], packages: tuple[str, ...]) -> dict[str, Any]:
    options = str(profile["environment"].get("options", "")).split()
    return {
        "folder": str(resolve(profile["model"])),
        "engine": profile["engine"],
        "dtype": profile["dtype"],
        "device": profile["device"],
        "options": dict(option.split("=", 1) for option in options),
        "packages": list(packages),
        "lengths": profile.get("lengths")
        or [[profile["prompt_tokens"], profile["max_new_tokens"]]] * profile["batch_size"],
    }
