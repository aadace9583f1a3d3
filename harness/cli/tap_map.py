"""`harness inspect --map`: which tensor of an engine is which tap."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.command import forms
from harness.command import options as opt
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.checkpoint.checkpoint import read_table


def show_tap_map(fields: opt.Fields, against: Path | None, local_files_only: bool, format: str) -> int:
    """Print which tensor of an engine is which tap; return the exit status, 1 where a tap moved from a kept map."""
    kept = None if against is None else _read_kept(against)
    with progress_bar() as report:
        from harness.judge.jobs.opened import match_taps, open_planned, planned_model
        from harness.plan import plan_engine

        plan = plan_engine(**fields, local_files_only=local_files_only)
        with open_planned(plan) as engine:
            report(plan.case.engine, 0, 1)
            graph = planned_model(plan).graph
            match_taps(plan, engine, graph)
            abilities = engine.capabilities
    summary: dict[str, Any] = {
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
    if kept is not None:
        summary["moved"] = _moved(kept, {tap["tap"]: tap["tensor"] for tap in summary["taps"]})
    forms.TAP_MAP.show(summary, format)
    if not summary["taps"]:
        return ExitStatus.NOTHING_CHECKED
    return ExitStatus.MISMATCH if summary.get("moved") else ExitStatus.PASS


def _read_kept(path: Path) -> dict[str, str]:
    """Return the tensor of each tap in a map that was kept.

    Raises:
        HarnessError: BAD_CONFIG: it is no JSON; BAD_OPTION: it is no map.
    """
    table, _content = read_table(path)
    taps = table.get("taps")
    try:
        if not isinstance(taps, list):
            raise TypeError
        return {str(tap["tap"]): str(tap["tensor"]) for tap in taps}
    except (KeyError, TypeError) as error:
        what, hint = "the file is no map that was kept", "harness inspect --map ... --format json > FILE"
        raise HarnessError(Code.BAD_OPTION, what, where=f"--against {path}", hint=hint) from error


def _moved(before: Mapping[str, str], after: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Return the taps that another tensor is taken for than before; None for no tensor."""
    taps = dict.fromkeys((*before, *after))
    pairs = ((tap, before.get(tap), after.get(tap)) for tap in taps)
    return [{"tap": tap, "before": old, "after": new} for tap, old, new in pairs if old != new]


def map_text(summary: Mapping[str, Any]) -> str:
    """Return a line for each tap, then what is not shown."""
    taps = summary["taps"]
    parts = [tabulate([(tap["tap"], tap["tensor"]) for tap in taps], ("tap", "tensor"), tablefmt="simple")]
    if not taps:
        parts = [f"{summary['engine']} does not say where its taps are: its adapter names them"]
    others = {tap["evidence"] for tap in taps} - {taps[0]["evidence"]} if taps else ()
    parts += [f"{tap['tap']}: {tap['evidence']}" for tap in taps if tap["evidence"] in others]
    if summary["not_shown"]:
        parts.append(f"not shown: {', '.join(summary['not_shown'])}")
    if (moved := summary.get("moved")) is not None:
        rows = [(item["tap"], item["before"] or "-", item["after"] or "-") for item in moved]
        table = tabulate(rows, ("moved", "from", "to"), tablefmt="simple")
        parts.append(table if moved else "nothing moved")
    return "\n\n".join([*parts, *summary["notes"]])
