"""One check under one setting, with a fault in the engine or without, and the harness's score over all of them.

The score says which faults were found, where, and why, and at what the harness cried wolf.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors.torch
import torch

from harness.base.files import scratch_folder
from harness.base.numerics import Numerics
from harness.base.progress import Progress
from harness.engines import Workload
from harness.errors import Code, HarnessError
from harness.extensions.faults.conventions import in_format
from harness.extensions.faults.fault import BLOCK_SIZE, PROMPT_LENGTHS, Fault, FaultConfig, Variant
from harness.extensions.faults.injection import InjectedFault
from harness.extensions.faults.peers import RULES, TOKENS, PeerVerdict, judge_as_peers
from harness.formats.case import RequestSpec
from harness.formats.checkpoint import embedded_cases
from harness.formats.recording import Recording, RecordingWriter
from harness.judge.culprit import CULPRIT
from harness.judge.jobs.check import run_check
from harness.judge.jobs.opened import planned_model, with_duplicate_requests
from harness.oracle.golden import Golden
from harness.oracle.make_golden import checked_golden
from harness.plan import Plan, plan_request
from harness.results.check import CheckResult, Divergence, Explanation, Finding, Outcome, RunResult

_VOCABULARY = range(3, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrial:
    """The result of a check."""

    result: CheckResult | None
    """None if the engine raised."""
    error: HarnessError | None
    num_calls: int
    """The number of times that the injected code ran."""
    peers: Mapping[str, PeerVerdict]
    """The verdicts of other people's rules on the same recording; empty if the engine raised."""

    @property
    def is_alarm(self) -> bool:
        """Whether the check would have failed."""
        return self.error is not None or (self.result is not None and self.result.outcome is not Outcome.PASS)


def try_fault(fault: Fault, *, seed: int = 0, device: str = "cpu") -> FaultTrial:
    """Check the reference engine with a fault in it, and take the fault out again."""
    if fault.suite is not None:
        with fault.inject() as planted:
            return _tested(fault.suite, planted)
    with checkpoint(fault.setting) as folder, fault.inject() as planted:
        return _checked(_declared_plan(fault.setting, folder, "reference", seed, device), planted)


def _tested(suite: Callable[[], None], planted: InjectedFault) -> FaultTrial:
    """Run a property suite; other rules do not apply to it."""
    broken: HarnessError | None = None
    try:
        suite()
    except HarnessError as error:
        if error.code is not Code.PROPERTY_VIOLATED:
            raise
        broken = error
    return FaultTrial(result=None, error=broken, num_calls=planted.num_calls, peers={})


def try_variant(variant: Variant, *, seed: int = 0, device: str = "cpu") -> FaultTrial:
    """Check an engine that is legitimately different."""
    with checkpoint(variant.setting) as folder, _injected(variant) as planted:
        return _checked(_declared_plan(variant.setting, folder, variant.engine, seed, device), planted)


def check_variant(variant: Variant, *, seed: int, out: Path) -> CheckResult:
    """Check an engine that is legitimately different, and leave the recordings in the empty folder `out`.

    Raises:
        HarnessError: The engine raised, or the check could not be made.
    """
    with checkpoint(variant.setting) as folder, _injected(variant):
        return run_check(_declared_plan(variant.setting, folder, variant.engine, seed, "cpu"), out=out)


def _injected(variant: Variant) -> AbstractContextManager[InjectedFault]:
    return variant.inject() if variant.inject else nullcontext(InjectedFault())


def plan_of(
    setting: FaultConfig, folder: Path, *, engine: str = "reference", seed: int = 0, device: str = "cpu"
) -> Plan:
    """Return the check that a setting describes, of the checkpoint in `folder`."""
    return plan_request(
        model=str(folder),
        engine=engine,
        dtype=setting.dtype,
        device=device,
        requests=[RequestSpec(token_ids=list(tokens)) for tokens in setting.prompts or random_prompts(seed)],
        max_new_tokens=setting.max_new_tokens,
        schedules=[setting.schedule],
        engine_options=_options(setting) if engine == "reference" else setting.options,
        local_files_only=True,
    )


def _checked(plan: Plan, planted: InjectedFault) -> FaultTrial:
    with scratch_folder("harness-") as out:
        try:
            result = run_check(plan, out=out / "recordings")
        except HarnessError as error:
            return FaultTrial(result=None, error=error, num_calls=planted.num_calls, peers={})
        (recording,) = (path for path in (out / "recordings").iterdir() if path.name != CULPRIT)
        with Recording.open(recording, verify=False) as actual:
            peers = judge_as_peers(actual, _golden(plan), result.runs[0])
    return FaultTrial(result=result, error=None, num_calls=planted.num_calls, peers=peers)


def _declared_plan(setting: FaultConfig, folder: Path, engine: str, seed: int, device: str) -> Plan:
    plan = plan_of(setting, folder, engine=engine, seed=seed, device=device)
    return plan if setting.numerics is None else replace(plan, subject=_Declaring(plan, setting.numerics))


class _Declaring:
    """The plan's engine, with something to say of its arithmetic."""

    def __init__(self, plan: Plan, numerics: Numerics) -> None:
        self._engine = plan.open_engine()
        self.name = self._engine.name
        self.capabilities = replace(self._engine.capabilities, numerics=numerics)

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """See `Engine.run`."""
        self._engine.run(workload, writer)


def _golden(plan: Plan) -> Golden:
    """Return the golden that the check was made against."""
    hf = planned_model(plan)
    golden, _ = with_duplicate_requests(
        plan, checked_golden(hf, plan.prompts, truth=plan.case.truth), plan.schedules[0], hf
    )
    return golden.truth


def _options(setting: FaultConfig) -> dict[str, str]:
    return {"block_size": str(BLOCK_SIZE), **setting.options}


def random_prompts(seed: int) -> list[list[int]]:
    """Return token ids of `PROMPT_LENGTHS`."""
    generator = torch.Generator().manual_seed(seed)
    low, high = _VOCABULARY.start, _VOCABULARY.stop
    return [torch.randint(low, high, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@contextmanager
def checkpoint(setting: FaultConfig) -> Iterator[Path]:
    """Yield the setting's checkpoint: an embedded one, or a copy of it with another config or other weights."""
    source = embedded_cases() / "checkpoints" / setting.model
    if not (setting.config or setting.scaled or setting.weights_in):
        yield source
        return
    with scratch_folder("harness-") as scratch:
        folder = scratch / "model"
        folder.mkdir()
        for path in source.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(setting.config)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        _change_weights(Path(folder), setting)
        yield Path(folder)


def _change_weights(folder: Path, setting: FaultConfig) -> None:
    """Scale and round weights of a checkpoint whose files are links, and put files in the place of the links."""
    for path in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        for name in tensors.keys() & setting.scaled.keys():
            tensors[name] *= setting.scaled[name]
        if setting.weights_in is not None:
            tensors = {name: in_format(tensor, setting.weights_in) for name, tensor in tensors.items()}
        path.unlink()
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScore:
    """The score of one fault."""

    fault: Fault
    detected: bool
    localised: bool
    """The first alarm is at the true tap and row; or the engine raised if that is the truth."""
    named: bool
    named_wrongly: bool
    """A cause is asserted, and it is not the true one."""
    first: Divergence | Finding | None
    error: str | None
    """The error that the engine raised."""
    explanation: Explanation | None
    peers: dict[str, tuple[bool, bool]]
    """Other people's rules: detected, and in the right layer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantScore:
    """The score of one benign run."""

    variant: Variant
    seed: int
    is_alarm: bool
    message: str
    """Of the first finding."""
    peers: dict[str, bool]
    """Alarms of other people's rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Everything that was tried."""

    faults: list[FaultScore]
    variants: list[VariantScore]
    seconds: float
    equivalent: list[Fault] = field(default_factory=list)
    """Faults that nothing can show; they are not counted."""

    @property
    def detected(self) -> int:
        """Faults with any alarm."""
        return sum(score.detected for score in self.faults)

    @property
    def localised(self) -> int:
        """Faults found first where they are."""
        return sum(score.localised for score in self.faults)

    @property
    def named(self) -> int:
        """Faults whose cause is said."""
        return sum(score.named for score in self.faults)

    @property
    def named_wrongly(self) -> int:
        """Faults of which a cause is asserted that is not theirs."""
        return sum(score.named_wrongly for score in self.faults)

    @property
    def false_alarms(self) -> int:
        """Benign runs with an alarm."""
        return sum(score.is_alarm for score in self.variants)


def keep_score(
    faults: Sequence[Fault],
    variants: Iterable[Variant] = (),
    *,
    seeds: int = 1,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Score:
    """Try every fault once, and every variant with each of `seeds` sets of prompts, with the engine on a device."""
    report = progress or (lambda _label, _done, _total: None)
    begin = time.perf_counter()
    counted = [fault for fault in faults if not fault.equivalent]
    benign = [(variant, seed) for variant in variants for seed in range(seeds)]
    total = len(counted) + len(benign)
    fault_scores, variant_scores = [], []
    for index, fault in enumerate(counted):
        report(f"faults: {fault.id}", index, total)
        fault_scores.append(score_fault(fault, try_fault(fault, device=device)))
    for index, (variant, seed) in enumerate(benign):
        report(f"faults: variant {variant.id}", len(counted) + index, total)
        variant_scores.append(_score_variant(variant, seed, device))
    report("done", total, total)
    return Score(
        faults=fault_scores,
        variants=variant_scores,
        seconds=time.perf_counter() - begin,
        equivalent=[fault for fault in faults if fault.equivalent],
    )


def score_fault(fault: Fault, trial: FaultTrial) -> FaultScore:
    """Hold what was said of a fault against the truth.

    Raises:
        HarnessError: INTERNAL: the planted code never ran, so that nothing was tried.
    """
    if trial.num_calls == 0:
        what = f"the fault {fault.id} was never reached: it proves nothing"
        raise HarnessError(Code.INTERNAL, what, where="harness.extensions.faults", hint="correct its setting")
    if trial.error is not None:
        message = str(trial.error)
        return FaultScore(
            fault=fault,
            detected=fault.tap is None,  # where an operation is expected, an exception is the planted code's own
            localised=fault.tap is None,
            named=fault.tap is None and _says(fault.cause, message),
            named_wrongly=False,
            first=None,
            error=message.splitlines()[0],
            explanation=None,
            peers=dict.fromkeys((*RULES, TOKENS), (fault.suite is None,) * 2),
        )
    if trial.result is None:
        nothing = dict.fromkeys((*RULES, TOKENS), (False, False))
        return FaultScore(
            fault=fault, detected=False, localised=False, named=False, named_wrongly=False, first=None, error=None,
            explanation=None, peers=nothing,
        )  # fmt: skip
    (run,) = trial.result.runs
    first = _first(run)
    explanation = first.explanation if first else None
    asserts = explanation is not None and explanation.is_cause
    named = explanation is not None and asserts and _says(fault.cause, _text(explanation))
    return FaultScore(
        fault=fault,
        detected=trial.is_alarm,
        localised=first is not None and first.tap == fault.tap and (first.request, first.position) == fault.row,
        named=named,
        named_wrongly=asserts and not named,
        first=first,
        error=None,
        explanation=explanation,
        peers={name: (peer.is_alarm, _same_layer(peer.tap, fault.tap)) for name, peer in trial.peers.items()},
    )


def _first(run: RunResult) -> Divergence | Finding | None:
    """The first operation that is wrong; where none is, the first finding that is about one."""
    if run.first_divergence is not None:
        return run.first_divergence
    return next((finding for finding in run.findings if finding.tap is not None), None)


def _text(explanation: Explanation) -> str:
    """The statement of a cause, without the rows."""
    return f"{explanation.cause}; {explanation.detail}"


def _says(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _same_layer(shown: str | None, truth: str | None) -> bool:
    """Whether a tap is of the layer of the truth; what comes after the layers is one by itself."""

    def layer(tap: str) -> str:
        return ".".join(tap.split(".")[:3]) if tap.startswith("model.layers.") else tap

    if shown is None or truth is None:
        return False
    return layer(shown) == layer("model.layers.0" if truth == "model.embed_tokens" else truth)


def _score_variant(variant: Variant, seed: int, device: str) -> VariantScore:
    trial = try_variant(variant, seed=seed, device=device)
    findings = trial.result.runs[0].findings if trial.result else ()
    message = str(trial.error) if trial.error else findings[0].message if findings else ""
    return VariantScore(
        variant=variant,
        seed=seed,
        is_alarm=trial.is_alarm,
        message=message.splitlines()[0] if message else "",
        peers={name: peer.is_alarm for name, peer in trial.peers.items()},
    )
