"""Times without a profiler: latencies as users see them, the wall time of each phase, and the time that is left."""

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from harness.base.progress import Progress
from harness.engines.stepping import Session
from harness.profiling.load import ProfileRequests, Window, run_steps
from harness.results.profile import Percentiles


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(slots=True)
class Stopwatch:
    """Add up the time of the captured steps of one window."""

    window: Window
    device: str = "cpu"
    elapsed_s: float = 0.0

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Time the step of this index if it is one of the window's."""
        if index not in range(len(self.window.before), self.window.num_steps):
            yield
            return
        synchronize(self.device)
        begin = time.perf_counter()
        yield
        synchronize(self.device)
        self.elapsed_s += time.perf_counter() - begin


@dataclass(slots=True)
class Latencies:
    """Samples of one load, over several runs. Times in seconds."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    step_s: list[list[float]] = field(default_factory=list)
    """[runs][steps] wall time of each step."""
    cpu_s: list[list[float]] = field(default_factory=list)
    """[runs][steps] CPU time of the process in each step, of all its threads."""
    switches: list[list[int]] = field(default_factory=list)
    """[runs][steps] how often the system took a core away in each step."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over all of the time."""
        return self.num_tokens / sum(self.run_s)

    def wall_s(self, window: Window) -> float:
        """Return the median over the runs of the time of a window's steps."""
        return statistics.median(_sums(self.step_s, window))

    def wall_s_range(self, window: Window) -> tuple[float, float]:
        """Return the time of a window's steps in the fastest run and in the slowest run."""
        sums = _sums(self.step_s, window)
        return min(sums), max(sums)

    def cpu_s_median(self, window: Window) -> float:
        """Return the median over the runs of the CPU time of a window's steps."""
        return statistics.median(_sums(self.cpu_s, window))

    def switches_median(self, window: Window) -> float:
        """Return the median over the runs of the involuntary switches in a window's steps."""
        return statistics.median(_sums(self.switches, window))


def _sums(runs: Sequence[Sequence[float]], window: Window) -> list[float]:
    captured = slice(len(window.before), window.num_steps)
    return [sum(steps[captured]) for steps in runs]


def measure(
    session: Session,
    load: ProfileRequests,
    *,
    num_runs: int,
    device: str,
    ran: Callable[[int], None] = lambda _done: None,
) -> Latencies:
    """Run a load several times without a profiler; `ran` receives the number of finished runs."""
    latencies = Latencies()
    for done in range(1, num_runs + 1):
        _measure_once(session, load, device, latencies)
        ran(done)
    return latencies


def _used() -> tuple[float, int]:
    """Return the CPU seconds that the process has used so far, and how often the system took a core away."""
    return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _measure_once(session: Session, load: ProfileRequests, device: str, latencies: Latencies) -> None:
    ends: list[float] = []
    used: list[tuple[float, int]] = []
    arrivals: dict[int, list[float]] = {}

    def take(_index: int) -> Sequence[int]:
        requests = session.step()
        synchronize(device)
        ends.append(time.perf_counter())
        used.append(_used())
        for request in requests:
            arrivals.setdefault(request, []).append(ends[-1])
        return requests

    synchronize(device)
    used.append(_used())
    begin = time.perf_counter()
    run_steps(session, load, take)
    latencies.step_s.append([end - start for start, end in zip([begin, *ends], ends, strict=False)])
    latencies.cpu_s.append([later - earlier for (earlier, _), (later, _) in pairwise(used)])
    latencies.switches.append([later - earlier for (_, earlier), (_, later) in pairwise(used)])
    latencies.run_s.append(ends[-1] - begin)
    for times in arrivals.values():
        latencies.num_tokens += len(times)
        latencies.ttft_s.append(times[0] - begin)
        latencies.inter_token_s += [later - earlier for earlier, later in pairwise(times)]
        if len(times) > 1:
            latencies.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))


def percentiles_ms(samples_s: Sequence[float]) -> Percentiles:
    """Return the percentiles of samples in seconds, in milliseconds, interpolated between neighbours."""
    median, p90, p99 = np.percentile([sample * 1e3 for sample in samples_s], (50, 90, 99)).tolist()
    return Percentiles(median=median, p90=p90, p99=p99, num_samples=len(samples_s))


_TRACE, _MEMORY, _COUNTERS = 1.5, 2.0, 4.0
"""Time of each pass, in plain runs (reports/cpu/profiles.md); that of the counters has two runs."""
_MS = 1000


@dataclass(slots=True)
class ProfileProgress:
    """Seconds of each part, and which parts are done."""

    report: Progress
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by label."""
    done_s: float = 0.0
    label: str = ""

    @property
    def total_s(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())

    def begin(self, label: str) -> None:
        """Begin a part; the part before it is done."""
        self.done_s += self.parts.get(self.label, 0.0)
        self.label = label
        self.part_done(0.0)

    def part_done(self, share: float) -> None:
        """Report the finished share of the part."""
        done = self.done_s + share * self.parts.get(self.label, 0.0)
        self.report(f"profile: {self.label}", int(done * _MS), max(1, int(self.total_s * _MS)))


def plan_parts(windows: Iterable[Window], seconds: Mapping[ProfileRequests, float], num_runs: int) -> dict[str, float]:
    """Return the seconds that each part will take.

    `seconds` are those of one plain run of each load, of which there are `num_runs` for the latencies.
    """
    windows = tuple(windows)
    parts = {f"timing {number}": num_runs * seconds[load] for number, load in enumerate(seconds)}
    for window in windows:
        share = seconds[window.load] * _share(window)
        runs = len(window.runs) * window.schedule.repeat
        parts[f"{window.phase}, trace"] = _TRACE * runs * share
        parts[f"{window.phase}, memory"] = _MEMORY * share
        parts[f"{window.phase}, counters"] = _COUNTERS * share
    return parts


def _share(window: Window) -> float:
    """Return the rows up to the last captured step over those of the whole load: time roughly follows rows."""
    num_rows = sum(shape.num_rows for shape in window.shapes_so_far)
    whole = sum(map(len, window.load.prompts)) + sum(window.load.max_new_tokens) - len(window.load.prompts)
    return min(1.0, num_rows / max(1, whole))
