"""`harness map`: which tensor of an engine is which tap."""

from collections.abc import Mapping
from typing import Annotated, Any

from tabulate import tabulate

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.grouped import grouped
from harness.cli.progress import progress_bar
from harness.errors import ExitStatus


@grouped
def map_taps(
    given: Annotated[opt.Given, opt.CaseOptions("model", *opt.ENGINE, "dtype", "device")],
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.TAP_MAP.option()] = "human",
) -> int:
    """Show which tensor of an engine is which tap, and why it is taken for it.

    A team that keeps the output sees what moved when the engine changes.
    """
    with progress_bar() as report:
        from harness.judge.jobs.engine_run import match_taps, open_planned
        from harness.judge.jobs.model import planned_model
        from harness.plan import plan_engine

        plan = plan_engine(**given, local_files_only=local_files_only)
        with open_planned(plan) as engine:
            report(plan.case.engine, 0, 1)
            graph = planned_model(plan).graph
            match_taps(plan, engine, graph)
            abilities = engine.capabilities
    summary = {
        "schema_version": 1,
        "engine": plan.case.engine,
        "model": plan.case.model,
        "dtype": plan.case.dtype,
        "taps": [
            {"tap": op.tap, "tensor": source.tensor, "code": source.code, "evidence": source.evidence}
            for op in graph
            if (source := abilities.sources.get(op.tap)) is not None
        ],
        "not_shown": [op.tap for op in graph if {op.tap, op.site} & set(abilities.all_unsupported_taps())],
        "notes": list(abilities.notes),
    }
    forms.TAP_MAP.show(summary, format)
    return ExitStatus.PASS if summary["taps"] else ExitStatus.NOTHING_CHECKED


def map_text(summary: Mapping[str, Any]) -> str:
    """Return a line for each tap, then what is not shown."""
    taps = summary["taps"]
    parts = [tabulate([(each["tap"], each["tensor"]) for each in taps], ("tap", "tensor"), tablefmt="simple")]
    if not taps:
        parts = [f"{summary['engine']} does not say where its taps are: its adapter names them"]
    others = {each["evidence"] for each in taps} - {taps[0]["evidence"]} if taps else ()
    parts += [f"{each['tap']}: {each['evidence']}" for each in taps if each["evidence"] in others]
    if summary["not_shown"]:
        parts.append(f"not shown: {', '.join(summary['not_shown'])}")
    return "\n\n".join([*parts, *summary["notes"]])
