"""Resolve the names in a case (model, prompts, schedules, dtype) into a plan, before any slow work."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from harness.engines import Engine, is_foreign, open_engine
from harness.errors import Code, HarnessError
from harness.formats.auto_prompts import auto_requests
from harness.formats.case import DTYPES, Case, RequestSpec, load_case
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint, embedded_cases, resolve
from harness.formats.checkpoint.locate import embedded_folder, foreign_reader_note
from harness.formats.checkpoint.quantised import read_quantised_source
from harness.formats.schedule import DEFAULT_SCHEDULES, Schedule, parse_schedules
from harness.oracle.images import keep_inputs
from harness.oracle.requests import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A check with every name resolved."""

    case: Case
    """All options. A dtype of `auto` is replaced by the resolved dtype; the model keeps the name that the user gave."""
    checkpoint: Checkpoint
    prompts: tuple[Prompt, ...]
    schedules: tuple[Schedule, ...]
    subject: Engine | None = None
    """The engine object to check; None to open the installed engine that the case names."""
    notes: tuple[str, ...] = ()

    def changed(self, **fields: Any) -> "Plan":
        """Return the plan with other values in its case. They must not change what the names resolve to."""
        return replace(self, case=self.case.model_copy(update=fields))

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        return self.checkpoint.folder

    @property
    def engine_options(self) -> dict[str, str]:
        """Options of the engine; a LoRA adapter is its option `lora`."""
        options = {name: str(value) for name, value in self.case.engine_options.items()}
        return options if self.case.lora is None else {**options, "lora": str(self.case.lora)}

    @property
    def has_default_schedules(self) -> bool:
        """Whether these are the default schedules. Schedules that the engine cannot follow are then left out."""
        return not self.case.schedules

    @property
    def isolates_engine(self) -> bool:
        """Whether the engine runs in a separate process.

        Raises:
            HarnessError: UNKNOWN_ENGINE.
        """
        if self.subject is not None or self.case.tensors is not None:
            return False
        if self.case.engine_python is not None:
            return True
        if self.case.isolate is not None:
            return self.case.isolate
        return self.case.engine_timeout_s is not None or is_foreign(self.case.engine)

    def open_engine(self) -> Engine:
        """Open the engine in this process.

        Raises:
            HarnessError: as `harness.engines.open_engine`.
        """
        if self.subject is not None:
            return self.subject
        case = self.case
        if case.tensors is not None:
            from harness.engines.by_content.named import read_names
            from harness.engines.tensor_folder import FolderEngine

            names, ids = None if case.names is None else read_names(case.names), self.prompts[0].token_ids
            return FolderEngine(case.tensors, self.checkpoint, dtype=case.dtype, token_ids=ids, tap_names=names)
        return open_engine(case.engine, self.folder, dtype=case.dtype, device=case.device, options=self.engine_options)


def plan_request(
    *, case: Case | None = None, subject: Engine | None = None, local_files_only: bool = True, **changes: Any
) -> Plan:
    """Resolve a case, or the embedded default, with changes.

    Args:
        case: the case to start from; None for the embedded default, or for a new case of `model` and `requests`.
        subject: the engine object to check; `engine` is then its name.
        local_files_only: do not contact the model hub.
        changes: fields of a case that replace those of `case`; None or an empty sequence keeps the field.

    Raises:
        HarnessError: an option is invalid, or a name cannot be resolved.
    """
    base = _default_case(changes, local_files_only=local_files_only) if case is None else case
    chosen = base.replaced(**changes)
    plan = replace(plan_case(chosen, local_files_only=local_files_only), subject=subject)
    model = changes.get("model")
    if case is None and not changes.get("requests") and model is not None and embedded_folder(str(model)) is None:
        lengths = ", ".join(str(len(prompt.token_ids)) for prompt in plan.prompts)
        plan = replace(plan, notes=(*plan.notes, f"no prompt was given: requests of {lengths} random tokens"))
    dropped = [trigger for trigger in base.require if trigger not in chosen.require]
    if not dropped:
        return plan
    note = f"requirements of the case are dropped, because options change what it runs: {', '.join(dropped)}"
    return replace(plan, notes=(*plan.notes, note))


def plan_engine(**changes: Any) -> Plan:
    """Resolve an engine and its checkpoint without requests, for a command that makes the requests itself.

    Args:
        changes: as for `plan_request`. The plan has one placeholder request of one token.

    Raises:
        HarnessError: as `plan_request`.
    """
    return plan_request(requests=[RequestSpec(token_ids=[0])], max_new_tokens=1, schedules=["plain"], **changes)


def _default_case(changes: Mapping[str, Any], *, local_files_only: bool) -> Case:
    """Return the embedded default case, or a new case for the model of the user, with prompts if there are none."""
    model, engine, requests = changes.get("model"), changes.get("engine"), changes.get("requests")
    default = load_case(embedded_cases() / "default.toml")
    if requests:  # a new workload, not a change of the default one
        return Case(schema_version=1, model=model or default.model, requests=list(requests))
    if model is not None and embedded_folder(str(model)) is not None:  # all of them recite
        return default.model_copy(update={"model": model, "schedules": []})
    if model is not None:
        folder = resolve(model, local_files_only=local_files_only, hf=changes.get("hf"))
        return Case(schema_version=1, model=model, requests=auto_requests(Checkpoint(folder).config))
    # The schedules of the default case are for its own engine; another engine may follow different ones.
    return default if engine in (None, default.engine) else default.model_copy(update={"schedules": []})


def plan_case(case: Case, *, local_files_only: bool = True) -> Plan:
    """Resolve a case into a plan: the model to a folder, texts to token ids, schedules to their definitions.

    Raises:
        HarnessError: something cannot be resolved.
    """
    _refuse_contradictions(case)
    if case.tensors is not None:
        case = case.model_copy(update={"engine": "tensors", "schedules": ["plain"], "max_new_tokens": 1})
    checkpoint = Checkpoint(resolve(case.model, local_files_only=local_files_only, hf=case.hf))
    check_device(case.device)
    prompts = _prompts(case, checkpoint)
    source, foreign = read_quantised_source(checkpoint.folder), foreign_reader_note(case.model)
    schedules, skipped = _schedules(case.schedules, [len(prompt.token_ids) for prompt in prompts])
    return Plan(
        case=case.model_copy(update={"dtype": resolve_dtype(case.dtype, checkpoint)}),
        checkpoint=checkpoint,
        prompts=prompts,
        schedules=tuple(schedules),
        notes=(
            *(() if source is None else (str(source), *source.contradictions)),
            *(() if foreign is None else (foreign,)),
            *(_left_out(item, len(prompts)) for item in skipped),
            *_doubled_begin(case, checkpoint, prompts),
        ),
    )


def _refuse_contradictions(case: Case) -> None:
    """Refuse options that are invalid or contradict each other."""

    def refuse(where: str, what: str, **details: Any) -> NoReturn:
        raise HarnessError(Code.BAD_OPTION, what, where=where, **details)

    if case.max_new_tokens < 1:
        refuse(
            "--max-new-tokens",
            "the number of new tokens must be positive",
            expected="at least 1; decode is reached from 2 on",
            actual=case.max_new_tokens,
        )
    limit_s = case.engine_timeout_s
    if limit_s is not None and not 0 < limit_s < math.inf:
        refuse("--engine-timeout", "the time limit must be positive", expected="seconds", actual=limit_s)
    if case.budget_s is not None and not 0 < case.budget_s < math.inf:
        refuse("--budget", "the budget must be positive", expected="seconds", actual=case.budget_s)
    if not 0 <= case.explain_s < math.inf:
        refuse("--explain-seconds", "the time must not be negative", expected="seconds", actual=case.explain_s)
    if case.rows is not None and case.rows < 1:
        refuse("--rows", "the number of rows must be positive", expected="at least 1", actual=case.rows)
    if case.rows_seed < 0:
        refuse("rows_seed", "the seed must not be negative", expected="at least 0", actual=case.rows_seed)
    if case.isolate is False and case.engine_python is not None:
        what = "an engine in another environment runs in a separate process"
        refuse("--engine-python", what, hint="leave out --engine-timeout 0")
    if case.isolate is False and limit_s is not None:
        what, hint = "an engine in the harness's own process cannot be ended", "leave out isolate=False, or the limit"
        refuse("--engine-timeout", what, expected="an engine in a process of its own", hint=hint)
    if case.names is not None and case.tensors is None:
        refuse("--names", "names are of the tensors in a folder", hint="--tensors DIR; or harness.check(..., names=)")
    if case.tensors is not None:
        if len(case.requests) != 1:
            what, hint = "a folder of tensors is of one request", "give one --token-ids, or one --prompt"
            refuse("--tensors", what, expected="1 request", actual=len(case.requests), hint=hint)
        fields = ("engine", "engine_options", "isolate", "engine_timeout_s", "engine_python", "lora", "schedules")
        for name in fields:
            if getattr(case, name) != Case.model_fields[name].get_default(call_default_factory=True):
                what = "tensors that were dumped are one prefill of no engine that runs"
                refuse(Case.options()[name].name, what, hint="leave it out, or leave out --tensors")
    if case.other_loras and case.lora is None:
        refuse("--other-lora", "there are other adapters, and none that is checked", hint="--lora FOLDER")


def _schedules(names: Sequence[str], prompt_lengths: Sequence[int]) -> tuple[list[Schedule], list[Schedule]]:
    """Return the schedules to run, and the default schedules that the prompts cannot reach.

    A schedule that was asked for by name is refused if there are too few prompts for a batch. One whose chunks the
    prompts do not reach fails when it runs.
    """
    if names:
        chosen = parse_schedules(names)
        for schedule in chosen:
            if schedule.is_batched and not schedule.has_batch(len(prompt_lengths)):
                what, hint = f"schedule {schedule} runs several requests at once", "give a second prompt"
                raise HarnessError(Code.BAD_OPTION, what, where="--schedule", actual="1 request", hint=hint)
        return chosen, []
    default = parse_schedules(DEFAULT_SCHEDULES)
    reached = [schedule for schedule in default if schedule.is_reachable(prompt_lengths)]
    return reached, [schedule for schedule in default if schedule not in reached]


def _left_out(schedule: Schedule, num_prompts: int) -> str:
    hint = ", give a second one" if schedule.is_batched and num_prompts == 1 else ""
    return f"schedule {schedule} left out: these prompts cannot reach it{hint}"


def _doubled_begin(case: Case, checkpoint: Checkpoint, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a note for each text that starts with a begin-of-text token to which the tokenizer added another."""
    for index, (request, prompt) in enumerate(zip(case.requests, prompts, strict=True)):
        begin = None if request.prompt is None else checkpoint.tokenizer.hf.bos_token_id
        if begin is not None and prompt.token_ids[:2] == (begin, begin):
            yield (
                f"request {index}: the prompt begins with {checkpoint.tokenizer.hf.bos_token}, and the tokenizer adds "
                "another one: leave it out of the text"
            )


def resolve_dtype(dtype: str, checkpoint: Checkpoint) -> str:
    """Return the dtype's full name; `auto` is the one that config.json names."""
    where, checkpoint_dtype = "--dtype", checkpoint.dtype
    if dtype == "auto":
        dtype, where = checkpoint_dtype, f"{checkpoint.folder / CONFIG_NAME}: dtype"
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
    """Refuse a device that does not exist."""
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
    """Return the requests of a case as token ids. The tokenizer is loaded only if a request is text."""

    def resolved(index: int, request: RequestSpec) -> Prompt:
        token_ids = prompt_tokens(request, checkpoint, where=f"request {index}")
        inputs = None if request.inputs is None else keep_inputs(request.inputs)
        if request.continuation is not None:
            fed = (*token_ids, *request.continuation)
            return Prompt(token_ids=fed, max_new_tokens=1, prompt_length=len(token_ids), inputs=inputs)
        num_new = request.max_new_tokens or case.max_new_tokens
        return Prompt(token_ids=token_ids, max_new_tokens=num_new, inputs=inputs)

    return tuple(resolved(index, request) for index, request in enumerate(case.requests))


def prompt_tokens(request: RequestSpec, checkpoint: Checkpoint, *, where: str) -> tuple[int, ...]:
    """Return the token ids of a request's prompt: a text, a conversation or ids."""
    if request.prompt is not None:
        return tuple(tokenize(request.prompt, checkpoint, where=where))
    if request.messages is not None:
        return tuple(checkpoint.tokenizer.chat(request.messages, request.tools))
    assert request.token_ids is not None
    return tuple(request.token_ids)


def tokenize(text: str, checkpoint: Checkpoint, *, where: str) -> list[int]:
    """Return the token ids of a text, by the tokenizer of the checkpoint."""
    if not text.strip():
        raise HarnessError(
            Code.EMPTY_PROMPT, "the prompt is empty", where=where, actual=repr(text), hint="give some text"
        )
    return checkpoint.tokenizer.encode(text)
