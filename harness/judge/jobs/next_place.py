"""The next place to look after a check that failed, for programs: the operation, its cause, and a narrower command."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.errors import Code
from harness.formats.case import Case
from harness.formats.schedule import parse_schedule
from harness.oracle.requests import Prompt
from harness.plan import Plan
from harness.results.check import Divergence, Finding, NextPlace, RunResult, TapSource

_OWN = (
    "schedules",
    "max_new_tokens",
    "stops_early",
    "budget_s",
    "isolate",
    "truth",
    "lora",
    "other_loras",
    "rows_seed",
)
"""Options that the narrower command has values of its own for, or leaves out."""


def next_place(plan: Plan, runs: Sequence[RunResult], sources: Mapping[str, TapSource]) -> NextPlace | None:
    """Return where to look next: the first divergence of the first run that failed, or its first finding."""
    run = next((run for run in runs if run.findings), None)
    if run is None:
        return None
    found: Divergence | Finding = run.first_divergence or run.findings[0]
    explanation = found.explanation
    is_setting = found.code is Code.SETTING_DIFFERS and isinstance(found, Finding)
    command = _inspection(plan) if is_setting else _check(plan, run, found.request)
    cause = explanation.cause if explanation is not None and explanation.is_cause else None
    source = None if found.tap is None else sources.get(found.tap)
    file, _, line = ("" if source is None else source.code or "").rpartition(":")
    return NextPlace(
        file=file or None,
        line=int(line) if file else None,
        tap=found.tap,
        cause=found.message if is_setting and isinstance(found, Finding) else cause,
        command=None if command is None or plan.subject is not None else shlex.join(["harness", *command]),
    )


def _inspection(plan: Plan) -> list[str]:
    names = ("model", "hf", "engine", "engine_options", "engine_python", "dtype", "device")
    return ["inspect", "--engine", plan.case.engine, *_options(plan.case, [name for name in names if name != "engine"])]


def _check(plan: Plan, run: RunResult, request: int | None) -> list[str] | None:
    """Return the check of one schedule, and of one request where its rows do not depend on others.

    None where the shell cannot say what is fed.
    """
    schedule, prompts = parse_schedule(run.schedule), list(plan.prompts)
    if any(prompt.prompt_length is not None for prompt in prompts):
        return None
    is_alone = not schedule.is_batched and not schedule.is_repeated
    if is_alone and request is not None and request < len(prompts):
        prompts = [prompts[request]]
    options = list(_options(plan.case, [name for name in Case.options() if name not in _OWN]))
    for adapter in (plan.case.lora, *plan.case.other_loras):
        options += [] if adapter is None else ["--lora", str(adapter)]
    if plan.case.isolate is False:
        options += ["--engine-timeout", "0"]
    return ["check", *options, "--schedule", str(schedule), *_fed(prompts)]


def _fed(prompts: Sequence[Prompt]) -> Iterator[str]:
    for prompt in prompts:
        yield from ("--token-ids", ",".join(map(str, prompt.token_ids)))
    yield from ("--max-new-tokens", str(max(prompt.max_new_tokens for prompt in prompts)))


def _options(case: Case, names: Sequence[str]) -> Iterator[str]:
    """Yield the options that give fields of a case other values than their defaults."""
    for name in names:
        value: Any = getattr(case, name)
        if value in (None, Case.model_fields[name].default):
            continue
        option, _, negation = Case.options()[name].name.partition("/")
        if isinstance(value, bool):
            yield option if value else negation
            continue
        values = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
        for item in values if isinstance(values, list) else [values]:
            yield from (option, str(item))
