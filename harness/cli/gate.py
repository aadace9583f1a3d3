"""`harness gate`: what a profile needs beyond its baseline."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.cli.output import write, write_json
from harness.errors import ExitStatus
from harness.files import read_text


def gate(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="Folder that `harness profile` has filled.")],
    baseline: Annotated[Path, typer.Argument(metavar="BASELINE", help="File with what a profile may need.")],
    accept: Annotated[bool, typer.Option("--accept", help="Make the profile the baseline, and show what changes.")] = (
        False
    ),
    against: Annotated[
        str | None,
        typer.Option(metavar="REVISION", help="Also time the engine in turn with itself at this revision of git."),
    ] = None,
    blocks: Annotated[int, typer.Option(metavar="N", min=5, help="Blocks old, new, new, old to be timed.")] = 30,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", min=0.001, help="Slowdown that is worth an alarm.")
    ] = 0.03,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Hold a profile against a baseline.

    Counts must be equal; FLOPs, bytes and the peak may move by 0.5 %. Exit status 4 if anything needs more.
    """
    from harness.continuous_integration import refuse_update
    from harness.gate_results import GateVerdict, PairedRatio, TimeVerdict
    from harness.profiling.gate.compare import run_gate
    from harness.report.gate_text import gate_text

    if accept:
        refuse_update("--accept")
    result = run_gate(profile, baseline, accept=accept)
    times: dict[str, PairedRatio] = {}
    if against is not None:
        from harness.profiling.gate.baseline import profile_file
        from harness.profiling.gate.revision_timing import time_against

        document = json.loads(read_text(profile_file(profile)))
        times = time_against(against, document, num_blocks=blocks, tolerance=tolerance)
    if format is opt.Format.JSON:
        write_json(
            {
                "schema_version": 1,
                "verdict": result.verdict,
                "key": result.key,
                "changes": [asdict(change) | {"is_regression": change.is_regression} for change in result.changes],
                "times": {phase: asdict(found) | {"verdict": found.verdict} for phase, found in times.items()},
            }
        )
    else:
        write(gate_text(result, times))
    is_slower = any(found.verdict is TimeVerdict.SLOWER for found in times.values())
    is_worse = is_slower or result.verdict is GateVerdict.REGRESSION
    return ExitStatus.REGRESSION if is_worse else ExitStatus.PASS
