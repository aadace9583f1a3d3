"""One check under one setting, with a fault in the engine or without."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch

from harness.base.files import scratch_folder
from harness.base.numerics import Numerics
from harness.engines import Workload
from harness.errors import Code, HarnessError
from harness.extensions.faults.fault import BLOCK_SIZE, PROMPT_LENGTHS, Fault, FaultConfig, Variant
from harness.extensions.faults.formats import in_format
from harness.extensions.faults.injection import InjectedFault
from harness.extensions.faults.peers import PeerVerdict, judge_as_peers
from harness.formats.case import RequestSpec
from harness.formats.checkpoint import embedded_cases
from harness.formats.recording import Recording, RecordingWriter
from harness.judge.jobs.check import run_check
from harness.judge.jobs.opened import planned_model, with_duplicate_requests
from harness.oracle.golden import Golden
from harness.oracle.make_golden import cached_golden
from harness.plan import Plan, plan_request
from harness.results.check import CheckResult, Outcome

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
        (recording,) = (out / "recordings").iterdir()
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
        plan, cached_golden(hf, plan.prompts, truth=plan.case.truth), plan.schedules[0], hf
    )
    return golden


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
