"""Open what a job needs: the engine and HF model of its plan, a golden, and the folder for recordings."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from harness.base.files import scratch_folder, write_text
from harness.base.progress import Progress
from harness.engines import Engine, TapMatcher, engine_errors
from harness.engines.record import IsolatedEngine, RunDescription, isolated_engine, record
from harness.errors import Code, HarnessError
from harness.formats.recording import ModelInfo, RequestInfo
from harness.formats.recording.writer import is_unfinished
from harness.formats.schedule import Schedule
from harness.formats.taps import Graph, Kind
from harness.oracle.golden import Golden
from harness.oracle.lora import load_adapted
from harness.oracle.make_golden import cached_golden, checked_golden, make_golden
from harness.oracle.model import HFModel
from harness.oracle.requests import draft_requests, duplicate_requests, forked_prompts
from harness.plan import Plan
from harness.report.page.html import REPORT_NAME, report_html
from harness.results.check import CheckResult


def match_taps(plan: Plan, engine: Engine | IsolatedEngine, graph: Graph) -> None:
    """Let the engine find its taps, if they depend on the model.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: --mtp is set, and the outputs of the MTP layers were not found.
    """
    if isinstance(engine, TapMatcher):
        with engine_errors(plan.case.engine):
            engine.match_taps(graph)
    shown = {*engine.capabilities.wanted(graph)} if graph.has_mtp else set()
    for tap in graph.drafted_from.values():
        if tap not in shown:
            looked_for = (op for op in graph if op.tokens_ahead and not op.is_kept and op.kind is not Kind.CHOICE)
            first = next(op.tap for op in looked_for if op.tap not in shown)
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"engine {plan.case.engine!r} does not show what further tokens are predicted from, nor {first}",
                where="--mtp",
                expected=tap,
                hint="it runs no such layers, or computes something else there: an engine whose taps are found by "
                "content says with its attribute tokens_ahead that it runs them",
            )


def followed_schedules(plan: Plan, engine: Engine | IsolatedEngine) -> Plan:
    """Return the plan without the default schedules that the engine cannot follow.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it cannot follow a schedule that the user named.
    """
    if any(prompt.inputs for prompt in plan.prompts) and not engine.capabilities.takes_images:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"engine {plan.case.engine!r} takes no images",
            where="inputs",
            expected="requests of text alone",
            hint="--engine hf",
        )
    offered = engine.capabilities.schedules
    others = [schedule for schedule in plan.schedules if schedule.name not in offered]
    if others and not plan.has_default_schedules:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"engine {plan.case.engine!r} cannot follow the schedule {others[0].name!r}",
            where="--schedule",
            expected=", ".join(offered),
            actual=str(others[0]),
            hint=f"--schedule {offered[0]}" if offered else None,
        )
    notes = [f"schedule {schedule} left out: engine {plan.case.engine} cannot follow it" for schedule in others]
    followed = [schedule for schedule in plan.schedules if schedule not in others]
    return replace(plan, schedules=tuple(followed), notes=(*plan.notes, *notes))


def with_duplicate_requests(
    plan: Plan, golden: Golden, schedule: Schedule, hf: HFModel
) -> tuple[Golden, Sequence[RequestInfo] | None]:
    """Return the golden for the schedule, and copies of its requests; None if `describe_run` should make them.

    Forks continue with other tokens than their originals; otherwise a fork that overwrites its original would go
    unnoticed. So a larger golden holds their rows as well.
    """
    if schedule.trigger != "forked":
        return golden, None
    larger = checked_golden(hf, [*plan.prompts, *forked_prompts(golden)], truth=plan.case.truth)
    return larger, larger.requests[len(plan.prompts) :]


@contextmanager
def open_planned(plan: Plan) -> Iterator[Engine | IsolatedEngine]:
    """Open the engine of the plan; refuse it if it cannot follow a schedule that the user named.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE; CHECKPOINT_CHANGED, if the checkpoint was rewritten within the block; as
            `open_engine` and `isolated_engine`.
    """
    with plan.checkpoint.unchanged(), _opened(plan) as engine:
        followed_schedules(plan, engine)
        yield engine


def _opened(plan: Plan) -> AbstractContextManager[Engine | IsolatedEngine]:
    if not plan.isolates_engine:
        return nullcontext(plan.open_engine())
    case = plan.case
    return isolated_engine(
        case.engine,
        plan.folder,
        dtype=case.dtype,
        device=case.device,
        options=plan.engine_options,
        timeout_s=case.engine_timeout_s,
        python=case.engine_python,
    )


def describe_run(
    plan: Plan,
    schedule: Schedule,
    requests: Sequence[RequestInfo],
    folder: Path,
    *,
    copies: Sequence[RequestInfo] | None = None,
    is_served: bool = False,
) -> RunDescription:
    """Describe a run of the engine that is recorded into `folder`.

    By default, `copies` are the same requests again for a repeated schedule, and the drafts for a schedule with drafts.
    """
    if copies is None:
        copies = duplicate_requests(requests) if schedule.is_repeated else ()
        copies = draft_requests(requests, schedule) if schedule.has_drafts else copies
    return RunDescription(
        engine=plan.case.engine,
        folder=folder.absolute(),
        model=ModelInfo(
            id=plan.case.model,
            revision=None,
            config_hash=plan.checkpoint.config_hash,
            weights_hash=plan.checkpoint.weights_hash,
        ),
        dtype=plan.case.dtype,
        device=plan.case.device,
        schedule=schedule,
        requests=list(requests),
        copies=list(copies),
        taps=plan.case.only or "all",
        is_served=is_served,
    )


def record_run(
    plan: Plan,
    engine: Engine | IsolatedEngine,
    schedule: Schedule,
    requests: Sequence[RequestInfo],
    folder: Path,
    *,
    copies: Sequence[RequestInfo] | None = None,
    is_served: bool = False,
) -> None:
    """Run the engine under one schedule and record it into `folder`; see `describe_run`."""
    run = describe_run(plan, schedule, requests, folder, copies=copies, is_served=is_served)
    if isinstance(engine, IsolatedEngine):
        engine.record(run)
    else:
        record(engine, run)


def planned_model(plan: Plan) -> HFModel:
    """Load the HF model that judges the engine, with the dtype, device and adapter of the plan.

    Raises:
        HarnessError: as `load_adapted`.
    """
    dtype = getattr(torch, plan.case.dtype)
    hf = load_adapted(
        plan.checkpoint,
        dtype=dtype,
        device=plan.case.device,
        lora=plan.case.lora,
        others=plan.case.other_loras,
        mtp=plan.case.mtp,
    )
    hf.has_images = any(prompt.inputs for prompt in plan.prompts)
    return hf


def keep_page(result: CheckResult, folder: Path) -> None:
    """Write the HTML report of a check beside its recordings; raises HarnessError (CANNOT_WRITE)."""
    write_text(folder / REPORT_NAME, report_html(result))


@contextmanager
def recording_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Yield the folder of one recording: a subfolder of `out`, or a scratch folder if `out` is None."""
    if out is not None:
        yield out / name
        return
    with scratch_folder("harness-") as folder:
        yield folder / name


@contextmanager
def new_output_dir(out: Path) -> Iterator[None]:
    """Make an output folder; remove it again if the block fails and leaves it empty.

    Raises:
        HarnessError: OUTPUT_EXISTS: the folder is not empty; CANNOT_WRITE.
    """
    try:
        is_new = not out.exists()
        if not is_new and (not out.is_dir() or any(out.iterdir())):
            what = "the output folder exists and is not empty" if out.is_dir() else "the output path is a file"
            hint = "name a new folder"
            if any(is_unfinished(folder) for folder in (out, *out.glob("*/"))):
                hint = "it holds steps of a recording that was interrupted: remove it, or name a new folder"
            raise HarnessError(Code.OUTPUT_EXISTS, what, where=out, hint=hint)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the output folder cannot be made: {error.strerror}"
        raise HarnessError(Code.CANNOT_WRITE, what, where=out, hint="name another folder") from error
    if not os.access(out, os.W_OK):
        raise HarnessError(Code.CANNOT_WRITE, "the output folder is read-only", where=out, hint="name another folder")
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty: it holds a finished recording
            if is_new:
                out.rmdir()
        raise


def run_golden(
    plan: Plan, *, out: Path | None = None, progress: Progress | None = None, keeps_values: bool = True
) -> Golden:
    """Return what HF computes for a plan's prompts.

    Args:
        plan: model, prompts, dtype, device and truth.
        out: new or empty folder for the golden; None for the cache, which may already hold it.
        progress: called with the current stage.
        keeps_values: whether the golden must hold all values; otherwise a cached golden may hold sketches of them.

    Raises:
        HarnessError: the input cannot be used, or `out` cannot be written.
    """
    with nullcontext() if out is None else new_output_dir(out):
        hf = planned_model(plan)
        if out is None:
            return cached_golden(hf, plan.prompts, truth=plan.case.truth, progress=progress, keeps_values=keeps_values)
        return make_golden(hf, plan.prompts, out, truth=plan.case.truth, progress=progress)
