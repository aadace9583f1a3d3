"""Two servers under the same load, in turns A B B A, and how much longer the second one takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from harness.base.progress import Progress
from harness.extensions.server.address import Address
from harness.extensions.server.load.report import load_text
from harness.extensions.server.load.result import LoadResult
from harness.extensions.server.load.run import LoadOptions, run_load
from harness.oracle.model import HFModel
from harness.oracle.request_file import LoadRequest
from harness.plan import Plan
from harness.profiling.gate.against import paired_ratio
from harness.report.terminal import MIN_WIDTH, blocks_text, fact_lines, table_lines
from harness.results.check import Outcome
from harness.results.gate import Interval, PairedRatio, TimeVerdict

TIMES = ("ttft", "tpot", "e2e")
"""Medians over the requests of a load that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadComparison:
    """Two servers, A and B."""

    IN_DOCUMENT: ClassVar = ("outcome", "is_slower", "is_conclusive")
    runs: tuple[LoadResult, ...]
    """A B B A of each block, in this order; up to the first whose answers are not right."""
    ratios: Mapping[str, PairedRatio]
    """Time of B over time of A: `ttft`, `tpot`, `e2e`, and a load's time by its requests and its new tokens. Empty if
    an answer is not right."""

    @property
    def outcome(self) -> Outcome:
        """The outcome of the answers of both servers."""
        return Outcome.of_all(run.outcome for run in self.runs)

    @property
    def is_slower(self) -> bool:
        """Whether B takes longer in any of the times."""
        return bool(self.named(TimeVerdict.SLOWER))

    @property
    def is_conclusive(self) -> bool:
        """Whether the noise lets any of the times be compared."""
        return len(self.named(TimeVerdict.INCONCLUSIVE)) < len(self.ratios)

    def named(self, verdict: TimeVerdict) -> list[str]:
        """Return the times that have this verdict."""
        return [name for name, ratio in self.ratios.items() if ratio.verdict is verdict]


def compare_loads(
    plan: Plan,
    hf: HFModel,
    addresses: tuple[Address, Address],
    draw: Callable[[int], Sequence[LoadRequest]],
    options: LoadOptions,
    *,
    num_blocks: int,
    progress: Progress,
) -> LoadComparison:
    """Put a load on A and B in turns, and check every answer.

    Args:
        plan: of the model; its prompts are not used.
        hf: the truth.
        addresses: of A and of B.
        draw: returns the requests of a block; the four loads of a block have the same.
        options: of each load.
        num_blocks: at least five, for intervals of 99 %.
        progress: told how far the work is.

    Raises:
        HarnessError: those of `run_load`.
    """
    before, after = addresses
    runs, order = list[LoadResult](), (before, after, after, before)
    for block in range(num_blocks):
        for turn, address in enumerate(order):
            report = partial(_report, progress, 4 * block + turn, 4 * num_blocks)
            with_seed = replace(options, seed=options.seed + block)
            runs.append(run_load(plan, hf, address, draw(block), with_seed, progress=report))
            if runs[-1].outcome is not Outcome.PASS:
                return LoadComparison(runs=tuple(runs), ratios={})
    times = [_times(run) for run in runs]
    names = [name for name in times[0] if all(name in of_run for of_run in times)]
    by_name = {name: [of_run[name] for of_run in times] for name in names}
    return LoadComparison(
        runs=tuple(runs), ratios={name: paired_ratio(_blocks(values)) for name, values in by_name.items()}
    )


def _report(progress: Progress, run: int, num_runs: int, label: str, done: int, total: int) -> None:
    progress(f"load {run + 1} of {num_runs}: {label}", done, total)


def _times(run: LoadResult) -> dict[str, float]:
    medians = {name: run.times_ms[name].p50 for name in TIMES if name in run.times_ms}
    rates = {"a request": run.requests_per_s, "a new token": run.new_tokens_per_s}
    return medians | {name: 1 / rate for name, rate in rates.items() if rate}  # right answers may have no token


def _blocks(values: Sequence[float]) -> list[tuple[float, float, float, float]]:
    return [(values[at], values[at + 1], values[at + 2], values[at + 3]) for at in range(0, len(values), 4)]


def comparison_text(result: LoadComparison, *, width: int) -> str:
    """Return a comparison as lines; of a load whose answers are not right, its own report."""
    if not result.ratios:
        return load_text(result.runs[-1], width=width)
    before, after = result.runs[0], result.runs[1]
    rows = [(name, _interval(pair.ratio), _interval(pair.noise), pair.verdict) for name, pair in result.ratios.items()]
    table = table_lines(rows, ("time", "B / A", "A / A", ""), ("left", "right", "right", "left"), legend=())
    return blocks_text([[_headline(result)], table, fact_lines(_facts(result, before, after), max(width, MIN_WIDTH))])


def _headline(result: LoadComparison) -> str:
    unknown = result.named(TimeVerdict.INCONCLUSIVE)
    left_out = f"; too much noise to tell: {', '.join(unknown)}" if unknown else ""
    if result.is_slower:
        return f"SLOWER  B in {', '.join(result.named(TimeVerdict.SLOWER))}{left_out}"
    if not result.is_conclusive:
        return "INCONCLUSIVE  too much noise: use more --blocks or --num-requests, or a quiet machine"
    compared = [*result.named(TimeVerdict.SAME), *result.named(TimeVerdict.FASTER)]
    return f"NOT SLOWER  B in {', '.join(compared)}{left_out}"


def _interval(interval: Interval) -> str:
    return f"{interval.median:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _facts(result: LoadComparison, before: LoadResult, after: LoadResult) -> Iterator[tuple[str, str]]:
    for name, run in (("A", before), ("B", after)):
        yield name, f"{run.server} at {run.url}" if run.server else run.url
    load = f"{before.num_requests:,} requests, {before.arrivals}"
    yield "loads", f"{len(result.runs)}, in turns A B B A, each {load}; every answer that was judged is right"
