"""Results of a benchmark: plain data, and the page of text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

from tabulate import tabulate

from harness.base.environment import MachineInfo
from harness.extensions.bench.agreement import Agreement
from harness.extensions.bench.peer import OURS

SCHEMA_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that was timed, once for each engine in each repeat."""

    name: str
    unit: str
    is_higher_better: bool
    samples: Mapping[str, Sequence[float]]
    """One a repeat, by engine."""
    engine: str = OURS
    """The one that is compared with the others."""

    @property
    def medians(self) -> dict[str, float]:
        """Middle sample of each engine."""
        return {name: median(samples) for name, samples in self.samples.items()}

    @property
    def better_peer(self) -> str | None:
        """The peer with the better median; None if the engine is alone, or was not timed."""
        peers = {name: value for name, value in self.medians.items() if name != self.engine}
        if self.engine not in self.samples:
            return None
        choose = max if self.is_higher_better else min
        return choose(peers, key=lambda name: peers[name]) if peers else None

    @property
    def advantages(self) -> list[float]:
        """Time of the better peer over the engine's, repeat by repeat; below 1 the engine is slower."""
        if self.better_peer is None:
            return []
        pairs = zip(self.samples[self.engine], self.samples[self.better_peer], strict=True)
        return [ours / theirs if self.is_higher_better else theirs / ours for ours, theirs in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine reaches in the same run: each the best of a few calls."""

    copy_bytes_per_second: float
    """Bytes read and bytes written."""
    read_bytes_per_second: float
    product_flops_per_second: float
    """Of a product of square matrices in the dtype of the engines."""

    @classmethod
    def median_of(cls, rates: Sequence["Rates"]) -> "Rates":
        """Return the median of each."""
        return cls(**{field.name: median(getattr(rate, field.name) for rate in rates) for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthShare:
    """The bytes that decoding reads, against what the machine copies and reads."""

    workload: str
    batch_size: int
    bytes_per_step: Mapping[str, int]
    """By engine, in the form that each keeps: weights once, and the K and V of a step in the middle."""
    shares: Mapping[str, float]
    """Bytes by median step time, over the copy bandwidth, by engine."""
    read_shares: Mapping[str, float]
    """The same over the bandwidth of reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShare:
    """The products of a prefill, against the rate of products that the machine reaches."""

    workload: str
    flops: int
    shares: Mapping[str, float]
    """By engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """A whole benchmark."""

    shape: str
    num_parameters: int
    dtype: str
    seed: int
    repeats: int
    machine: MachineInfo
    rates: Sequence[Rates]
    """What the machine reaches, once a repeat."""
    measures: Sequence[Measure]
    shares: Sequence[BandwidthShare]
    product_shares: Sequence[ProductShare]
    agreements: Sequence[Agreement]
    absent: Mapping[str, str]
    """Peers that are not installed, and what an engine could not run; and why."""
    engine: str = OURS
    """The one that is compared with the others."""
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    """By engine: what the process grew by on the host when it was opened and had run every workload once."""

    threads: str = ""
    """The number of threads of all engines, and its source."""
    reference_backend: str = ""
    """The reference engine's attention backend, where it is timed, and why it is not the fast one."""

    def json(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        measures = [
            asdict(measure)
            | {"medians": measure.medians, "better_peer": measure.better_peer, "advantages": measure.advantages}
            for measure in self.measures
        ]
        return {"schema_version": SCHEMA_VERSION} | asdict(self) | {"measures": measures}


def bench_text(result: BenchResult) -> str:
    """Return what a person reads: medians, who is ahead and by how much, and what the figures depend on."""
    return "\n\n".join([_head(result), _measures(result), _bandwidth(result), _agreement(result)])


def _head(result: BenchResult) -> str:
    return "\n".join(
        [
            f"{result.shape}, {result.num_parameters / 1e6:.3g}M parameters, {result.dtype}, {result.repeats} repeats",
            result.machine.hardware,
            result.machine.software,
            *([f"threads: {result.threads}"] if result.threads else []),
            *([f"{OURS}: {result.reference_backend}"] if result.reference_backend else []),
        ]
    )


def _measures(result: BenchResult) -> str:
    timed = (name for measure in reversed(result.measures) for name in measure.samples)
    names = list(dict.fromkeys([result.engine, *timed]))
    rows = [[measure.name, measure.unit, *_cells(measure, names), _advantage(measure)] for measure in result.measures]
    header = ["median", "", *names, "against the better peer (least to most)"]
    return tabulate(rows, header, disable_numparse=True, colalign=["left", "left", *["right"] * len(names), "left"])


def _cells(measure: Measure, names: list[str]) -> list[str]:
    medians = measure.medians
    return [f"{medians[name]:.4g}" if name in medians else "-" for name in names]


def _advantage(measure: Measure) -> str:
    if measure.better_peer is None:
        return "-"
    least, *_, most = sorted([*measure.advantages] * 2)
    middle = sorted(measure.advantages)[len(measure.advantages) // 2]
    return f"{middle:.2f}x {measure.better_peer} ({least:.2f} to {most:.2f})"


def _bandwidth(result: BenchResult) -> str:
    units = {"copy_bytes_per_second": 1e9, "read_bytes_per_second": 1e9, "product_flops_per_second": 1e12}
    lines = [
        f"{words}: {_spread([getattr(rate, name) / units[name] for rate in result.rates], unit)}"
        for name, words, unit in (
            ("copy_bytes_per_second", "copy bandwidth, read and written", "GB/s"),
            ("read_bytes_per_second", "read bandwidth", "GB/s"),
            ("product_flops_per_second", "products", "TFLOP/s"),
        )
    ]
    for share in result.shares:
        megabytes = {name: f"{num_bytes / 1e6:.0f} MB" for name, num_bytes in share.bytes_per_step.items()}
        is_same = len(set(megabytes.values())) == 1
        shares = (
            f"{name} {value:.0%} ({share.read_shares[name]:.0%}{'' if is_same else f', {megabytes[name]}'})"
            for name, value in share.shares.items()
        )
        size = f"{next(iter(megabytes.values()))} a step" if is_same else "in the form that each keeps"
        what = f"share of copies (of reads), decode at {share.workload} ({size})"
        lines.append(f"{what}: {', '.join(shares)}")
    for prefill in result.product_shares:
        shares = (f"{name} {value:.0%}" for name, value in prefill.shares.items())
        lines.append(f"share of products, prefill at {prefill.workload}: {', '.join(shares)}")
    if result.resident_bytes:
        sizes = ", ".join(f"{name} {num_bytes / 1e6:.0f} MB" for name, num_bytes in result.resident_bytes.items())
        lines.append(f"resident memory: {sizes}")
    return "\n".join(lines)


def _spread(values: Sequence[float], unit: str) -> str:
    return f"{median(values):.3g} {unit} ({min(values):.3g} to {max(values):.3g})"


def _agreement(result: BenchResult) -> str:
    lines = []
    for peer in result.agreements:
        same = f"{peer.num_requests - peer.num_ties} of {peer.num_requests} requests"
        line = f"{peer.peer}: the tokens of {result.engine} in {same}"
        if peer.num_ties:
            line += f", the others part at ties (up to {peer.worst_tie_stds:.2g} standard deviations)"
        lines.append(line)
    return "\n".join([*lines, *(f"{name}: not timed, {reason}" for name, reason in result.absent.items())])
