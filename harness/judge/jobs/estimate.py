"""Estimate the cost of a check: run all of it on the first layers of the model."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from torch import nn

from harness.base.files import scratch_folder
from harness.base.memory import available_bytes, watched_memory
from harness.base.progress import Progress
from harness.base.threads import limit_threads
from harness.engines.hf import HFEngine
from harness.engines.record import record
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording
from harness.formats.schedule import Schedule
from harness.formats.taps import layer_of
from harness.judge.compare import compare_run
from harness.judge.jobs.check import planned_sample
from harness.judge.jobs.opened import describe_run, planned_model
from harness.oracle.continuation import is_shown_by_decode
from harness.oracle.decode import greedy_continuation
from harness.oracle.golden import PLAIN
from harness.oracle.make_golden import make_golden, open_cached_golden
from harness.oracle.model import HFModel
from harness.oracle.requests import batch_requests
from harness.oracle.untraced import keeps_parts, parts_kept
from harness.oracle.weights import ResidentWeights
from harness.plan import Plan
from harness.results.check import CheckCost, PhaseCost

NUM_LAYERS = 2
"""Layers that are run: the first one runs with cold caches."""
_clock = time.perf_counter


def run_estimate(plan: Plan, *, progress: Progress | None = None) -> CheckCost:
    """Return the cost of the plan's check without the engine's own runs; nothing is judged.

    A plain golden is made and compared with HF's own recording, on the first layers; that a verdict asks for the truth
    is not foreseen. The time of a layer is multiplied by
    the number of layers, in proportion to their parameters; the time to write and read is in proportion to the bytes.
    The golden is made again here, so an estimate costs as much as a check of the first layers.

    Raises:
        HarnessError: the input cannot be used; BAD_OPTION: the model has no list of layers.
    """
    (progress or (lambda _label, _done, _total: None))("first layers", 0, 1)
    start = _clock()
    if plan.case.mtp:
        what = "layers that predict further tokens follow all others, and two layers are measured"
        raise HarnessError(Code.BAD_OPTION, what, where="--estimate", actual="--mtp", hint="leave --mtp out")
    hf = planned_model(plan)
    loaded_s = _clock() - start
    has_golden = open_cached_golden(hf, plan.prompts, truth=plan.case.truth) is not None
    keeps, free = keeps_parts(hf), available_bytes()
    weights = sum(parameter.numel() * hf.dtype.itemsize for parameter in hf.model.parameters())
    first = _first_layers(hf)
    is_kept = keeps or isinstance(hf.weights, ResidentWeights)
    with (
        limit_threads(int(getattr(hf.config, "hidden_size", 0))),
        scratch_folder("harness-") as folder,
        parts_kept(hf) if keeps else nullcontext(),
    ):
        run = _Run(plan, hf, first, folder)
        run.measure()
        return CheckCost(
            model=plan.case.model,
            dtype=plan.case.dtype,
            num_requests=len(plan.prompts),
            num_tokens=sum(len(request.token_ids) for request in run.golden.requests),
            num_layers=first.num_layers,
            num_measured=len(first.paths),
            has_golden=has_golden,
            phases=(
                PhaseCost(name="loading", seconds=loaded_s, read_bytes=weights if is_kept else 0),
                *run.phases(0 if is_kept else weights, has_golden=has_golden),
            ),
            num_engine_runs=len(plan.schedules) + 1,
            golden_bytes=run.golden_bytes.all,
            recording_bytes=run.recording_bytes.all,
            peak_bytes=run.peak_bytes,
            available_bytes=free,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstLayers:
    """The layers that a model is cut to."""

    paths: tuple[str, ...]
    num_layers: int
    """Layers of the whole model."""
    share: float
    """Parameters of all layers divided by those of the remaining ones."""


def _first_layers(hf: HFModel) -> _FirstLayers:
    """Cut a model that was not run yet to its first layers, and the lists of its config to as many entries."""
    parents = [path.rpartition(".")[0] for path in hf.parts if path.rpartition(".")[2].isdecimal()]
    if not parents:
        raise HarnessError(Code.BAD_OPTION, "the model has no list of layers to measure", where="--estimate")
    path = max(set(parents), key=parents.count)
    layers = list(hf.module(path))  # type: ignore[call-overload]
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    num = min(NUM_LAYERS, len(layers))
    parent, _, name = path.rpartition(".")
    setattr(hf.module(parent), name, nn.ModuleList(layers[:num]))
    for config in {id(item): item for item in (hf.config, hf.model.config)}.values():
        for key, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == len(layers):
                setattr(config, key, value[:num])
    hf.config.num_hidden_layers = num
    vars(hf).pop("parts", None)
    paths = tuple(f"{path}.{index}" for index in range(num))
    return _FirstLayers(paths=paths, num_layers=len(layers), share=sum(sizes) / sum(sizes[:num]))


@dataclass(slots=True)
class _Seconds:
    """Seconds of a phase: in the layers that were run, and in the rest."""

    layers: float = 0.0
    others: float = 0.0


@dataclass(slots=True)
class _Bytes:
    """Bytes of a recording: as it was made, and with all layers."""

    measured: int
    all: int

    @classmethod
    def of(cls, recording: Recording, more: float) -> "_Bytes":
        """Count the bytes, those of layers `more` times for the whole model."""
        tensors = [(tap, step.tap(tap)) for step in recording.steps for tap in step.tap_names]
        layers = sum(rows.numel() * rows.itemsize for tap, rows in tensors if layer_of(tap) is not None)
        num_bytes = sum(step.entry.num_bytes for step in recording.steps)
        return cls(num_bytes, num_bytes + round(layers * (more - 1)))

    @property
    def share(self) -> float:
        return self.all / self.measured


class _Marks:
    """The times at which the parts of the model were finished, from its progress.

    Args:
        parts: in the order in which they run, which need not be that of `hf.parts`.
        layers: which of them are layers.
    """

    def __init__(self, parts: Sequence[str], layers: Sequence[str]) -> None:
        self._parts, self._layers = parts, layers
        self._events: list[tuple[str, int, float]] = []

    def note(self, label: str, done: int, _total: int) -> None:
        """See `Progress`."""
        self._events.append((label, done, _clock()))

    def begin(self, phase: str) -> float:
        """Return the time at which the first part of a phase was finished."""
        return next(at for label, _, at in self._events if label.startswith(phase))

    def seconds(self, phase: str) -> _Seconds:
        """Return the seconds of a phase, without its first part, the embedding."""
        seconds = _Seconds()
        for (before, _, begin), (label, done, end) in pairwise(self._events):
            if before == label and label.startswith(phase):
                if self._parts[done - 1] in self._layers:
                    seconds.layers += end - begin
                else:
                    seconds.others += end - begin
        return seconds


class _Run:
    """The phases of a check, on the first layers of its model."""

    def __init__(self, plan: Plan, hf: HFModel, first: _FirstLayers, folder: Path) -> None:
        self._plan, self._hf, self._first, self._folder = plan, hf, first, folder
        self._more = first.num_layers / len(first.paths)
        self._graph, self._continuation = _Seconds(), _Seconds()
        self._order: list[str] = []
        """The parts of the model, in the order in which they run."""

    def measure(self) -> None:
        """Run every phase once."""
        with self._timed(self._graph), self._order_noted():
            _ = self._hf.graph
        with watched_memory() as peak:
            self._make_golden()
            self._compare()
        self.peak_bytes = max(peak, default=None)

    @contextmanager
    def _timed(self, seconds: _Seconds) -> Iterator[None]:
        """Time a block, and its share from the beginning of the first layer to the end of the last."""
        begins, layers = [0.0], [self._hf.module(path) for path in self._first.paths]

        def end(_module: nn.Module, _args: object, _output: object) -> None:
            seconds.layers += _clock() - begins[-1]

        with ExitStack() as stack:
            begin = layers[0].register_forward_pre_hook(lambda _module, _args: begins.append(_clock()))
            stack.callback(begin.remove)
            stack.callback(layers[-1].register_forward_hook(end).remove)
            start = _clock()
            yield
            seconds.others = _clock() - start - seconds.layers

    @contextmanager
    def _order_noted(self) -> Iterator[None]:
        """Note the order in which the parts of the model run."""

        def note(_module: nn.Module, _args: object, path: str) -> None:
            if path not in self._order:
                self._order.append(path)

        with ExitStack() as stack:
            for path in self._hf.parts:
                hook = self._hf.module(path).register_forward_pre_hook(partial(note, path=path))
                stack.callback(hook.remove)
            yield

    def _make_golden(self) -> None:
        """Make what a check begins with: a plain golden, or the truth of a model that has none."""
        plan, marks, out = self._plan, _Marks(self._order, self._first.paths), self._folder / "golden"
        self._truth, self._truth_rest = _Seconds(), 0.0
        if is_shown_by_decode(self._hf, plan.prompts):
            with self._timed(self._continuation):
                self.golden = make_golden(self._hf, plan.prompts, out, truth=PLAIN, keeps_values=False)
        else:
            with self._timed(self._continuation):
                for prompt in plan.prompts:
                    greedy_continuation(self._hf, prompt.token_ids, prompt.max_new_tokens, prompt.inputs)
            self.golden = make_golden(
                self._hf, plan.prompts, out, truth=plan.case.truth, progress=marks.note, keeps_values=False
            )
            self._truth = marks.seconds("truth")
            self._truth_rest = _clock() - marks.begin("truth") - self._truth.layers - self._truth.others
        self.golden_bytes = _Bytes.of(self.golden.recording, self._more)
        start = _clock()
        self.golden.recording.verify_all()
        self._verify = _clock() - start

    def _compare(self) -> None:
        plan, marks = self._plan, _Marks(self._order, self._first.paths)
        run = describe_run(plan, Schedule.of("plain"), self.golden.requests, self._folder / "recording")
        record(HFEngine(self._hf, None), run)
        with Recording.open(run.folder, verify=False) as actual:
            start = _clock()
            sample = planned_sample(plan)
            compare_run(actual, self.golden, hf=self._hf, truth=plan.case.truth, sample=sample, progress=marks.note)
            total = _clock() - start
            self.recording_bytes = _Bytes.of(actual, self._more)
        self._replay = marks.seconds("replay")
        self._replay_rest = total - self._replay.layers - self._replay.others

    def phases(self, weights: int, *, has_golden: bool) -> Iterator[PhaseCost]:
        """Return the phases of the whole model; each run of the model reads `weights` bytes."""
        batches, golden = len(batch_requests(self._hf, self.golden.requests)), self.golden_bytes
        if has_golden:
            yield PhaseCost(name="golden from the cache", seconds=golden.share * self._verify, read_bytes=golden.all)
        else:
            tokens = sum(prompt.max_new_tokens for prompt in self._plan.prompts)
            seconds = self._all(self._truth) + golden.share * self._truth_rest
            yield PhaseCost(name="graph of the model", seconds=self._all(self._graph), read_bytes=2 * weights)
            yield PhaseCost(name="continuation", seconds=self._all(self._continuation), read_bytes=weights * tokens)
            if seconds:
                yield PhaseCost(name="truth and control", seconds=seconds, read_bytes=weights * batches)
        times = sum(1 + schedule.is_repeated for schedule in self._plan.schedules)
        once = self._all(self._replay) + self._more * self._replay_rest
        read = weights * batches + golden.all + 2 * self.recording_bytes.all
        yield PhaseCost(name=f"comparison, {times} times", seconds=times * once, read_bytes=times * read)

    def _all(self, seconds: _Seconds) -> float:
        return seconds.others + self._first.share * seconds.layers
