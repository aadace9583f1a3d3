"""The duration of a profile, estimated from its first plain runs, for the progress line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from harness.base.progress import Progress
from harness.profiling.passes.load import ProfileRequests, Window

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
        """Say which part begins; the one before it is done."""
        self.done_s += self.parts.get(self.label, 0.0)
        self.label = label
        self.part_done(0.0)

    def part_done(self, share: float) -> None:
        """Say which share of the part is done."""
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
    """Return the rows up to the last captured step over those of the whole load: time goes with them, roughly."""
    own = sum(shape.num_rows for shape in window.shapes_so_far)
    whole = sum(map(len, window.load.prompts)) + sum(window.load.max_new_tokens) - len(window.load.prompts)
    return min(1.0, own / max(1, whole))
