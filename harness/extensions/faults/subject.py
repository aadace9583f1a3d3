"""What a tool gets: an engine with a mistake in it or none, its checkpoint, and the work that reaches the mistake."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from harness.base.files import scratch_folder
from harness.base.numerics import Numerics
from harness.engines import Workload
from harness.extensions.faults.fault import BLOCK_SIZE, PROMPT_LENGTHS, EngineKind, Fault, FaultConfig, Variant
from harness.extensions.faults.modules.declaring import module_prompts
from harness.extensions.faults.reference.conventions import in_format
from harness.extensions.faults.reference.injection import InjectedFault
from harness.formats.case import RequestSpec
from harness.formats.checkpoint import embedded_cases
from harness.formats.recording import RecordingWriter
from harness.plan import Plan, plan_request

_VOCABULARY = range(3, 256)
DUMP_FILE = "all.pt"
"""In the folder of a dump: tensors by the paths of modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSubject:
    """One engine under test, for one tool."""

    kind: EngineKind
    engine: Any
    """A model object of transformers, an object with a method `step`, a folder of tensors, or the URL of a server; None
    for the reference engine, which `plan` opens."""
    checkpoint: Path
    """The folder of the checkpoint that the engine should compute."""
    dtype: str
    schedule: str
    prompts: Sequence[Sequence[int]]
    """Token ids of each request."""
    max_new_tokens: int
    plan: Plan | None = None
    """The check of the reference engine."""
    suite: Callable[[], None] | None = None
    """What shows a mistake that is in no tensor; it raises where a property is broken."""


@contextmanager
def opened(
    entry: Fault | Variant, *, seed: int = 0, device: str = "cpu"
) -> Iterator[tuple[ToolSubject, InjectedFault]]:
    """Open the engine of a fault or sound variant; yield it, and how often code of the fault ran.

    Args:
        entry: the fault or variant.
        seed: of the prompts, where the setting has none.
        device: of the reference engine.
    """
    setting = entry.setting
    if entry.engine is EngineKind.SERVER:
        from harness.extensions.faults.servers import serving

        with checkpoint(setting) as folder, _injected(entry) as planted, serving(folder, setting.dtype) as url:
            yield _subject(entry, url, folder, random_prompts(seed)), planted
        return
    if entry.engine is EngineKind.REFERENCE:
        with checkpoint(setting) as folder, _injected(entry) as planted:
            name = entry.engine_name if isinstance(entry, Variant) else "reference"
            plan = _declared_plan(setting, folder, name, seed, device)
            suite = entry.suite if isinstance(entry, Fault) else None
            prompts = [prompt.token_ids for prompt in plan.prompts]
            yield _subject(entry, None, folder, prompts, plan=plan, suite=suite), planted
        return
    tokens = [list(prompt) for prompt in setting.prompts or module_prompts(seed)]
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        with tiny_checkpoint(setting) as folder, scratch_folder("harness-") as scratch:
            engine, shown = _opened_object(entry, folder, tokens, scratch)
            yield _subject(entry, engine, folder, shown), InjectedFault(num_calls=1)
    finally:
        torch.set_num_threads(threads)


def _subject(
    entry: Fault | Variant, engine: Any, folder: Path, prompts: Sequence[Sequence[int]], **rest: Any
) -> ToolSubject:
    setting = entry.setting
    return ToolSubject(
        kind=entry.engine, engine=engine, checkpoint=folder, dtype=setting.dtype, schedule=setting.schedule,
        prompts=prompts, max_new_tokens=setting.max_new_tokens, **rest,
    )  # fmt: skip


@contextmanager
def _injected(entry: Fault | Variant) -> Iterator[InjectedFault]:
    with nullcontext(InjectedFault()) if entry.inject is None else entry.inject() as planted:
        yield planted


def _opened_object(
    entry: Fault | Variant, folder: Path, prompts: list[list[int]], scratch: Path
) -> tuple[Any, list[list[int]]]:
    from harness.extensions.faults.modules.step_engine import PlainStepEngine
    from harness.extensions.faults.zoo.models import load

    dtype = getattr(torch, entry.setting.dtype)
    if entry.engine is EngineKind.STEP:
        what = {"wrong": entry.inject} if isinstance(entry, Fault) else {"style": entry.inject}
        make: Any = PlainStepEngine
        return make(folder, dtype, every_row="speculative" in entry.setting.schedule, **what), prompts
    model = load(folder, dtype=dtype)
    if entry.inject is not None:
        entry.inject(model)
    if entry.engine is EngineKind.MODULE:
        return model, prompts
    dump(model, prompts[0], scratch)
    return scratch, prompts[:1]


@torch.no_grad()
def dump(model: torch.nn.Module, token_ids: Sequence[int], folder: Path) -> None:
    """Write what each module returns in one prefill to a file in a folder, by the module's path."""
    from harness.extensions.faults.tools.driving import captured

    torch.save(captured(model, lambda: model(torch.tensor([list(token_ids)]))), folder / DUMP_FILE)


# Checkpoints.


@contextmanager
def tiny_checkpoint(setting: FaultConfig) -> Iterator[Path]:
    """Yield a tiny checkpoint of a family of transformers, with lively weights."""
    from harness.extensions.faults.zoo.models import save

    with scratch_folder("harness-") as folder:
        save(setting.model, folder, seed=7, settings=setting.config)
        yield folder


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
        _change_weights(folder, setting)
        yield folder


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


# The plan of a check of the reference engine.


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
        engine_options={"block_size": str(BLOCK_SIZE), **setting.options} if engine == "reference" else setting.options,
        local_files_only=True,
    )


def random_prompts(seed: int) -> list[list[int]]:
    """Return token ids of `PROMPT_LENGTHS`."""
    generator = torch.Generator().manual_seed(seed)
    low, high = _VOCABULARY.start, _VOCABULARY.stop
    return [torch.randint(low, high, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


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
