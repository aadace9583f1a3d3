"""`harness inspect`: what is in a safetensors or GGUF file or a checkpoint, and the settings of an engine on it."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.grouped import grouped
from harness.errors import Code, ExitStatus, HarnessError


@grouped
def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A .safetensors or .gguf file or a checkpoint; with --tensor also a recording, golden or dump.",
        ),
    ] = None,
    beside: Annotated[
        Path | None, typer.Argument(metavar="BESIDE", help="With --tensor: another place, for the same tensor.")
    ] = None,
    *,
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="One tensor or tap: statistics, histogram, first values.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="REQUEST:POSITION", help="The row of a tap, in a recording or golden.")
    ] = None,
    slice: Annotated[str | None, typer.Option(metavar="PART", help="Part of the tensor: 0:4,:8,3.")] = None,
    given: Annotated[opt.Given, opt.CaseOptions("model", "hf", *opt.ENGINE, "dtype", "device")],
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.INSPECTED.option()] = "human",
) -> int:
    """Show what is in a safetensors or GGUF file, or a checkpoint.

    Header, tensors, dtypes, shapes, offsets and shards; for a checkpoint also what is missing for its config: the exit
    status is 1 where a tensor is missing or has another shape.

    With --tensor NAME: one tensor in figures, of a checkpoint, a file, a golden, a recording or a dump; with BESIDE how
    far that of another place is from it.

    With --engine NAME in the place of PATH: the settings that the engine has made of --model (theta, rotary
    frequencies, eps, windows, head sizes, experts, ...) beside HuggingFace's. Nothing is run. The exit status is 1 if
    one differs, and 5 if the engine shows none.
    """
    if tensor is not None:
        if path is None or given:
            what, hint = "a tensor lies in a file or folder", "harness inspect PATH --tensor NAME"
            raise HarnessError(Code.BAD_OPTION, what, where="--tensor", hint=hint)
        from harness.formats.inspect.values import inspect_values, parse_row

        paths = [path] if beside is None else [path, beside]
        place = None if row is None else parse_row(row)
        forms.VALUES.show(inspect_values(paths, tensor, row=place, part=slice), format)
        return ExitStatus.PASS
    if beside is not None or row is not None or slice is not None:
        what, hint = "BESIDE, --row and --slice are about one tensor", "name it: --tensor NAME"
        raise HarnessError(Code.BAD_OPTION, what, where="--tensor", hint=hint)
    if path is not None and not given:
        from harness.formats.inspect import inspect_path

        found = inspect_path(path)
        forms.INSPECTED.show(found, format)
        against = found.get("against_config", {})
        return ExitStatus.MISMATCH if against.get("missing") or against.get("misshapen") else ExitStatus.PASS
    if path is not None or "engine" not in given:
        what, hint = "one thing is inspected: a path, or an engine", "harness inspect PATH, or --engine NAME --model M"
        raise HarnessError(Code.BAD_OPTION, what, where="PATH", hint=hint)
    from harness.judge.jobs.settings import run_settings
    from harness.plan import plan_engine

    result = run_settings(plan_engine(**given, local_files_only=local_files_only))
    forms.SETTINGS.show(result, format)
    if result.differing:
        return ExitStatus.MISMATCH
    return ExitStatus.PASS if result.num_compared else ExitStatus.NOTHING_CHECKED
