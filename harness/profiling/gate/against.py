"""An engine of now against another version of it: two warm processes, timed in turn, and pair after pair of them.

A wall time alone says nothing on a machine that other programs use. Two steps timed in turn, A B B A, see the same
background load: a linear drift affects both alike, and the A of one block over the A of the next shows how much noise
is left. The two A of one block are not compared: the first follows an A and the last a B, which has filled the caches.

Two processes that run the same code differ by some percent for as long as they live, because their memory lies
elsewhere (Mytkowicz et al. 2009; 2 % in the prefill of a tiny model). More blocks do not average that out, so each
round has a new pair of processes. Both are forked from one process that has imported torch: they share what differs
between processes, and start quickly.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import resolve
from harness.profiling.gate.versions import (
    ForkServer,
    PhaseSeconds,
    Version,
    Worker,
    engine_packages,
    installed_version,
    stored_version,
)
from harness.results.gate import Clock, Interval, PairedRatio, PhaseTime

MIN_BLOCKS = 5
"""With fewer blocks the interval of a median has no meaning."""
_NUM_RESAMPLES = 2000
CONFIDENCE = 0.99
_SEED = 0

Time = Callable[[], float]
"""Run a step once and return its seconds."""


def time_pairs(before: Time, after: Time, *, num_blocks: int = 30, tolerance: float = 0.03) -> PairedRatio:
    """Time two steps in turn, each warmed up once, and return their ratio.

    There are at least 5 blocks A B B A; a slowdown of `tolerance` is worth an alarm.
    """
    before(), after()
    blocks = [(before(), after(), after(), before()) for _ in range(num_blocks)]
    return paired_ratio(blocks, tolerance=tolerance)


def paired_ratio(
    blocks: Sequence[tuple[float, float, float, float]], *, tolerance: float = 0.03, groups: Sequence[int] | None = None
) -> PairedRatio:
    """Return the ratio of blocks of seconds, each A B B A.

    Blocks are in order of time; a slowdown of `tolerance` is worth an alarm. `groups` says of each block the pair of
    processes it was timed in; None: one for all. What differs between pairs of processes widens the interval.

    Raises:
        ValueError: fewer than 5 blocks.
    """
    if len(blocks) < MIN_BLOCKS:
        raise ValueError(f"{len(blocks)} blocks are too few for an interval: at least {MIN_BLOCKS}")
    first, second, third, fourth = np.array(blocks, np.float64).T
    before, after = first + fourth, second + third
    group = np.zeros(len(blocks), np.int64) if groups is None else np.array(groups, np.int64)
    is_neighbour = group[:-1] == group[1:]
    return PairedRatio(
        ratio=_interval(after / before, group),
        noise=_interval((before[:-1] / before[1:])[is_neighbour], group[1:][is_neighbour]),
        num_blocks=len(blocks),
        tolerance=tolerance,
    )


def _interval(ratios: NDArray[np.float64], group: NDArray[np.int64]) -> Interval:
    """Return the median with its bootstrap interval (Efron 1979, percentiles); equal ratios give an equal interval.

    Of several groups it is the geometric mean of their medians, which needs two thirds of the groups that a median of
    them would need. Groups are drawn first, and ratios within each of them then.
    """
    draw = np.random.default_rng(_SEED)
    names, sizes = np.unique(group, return_counts=True)
    members = np.full((len(names), sizes.max()), np.nan)  # a smaller group has fewer ratios; missing ones are left out
    for row, name in zip(members, names, strict=True):
        row[: np.count_nonzero(group == name)] = np.log(ratios[group == name])
    drawn = draw.integers(0, len(names), (_NUM_RESAMPLES, len(names), 1))
    within = draw.random((_NUM_RESAMPLES, len(names), sizes.max()))
    resampled = np.where(
        np.arange(sizes.max()) < sizes[drawn], members[drawn, (within * sizes[drawn]).astype(np.int64)], np.nan
    )
    means = np.nanmedian(resampled, axis=2).mean(axis=1)
    low, high = np.exp(np.quantile(means, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)))
    return Interval(median=float(np.exp(np.nanmedian(members, axis=1).mean())), low=float(low), high=float(high))


_Block = tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds, PhaseSeconds]
"""Seconds of the old version, the new one twice, and the old one again."""
BLOCKS_OF_A_ROUND = 8
"""Blocks that one pair of processes times."""
ROUNDS_OF_A_SERVER = 4
"""Rounds until the process that both are forked from is started again."""
MIN_ROUNDS = 8
"""Rounds after which a ratio may count as certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingLength:
    """When to stop: after enough blocks, after the time limit, or when the interval is no wider than the tolerance."""

    num_blocks: int = 400
    """The most blocks A B B A; at least 5."""
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
    """Whether a version may be timed against itself, to measure the noise."""
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
                if time.perf_counter() > end:  # a slow engine: more rounds are worth more than more blocks
                    return

    @property
    def _num_blocks(self) -> int:
        return sum(map(len, self._rounds))

    def _is_done(self) -> bool:
        """Whether enough blocks are timed: the width of the interval decides, never the ratio itself."""
        if self._num_blocks >= self._length.num_blocks:
            return True
        if self._num_blocks < MIN_BLOCKS:
            return False
        if time.perf_counter() - self._begin > self._length.seconds:
            return True
        if len(self._rounds) < MIN_ROUNDS:
            return False
        decisive = [phase_time.decisive.ratio for phase_time in self.times().values()]
        return all(ratio.high - ratio.low <= self._tolerance for ratio in decisive)

    def _phase_time(self, phase: str) -> PhaseTime:
        ratios = {
            clock: paired_ratio(
                [tuple(run[phase][clock.value] for run in block) for blocks in self._rounds for block in blocks],  # type: ignore[misc]
                tolerance=self._tolerance,
                groups=[index for index, blocks in enumerate(self._rounds) for _ in blocks],
            )
            for clock in Clock
        }
        return PhaseTime(clock=self._clock, cpu=ratios[Clock.CPU], wall=ratios[Clock.WALL])


def _refuse_same(before: Worker, after: Worker) -> None:
    if not after.sources or {name: source[1] for name, source in before.sources.items()} != {
        name: source[1] for name, source in after.sources.items()
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
