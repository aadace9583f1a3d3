"""The benchmark: build the model, open the engines, see that they agree, and time them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from harness.base.environment import describe_machine
from harness.base.files import scratch_folder
from harness.base.progress import Progress, quiet_transformers
from harness.engines.adapter import engine_module, refuse_unknown_options
from harness.errors import Code, HarnessError
from harness.extensions.bench.agreement import Agreement, find_divergences, judge_divergences
from harness.extensions.bench.hf import load_hf_model
from harness.extensions.bench.peer import (
    OURS,
    BenchConfig,
    BenchWorkload,
    Generation,
    Peer,
    even_workload,
    uneven_workload,
)
from harness.extensions.bench.peers import PEERS, OpenPeers, check_peer_names, open_peers, peer_groups
from harness.extensions.bench.report import BandwidthShare, BenchResult, Measure, ProductShare, Rates
from harness.extensions.bench.shape import Shape, Sizes, build_checkpoint, find_shape, quantise_checkpoint, sizes_of
from harness.formats.case import DTYPES
from harness.formats.checkpoint import Checkpoint
from harness.profiling.roofline import best_seconds, measure_ceilings
from reference_engine.launch import choose_backend, engine_threads

CONTINUOUS_BATCHING_LOGGER = "ContinuousBatchingLogger"


@contextmanager
def quiet_peers() -> Iterator[None]:
    """Silence transformers, with its continuous batching, which warns of its memory at every start."""
    logger = logging.getLogger(CONTINUOUS_BATCHING_LOGGER)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with quiet_transformers():
            yield
    finally:
        logger.disabled = was_disabled


def read_bandwidth(device: str, num_bytes: int | None = None) -> float:
    """Return bytes read a second, of the fastest of a few sums over far more than any cache holds."""
    num_bytes = num_bytes or (2 << 30 if torch.device(device).type == "cuda" else 256 << 20)
    source = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / best_seconds(source.sum, device)


BATCH_SIZES = (1, 16)
Tokens = dict[str, Sequence[Sequence[int]]]
"""The tokens generated for each request of a workload, by engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A workload with all of its generations, one a repeat, by engine."""

    workload: BenchWorkload
    generations: dict[str, list[Generation]] = field(default_factory=dict)


@dataclass(slots=True)
class Timings:
    """The results of all groups of engines."""

    timed: list[Timed]
    tokens: list[Tokens]
    """Of each workload."""
    rates: list[Rates] = field(default_factory=list)
    """What the machine reaches, once a repeat of each group."""
    agreements: list[Agreement] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    grown_bytes: dict[str, int] = field(default_factory=dict)
    """Resident memory, by engine."""


def run_bench(
    *,
    shape_name: str,
    checkpoint: Checkpoint | None = None,
    dtype: str,
    device: str,
    repeats: int,
    seed: int = 0,
    peer_names: Sequence[str] = (),
    num_requests: int | None = None,
    batch_sizes: Sequence[int] = (),
    prompt_lens: Sequence[int] = (),
    engine_options: Mapping[str, str],
    progress: Progress,
    engine: str = OURS,
    has_float8_weights: bool = False,
) -> BenchResult:
    """Benchmark an engine and its peers on a model of a shape.

    Without a checkpoint the weights of the shape are random; `shape_name` is then its name, and else the user's name of
    the checkpoint. Without peer names the usual ones are timed. `num_requests` replaces the shape's number for the
    uneven workload, and `batch_sizes` and `prompt_lens` those of the even ones. With float8 weights the engine reads
    the matrices of a shape's layers in float8, and its peers the same values in `dtype`.

    Raises:
        HarnessError: BAD_OPTION: a shape, dtype or peer is unknown, or a checkpoint is to be in float8.
            PEER_TOKENS_DIFFER: the engines disagree. UNKNOWN_ENGINE; ENGINE_LACKS_METHOD: the engine cannot continue
            prompts.
    """
    sizes: Sizes = find_shape(shape_name) if checkpoint is None else sizes_of(checkpoint)
    check_peer_names(peer_names)
    _check_engine(engine, engine_options)
    _check_dtype(dtype)
    if has_float8_weights and checkpoint is not None:
        what = "a checkpoint of one's own is timed as it is"
        raise HarnessError(Code.BAD_OPTION, what, where="--float8-weights", hint="leave out --model, or this option")
    workloads = _workloads(sizes, seed, num_requests, batch_sizes, prompt_lens)
    with (
        quiet_peers(),
        engine_threads(sizes.hidden_size, device) as threads,
        scratch_folder("harness-") as temporary,
    ):
        progress("building the model", 0, 1)
        if isinstance(sizes, Shape):
            build_checkpoint(sizes, temporary / "model", dtype=dtype, seed=seed, device=device)
            checkpoint = Checkpoint(temporary / "model")
            if has_float8_weights:
                quantise_checkpoint(temporary / "model", temporary / "float8")
        assert checkpoint is not None
        num_parameters = sum(entry.num_elements for entry, _ in checkpoint.tensors.values())
        setting = BenchConfig(
            folder=checkpoint.folder,
            scratch=temporary,
            dtype=dtype,
            device=device,
            num_threads=torch.get_num_threads(),
            engine=engine,
            engine_options=engine_options,
            engine_folder=temporary / "float8" if has_float8_weights else None,
            **_limits(workloads),
        )
        groups = peer_groups(peer_names, device, engine)
        timings = _run_groups(groups, workloads, setting, [engine, *peer_names], repeats, progress)
        backend = _reference_backend(timings, setting)
        shares = _shares(timings, sizes, setting) if isinstance(sizes, Shape) else []
        machine = describe_machine(device)
    return BenchResult(
        shape=shape_name,
        num_parameters=num_parameters,
        dtype=dtype,
        seed=seed,
        repeats=repeats,
        machine=machine,
        rates=timings.rates,
        measures=_measures(timings.timed, engine),
        shares=shares,
        product_shares=_product_shares(timings, sizes, num_parameters) if isinstance(sizes, Shape) else [],
        agreements=timings.agreements,
        absent=timings.absent,
        engine=engine,
        resident_bytes=timings.grown_bytes,
        threads=threads,
        reference_backend=backend,
    )


def _limits(workloads: Sequence[BenchWorkload]) -> dict[str, int]:
    """Return the longest request of some workloads, and the largest of them in tokens and in requests."""
    return {
        "max_request_len": max(max(workload.request_lens) for workload in workloads),
        "max_total_len": max(sum(workload.request_lens) for workload in workloads),
        "max_requests": max(len(workload.prompts) for workload in workloads),
    }


def _reference_backend(timings: Timings, setting: BenchConfig) -> str:
    """Describe the backend of the reference engine, the one that is timed or a peer; empty if it is neither."""
    if not any(OURS in tokens for tokens in timings.tokens):
        return ""
    chosen = choose_backend(setting.options_of(OURS), folder=setting.folder, device=setting.device)
    return chosen.description


def _check_engine(engine: str, options: Mapping[str, str]) -> None:
    """Refuse a name that no engine has, and options that are not read."""
    if engine not in PEERS:
        engine_module(engine)  # raises where there is none
    elif engine != OURS:
        refuse_unknown_options(engine, options, ())


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise HarnessError(Code.BAD_OPTION, "unknown dtype", where="--dtype", expected=", ".join(DTYPES), actual=dtype)


def _workloads(
    sizes: Sizes, seed: int, num_requests: int | None, batch_sizes: Sequence[int], prompt_lens: Sequence[int]
) -> list[BenchWorkload]:
    """Return the even workloads, one for each batch size and length of prompts, and after them the uneven one."""
    even = [
        even_workload(size, prompt_len=length, output_len=sizes.decode_len, vocab_size=sizes.vocab_size, seed=seed)
        for length in prompt_lens or (sizes.prompt_len,)
        for size in batch_sizes or BATCH_SIZES
    ]
    if prompt_lens:
        even = [replace(work, name=f"{work.name}, {len(work.prompts[0])} tokens") for work in even]
    uneven = replace(sizes.uneven, num_requests=num_requests or sizes.uneven.num_requests)
    return [*even, uneven_workload(uneven, vocab_size=sizes.vocab_size, seed=seed)]


def _run_groups(
    groups: Sequence[Sequence[str]],
    workloads: Sequence[BenchWorkload],
    setting: BenchConfig,
    required: Sequence[str],
    repeats: int,
    progress: Progress,
) -> Timings:
    """Time the engines of each group while they are open; their tokens are compared before, or once all are closed."""
    timings = Timings(timed=[Timed(workload=workload) for workload in workloads], tokens=[{} for _ in workloads])
    for group in groups:
        with open_peers(group, setting, required=required) as opened:
            timings.absent |= opened.absent
            timings.absent |= _run_once(opened, workloads, timings.tokens, progress)
            timings.grown_bytes |= opened.memory.grown_bytes
            if len(groups) == 1:  # nothing is timed in vain
                timings.agreements = _agree(timings.tokens, workloads, setting, progress)
            timings.rates += _time(opened.peers, timings.timed, timings.tokens, setting, repeats, progress)
    if len(groups) > 1:  # the model that judges needs the memory that the engines had
        timings.agreements = _agree(timings.tokens, workloads, setting, progress)
    return timings


def _run_once(
    opened: OpenPeers, workloads: Sequence[BenchWorkload], tokens: Sequence[Tokens], progress: Progress
) -> dict[str, str]:
    """Run everything once, which also warms everything up, and keep the tokens of each workload.

    Returns what an engine says that it does not serve, and why.
    """
    not_served = {}
    for index, (workload, tokens_by_peer) in enumerate(zip(workloads, tokens, strict=True)):
        progress("comparing tokens", index, len(workloads))
        for peer in opened.peers:
            try:
                with opened.memory.of(peer.name):
                    tokens_by_peer[peer.name] = peer.generate(workload).token_ids
            except HarnessError as error:
                if error.code is not Code.ENGINE_CANNOT_SERVE:
                    raise
                not_served[f"{peer.name}, {workload.name}"] = error.what
    return not_served


def _agree(
    tokens: Sequence[Tokens], workloads: Sequence[BenchWorkload], setting: BenchConfig, progress: Progress
) -> list[Agreement]:
    """Compare each peer's tokens with the engine's, of the workloads that both have run."""
    engine = setting.engine
    ties: dict[str, list[float]] = {name: [] for tokens_by_peer in tokens for name in tokens_by_peer if name != engine}
    num_requests = dict.fromkeys(ties, 0)
    model = None
    for index, (workload, tokens_by_peer) in enumerate(zip(workloads, tokens, strict=True)):
        progress("judging tokens", index, len(workloads))
        if engine not in tokens_by_peer:
            continue
        for name in tokens_by_peer.keys() - {engine}:
            num_requests[name] += len(workload.prompts)
        divergences = find_divergences(workload, tokens_by_peer, engine)
        if divergences:
            model = model or load_hf_model(setting, "float32")
            judged = judge_divergences(
                divergences, workload, tokens_by_peer[engine], model, dtype=setting.dtype, engine=engine
            )
            for name, distances in judged.items():
                ties[name] += distances
    return [
        Agreement(
            peer=name,
            num_requests=num_requests[name],
            num_ties=len(tokens_by_peer),
            worst_tie_stds=max(tokens_by_peer, default=0.0),
        )
        for name, tokens_by_peer in ties.items()
    ]


def _time(
    peers: Sequence[Peer],
    timed: Sequence[Timed],
    tokens: Sequence[Tokens],
    setting: BenchConfig,
    repeats: int,
    progress: Progress,
) -> list[Rates]:
    """Time engines in turn in each repeat, in the opposite order in every second one; return what the machine reaches.

    What an engine has made no tokens for, it does not serve.
    """
    rates = []
    for repeat in range(repeats):
        progress("timing", repeat, repeats)
        rates.append(measure_rates(setting.dtype, setting.device))
        for timed_workload, served in zip(timed, tokens, strict=True):
            for peer in peers if repeat % 2 == 0 else reversed(peers):
                if peer.name in served and (peer.shows_steps or timed_workload is timed[-1]):
                    timed_workload.generations.setdefault(peer.name, []).append(peer.generate(timed_workload.workload))
    return rates


def measure_rates(dtype: str, device: str) -> Rates:
    """Measure how fast the machine copies, reads and multiplies."""
    ceilings = measure_ceilings(getattr(torch, dtype), device)
    return Rates(
        copy_bytes_per_second=ceilings.copy_bytes_per_s,
        read_bytes_per_second=read_bandwidth(device),
        product_flops_per_second=ceilings.matmul_flops_per_s,
    )


def _measures(timed: Sequence[Timed], engine: str) -> list[Measure]:
    *even, uneven = timed

    def measure(name: str, unit: str, timed: Timed, value: Callable[[Generation], float]) -> Measure:
        samples = {peer: [value(run) for run in runs] for peer, runs in timed.generations.items() if runs}
        return Measure(name=name, unit=unit, is_higher_better=unit == "tok/s", samples=samples, engine=engine)

    return [
        *(
            measure(f"prefill, {item.workload.name}", "tok/s", item, partial(_prefill_rate, item.workload))
            for item in even
            if len(item.workload.prompts) == 1
        ),
        *(
            measure(f"decode step, {item.workload.name}", "ms", item, lambda run: 1000 * run.decode_step_seconds)
            for item in even
        ),
        measure("uneven workload", "tok/s", uneven, lambda run: uneven.workload.num_output_tokens / run.seconds),
    ]


def _prefill_rate(workload: BenchWorkload, run: Generation) -> float:
    return workload.num_prompt_tokens / run.prefill_seconds


def _shares(timings: Timings, shape: Shape, setting: BenchConfig) -> list[BandwidthShare]:
    """Relate a decode step's bytes to its time."""
    rates = Rates.median_of(timings.rates)

    def share(timed: Timed) -> BandwidthShare:
        workload, seconds = timed.workload, _medians(timed, "decode_step_seconds")
        num_bytes = {name: _step_bytes(name, workload, shape, setting) for name in seconds}
        rate = {name: num_bytes[name] / seconds[name] for name in seconds}
        return BandwidthShare(
            workload=workload.name,
            batch_size=len(workload.prompts),
            bytes_per_step=num_bytes,
            shares={name: value / rates.copy_bytes_per_second for name, value in rate.items()},
            read_shares={name: value / rates.read_bytes_per_second for name, value in rate.items()},
        )

    return [share(timed) for timed in timings.timed[:-1]]


def _step_bytes(name: str, workload: BenchWorkload, shape: Shape, setting: BenchConfig) -> int:
    """Return what an engine reads in a step of decode: its checkpoint, and its K and V.

    An embedding that is not the head is read by the row, for nothing.
    """
    itemsize: int = getattr(torch, setting.dtype).itemsize
    cache_dtype = setting.options_of(name).get("kv_cache_dtype", "auto") if name == OURS else "auto"
    cache_itemsize = itemsize if cache_dtype == "auto" else getattr(torch, cache_dtype).itemsize
    num_cached = len(workload.prompts) * workload.mean_decode_context * shape.kv_elements_per_token
    num_stored = sum(entry.num_bytes for entry, _ in Checkpoint(setting.folder_of(name)).tensors.values())
    num_unread = 0 if shape.is_tied else shape.vocab_size * shape.hidden_size * itemsize
    return num_stored - num_unread + int(num_cached * cache_itemsize)


def _product_shares(timings: Timings, shape: Shape, num_parameters: int) -> list[ProductShare]:
    """Relate the products of a prefill to its time; those of the head are of one token, and left out."""
    num_outside = shape.vocab_size * shape.hidden_size * (1 if shape.is_tied else 2)
    rates = Rates.median_of(timings.rates)

    def share(timed: Timed) -> ProductShare:
        flops = 2 * (num_parameters - num_outside) * timed.workload.num_prompt_tokens
        medians = _medians(timed, "prefill_seconds").items()
        return ProductShare(
            workload=timed.workload.name,
            flops=flops,
            shares={name: flops / seconds / rates.product_flops_per_second for name, seconds in medians},
        )

    return [share(timed) for timed in timings.timed[:-1] if len(timed.workload.prompts) == 1]


def _medians(timed: Timed, name: str) -> dict[str, float]:
    """Return the median of a time of all generations of each engine."""
    return {peer: median(getattr(run, name) for run in runs) for peer, runs in timed.generations.items() if runs}
