"""A plan: what is to be checked, with every name resolved before anything costs time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import torch

from harness.engines import Engine, is_foreign
from harness.errors import Code, HarnessError
from harness.formats.case import DTYPES, Case, CaseChanges, ProfileSection, RequestSpec, load_case
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint, embedded_cases, resolve
from harness.formats.schedule import DEFAULT_SCHEDULES, Schedule, parse_schedules
from harness.oracle.requests import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A check to be made, with every name resolved."""

    model: str
    """As the user named it."""
    checkpoint: Checkpoint
    engine: str
    """Name of the engine."""
    subject: Engine | None = None
    """The engine itself if it is at hand; None: the installed one of that name is opened."""
    dtype: str
    device: str
    prompts: tuple[Prompt, ...]
    schedules: tuple[Schedule, ...]
    has_default_schedules: bool = False
    """Whether these are the default schedules: those that the engine cannot follow are then left out."""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    require: tuple[str, ...] = ()
    """Triggers to be reached by every schedule, besides the schedule's own."""
    notes: tuple[str, ...] = ()
    truth: str = "auto"
    """Precision of the truth: `float64`, `float32`, or `auto` for what the engine's dtype needs."""
    profile: ProfileSection | None = None
    """The profile that follows the check; None leaves that open."""
    only: str | None = None
    """What the engine must show: `cache` (with the logits), `logits` or `tokens`; None or `all`: every tap that it does
    not declare lacking."""
    isolate: bool | None = None
    """Whether the engine runs in a process of its own; None: if another package provides it, or it has a time limit."""
    engine_timeout_s: float | None = None
    """Longest time for opening the engine, and for each schedule."""
    engine_python: Path | None = None
    """Interpreter of the environment that the engine is installed in; None for this one."""
    stops_early: bool = False
    """Whether the check ends at the first operation that is wrong: later operations are not judged, no further schedule
    is run, and no cause is looked for."""
    lora: Path | None = None
    """Folder of a LoRA adapter that truth and engine add to the model; the engine finds it as its option `lora`."""
    other_loras: tuple[Path, ...] = ()
    """Folders of adapters that the engine serves to other requests: a row that was given one of them is told so."""

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return self.checkpoint.folder

    @property
    def isolates_engine(self) -> bool:
        """Whether the engine runs in a process of its own.

        Raises:
            HarnessError: UNKNOWN_ENGINE.
        """
        if self.subject is not None:
            return False
        if self.engine_python is not None:
            return True
        if self.isolate is not None:
            return self.isolate
        return self.engine_timeout_s is not None or is_foreign(self.engine)


def plan_request(
    *,
    case: Case | None = None,
    subject: Engine | None = None,
    engine_python: Path | None = None,
    lora: Path | None = None,
    other_loras: Sequence[Path] = (),
    local_files_only: bool = True,
    **changes: Unpack[CaseChanges],
) -> Plan:
    """Resolve a case, or the embedded default, with the changes that are given.

    Args:
        case: None for the embedded default, or for a case made of `model` and `requests`.
        subject: the engine itself, where it is at hand; `engine` is then what it is called.
        engine_python: interpreter of the environment that the engine is installed in.
        lora: folder of a LoRA adapter in PEFT's format.
        other_loras: folders of adapters that the engine serves to other requests.
        local_files_only: never ask the hub.
        changes: see `CaseChanges`.

    Raises:
        HarnessError: an option makes no sense, or a name in it cannot be resolved.
    """
    _refuse_no_new_tokens(changes.get("max_new_tokens"))
    base = _default_case(changes) if case is None else case
    chosen = base.replaced(**changes)
    if engine_python is not None and changes.get("isolate") is False:
        what = "an engine in another environment has a process of its own"
        raise HarnessError(Code.BAD_OPTION, what, where="--engine-python", hint="leave out --no-isolate")
    plan = plan_case(chosen, local_files_only=local_files_only)
    plan = _with_adapters(replace(plan, subject=subject, engine_python=engine_python), lora, other_loras)
    dropped = [trigger for trigger in base.require if trigger not in chosen.require]
    if not dropped:
        return plan
    note = f"the case's own requirements are left out, since options change what it runs: {', '.join(dropped)}"
    return replace(plan, notes=(*plan.notes, note))


def _with_adapters(plan: Plan, lora: Path | None, others: Sequence[Path]) -> Plan:
    """Give the plan the LoRA adapter that is checked, and those of other requests."""
    if lora is not None:
        options = {**plan.engine_options, "lora": str(lora)}
        return replace(plan, lora=lora, other_loras=tuple(others), engine_options=options)
    if others:
        what = "there are other adapters, and none that is checked"
        raise HarnessError(Code.BAD_OPTION, what, where="--other-lora", hint="--lora FOLDER")
    return plan


def _default_case(changes: CaseChanges) -> Case:
    """Return the embedded default, or a case of the user's own model or prompts."""
    model, engine, requests = changes.get("model"), changes.get("engine"), changes.get("requests")
    default = load_case(embedded_cases() / "default.toml")
    if requests:  # a workload of its own, not a change to the default's
        return Case(schema_version=1, model=model or default.model, requests=list(requests))
    if model is not None:
        what, hint = "a model of your own needs a prompt", 'add --prompt "..." or --token-ids 1,2,3'
        raise HarnessError(Code.EMPTY_PROMPT, what, where="--model", actual="no prompt", hint=hint)
    # Another engine may follow other schedules than those that the default names for its own.
    return default if engine in (None, default.engine) else default.model_copy(update={"schedules": []})


def _refuse_no_new_tokens(max_new_tokens: int | None) -> None:
    if max_new_tokens is not None and max_new_tokens < 1:
        raise HarnessError(
            Code.BAD_OPTION,
            "the number of new tokens must be positive",
            where="--max-new-tokens",
            expected="at least 1; decode is reached from 2 on",
            actual=max_new_tokens,
        )


def plan_case(case: Case, *, local_files_only: bool = True) -> Plan:
    """Resolve a case into a plan: the model to a folder, texts to token ids, schedules to their definitions.

    Raises:
        HarnessError: any of it cannot be resolved.
    """
    checkpoint = Checkpoint(resolve(case.model, local_files_only=local_files_only, hf=case.hf))
    check_device(case.device)
    _refuse_limit_without_process(case.isolate, case.engine_timeout_s)
    prompts = _prompts(case, checkpoint)
    schedules, skipped = _schedules(case.schedules, [len(prompt.token_ids) for prompt in prompts])
    return Plan(
        model=case.model,
        checkpoint=checkpoint,
        engine=case.engine,
        dtype=resolve_dtype(case.dtype, checkpoint),
        device=case.device,
        truth=case.truth,
        prompts=prompts,
        schedules=tuple(schedules),
        has_default_schedules=not case.schedules,
        engine_options={name: str(value) for name, value in case.engine_options.items()},
        require=tuple(case.require),
        notes=tuple(f"schedule {each} left out: these prompts cannot reach it" for each in skipped),
        profile=case.profile,
        only=case.only,
        isolate=case.isolate,
        engine_timeout_s=case.engine_timeout_s,
    )


def _schedules(names: Sequence[str], prompt_lengths: Sequence[int]) -> tuple[list[Schedule], list[Schedule]]:
    """Return the schedules to run, and those of the default that the prompts cannot reach.

    One that was asked for by its name, and is not reached, fails when it is run.
    """
    if names:
        return parse_schedules(names), []
    default = parse_schedules(DEFAULT_SCHEDULES)
    reached = [schedule for schedule in default if schedule.is_reachable(prompt_lengths)]
    return reached, [schedule for schedule in default if schedule not in reached]


def _refuse_limit_without_process(isolate: bool | None, timeout_s: float | None) -> None:
    if isolate is False and timeout_s is not None:
        raise HarnessError(
            Code.BAD_OPTION,
            "an engine in the harness's own process cannot be ended",
            where="--engine-timeout",
            expected="an engine in a process of its own",
            hint="leave out --no-isolate, or the limit",
        )


def resolve_dtype(dtype: str, checkpoint: Checkpoint) -> str:
    """Return the dtype's full name; `auto` is the one that config.json names."""
    where, own = "--dtype", checkpoint.dtype
    if dtype == "auto":
        dtype, where = own, f"{checkpoint.folder / CONFIG_NAME}: dtype"
    if dtype not in DTYPES:
        raise HarnessError(
            Code.BAD_OPTION,
            f"unknown dtype {dtype!r}",
            where=where,
            expected=", ".join(DTYPES),
            actual=dtype,
            hint="--dtype float32",
        )
    return dtype


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        raise HarnessError(
            Code.BAD_OPTION, f"unknown device {device!r}", where="--device", expected="cpu or cuda", actual=device
        ) from None
    if kind not in ("cpu", "cuda"):
        raise HarnessError(
            Code.BAD_OPTION, f"device {device!r} is not served", where="--device", expected="cpu or cuda", actual=device
        )
    num_devices = torch.cuda.device_count() if kind == "cuda" else 1
    if index >= num_devices:
        raise HarnessError(
            Code.NO_DEVICE,
            "there is no such device",
            where="--device",
            expected=f"{kind}:0 to {kind}:{num_devices - 1}" if num_devices else "cpu: there is no CUDA device",
            actual=device,
            hint="--device cpu",
        )


def _prompts(case: Case, checkpoint: Checkpoint) -> tuple[Prompt, ...]:
    """Return the requests of a case in token ids; the tokenizer is loaded only if a request is a text."""

    def prompt(index: int, request: RequestSpec) -> Prompt:
        token_ids = request.token_ids
        if token_ids is None:
            assert request.prompt is not None
            token_ids = tokenize(request.prompt, checkpoint, where=f"request {index}")
        if request.continuation is not None:
            fed = (*token_ids, *request.continuation)
            return Prompt(token_ids=fed, max_new_tokens=1, prompt_length=len(token_ids))
        return Prompt(token_ids=tuple(token_ids), max_new_tokens=request.max_new_tokens or case.max_new_tokens)

    return tuple(prompt(index, request) for index, request in enumerate(case.requests))


def tokenize(text: str, checkpoint: Checkpoint, *, where: str) -> list[int]:
    """Return the token ids of a text under a checkpoint's own tokenizer."""
    if not text.strip():
        raise HarnessError(
            Code.EMPTY_PROMPT, "the prompt is empty", where=where, actual=repr(text), hint="give some text"
        )
    return checkpoint.tokenizer.encode(text)
