"""`harness inspect`: what is in a file or folder that the harness reads, and the settings of an engine on a model."""

from pathlib import Path
from typing import Annotated

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError


@grouped
def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="PATH",
            help="A .safetensors or .gguf file, a checkpoint (or the name of an embedded one), a recording, golden or "
            "dump, a trace (.json, .json.gz, .sqlite, .pftrace), a memory snapshot (.pickle), or the cache's folder.",
        ),
    ] = None,
    beside: Annotated[
        Path | None, typer.Argument(metavar="BESIDE", help="With --tensor: a second path that holds the same tensor.")
    ] = None,
    *,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor",
            "--tap",
            metavar="NAME",
            help="Show statistics, a histogram and the first values of one tensor or tap.",
        ),
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="REQUEST:POSITION", help="Row of the tap, in a recording or golden.")
    ] = None,
    slice: Annotated[str | None, typer.Option(metavar="PART", help="Slice of the tensor: 0:4,:8,3.")] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Checkpoint whose weights are compared with those of PATH; with --map, a saved map."
        ),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With --against: weights of PATH before an update; shows how much of the update arrived.",
        ),
    ] = None,
    map: Annotated[bool, typer.Option("--map", help="With --engine: show the tensor of each tap.")] = False,
    modules: Annotated[
        bool, typer.Option("--modules", help="Show the modules of a checkpoint, and the file of each parameter.")
    ] = False,
    fields: Annotated[opt.Fields, opt.CaseOptions("model", "hf", *opt.ENGINE, "dtype", "device", "mtp")],
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.INSPECTED.option()] = "human",
) -> int:
    """Show files, checkpoints and weights, or the settings and taps of an engine.

    With PATH: show the header, tensors, dtypes, shapes, offsets and shards of a file or checkpoint. The exit status is
    1 if a tensor that the config needs is missing or has another shape. For a recording or golden, show its requests,
    steps, tokens with the likeliest next ones, and taps. For a trace or memory snapshot, show the same as `harness
    trace summary` or `harness trace memory`.

    With --modules: show the modules that transformers builds of a checkpoint, with classes, parameters and files.

    With --tensor NAME: show statistics of one tensor of a checkpoint, file, golden, recording or dump. With BESIDE,
    compare it with the same tensor of another path.

    With --against B: compare the weights of two checkpoints, tensor by tensor. Renamed, fused and sharded tensors are
    matched by their values. Values of the same dtype must be equal; otherwise they must be equal within the rounding of
    the coarser dtype.

    With --engine NAME instead of PATH: compare the settings of the engine for --model (theta, rotary frequencies, eps,
    windows, head sizes, experts, ...) with those of HuggingFace, without running it. The exit status is 1 if a setting
    differs, and 5 if the engine shows none. With --map: show the tensor of each tap. The exit status is 1 if a tap
    differs from the map in --against.
    """
    if before is not None and (against is None or path is None):
        raise _misused(
            "--before", "--before is about the weights of two checkpoints", "harness inspect A --against B --before OLD"
        )
    if tensor is not None:
        if path is None or fields or against is not None or map:
            raise _misused("--tensor", "a tensor lies in a file or folder", "harness inspect PATH --tensor NAME")
        return _show_tensor([path] if beside is None else [path, beside], tensor, row, slice, format)
    if beside is not None or row is not None or slice is not None:
        raise _misused("--tensor", "BESIDE, --row and --slice are about one tensor", "name it: --tensor NAME")
    if modules:
        if path is None or fields or against is not None or map:
            raise _misused("--modules", "the modules are those of a checkpoint", "harness inspect PATH --modules")
        return _show_modules(path, format)
    if path is not None and against is not None and not fields and not map:
        return _compare_weights(str(path), against, before, local_files_only, format)
    if path is not None and against is None and not fields and not map:
        return _show(path, format)
    if path is not None or "engine" not in fields:
        raise _misused(
            "PATH", "one thing is inspected: a path, or an engine", "harness inspect PATH, or --engine NAME --model M"
        )
    if map:
        from harness.cli.tap_map import show_tap_map

        return show_tap_map(fields, None if against is None else Path(against), local_files_only, format)
    if against is not None:
        raise _misused(
            "--against", "an engine's settings are compared with HuggingFace's", "add --map, or leave --against out"
        )
    return _show_settings(fields, local_files_only, format)


def _misused(where: str, what: str, hint: str) -> HarnessError:
    return HarnessError(Code.BAD_OPTION, what, where=where, hint=hint)


def _show_tensor(paths: list[Path], tensor: str, row: str | None, part: str | None, format: str) -> int:
    from harness.formats.values import inspect_values, parse_row

    place = None if row is None else parse_row(row)
    forms.VALUES.show(inspect_values(paths, tensor, row=place, part=part), format)
    return ExitStatus.PASS


def _show_modules(path: Path, format: str) -> int:
    from harness.formats.checkpoint import Checkpoint
    from harness.formats.checkpoint.locate import at_hand
    from harness.formats.checkpoint.modules import module_tables

    forms.MODULES.show(module_tables(Checkpoint(at_hand(path))), format)
    return ExitStatus.PASS


def _show_settings(fields: opt.Fields, local_files_only: bool, format: str) -> int:
    from harness.judge.jobs.settings import run_settings
    from harness.plan import plan_engine

    result = run_settings(plan_engine(**fields, local_files_only=local_files_only))
    forms.SETTINGS.show(result, format)
    if result.differing:
        return ExitStatus.MISMATCH
    return ExitStatus.PASS if result.num_compared else ExitStatus.NOTHING_CHECKED


def _compare_weights(first: str, second: str, before: str | None, local_files_only: bool, format: str) -> int:
    with progress_bar() as report:
        report("comparing", 0, 1)
        from harness.judge.weights.compare import compare_weights

        result = compare_weights(first, second, before=before, local_files_only=local_files_only)
    forms.WEIGHTS.show(result, format)
    return STATUS[result.outcome]


def _show(path: Path, format: str) -> int:
    from harness.profiling.trace.file import TRACE_ENDINGS

    if path.name.endswith(TRACE_ENDINGS):
        from harness.profiling.trace.summary import summarize

        forms.TRACES.show([summarize(path, None)], format, peak_flops_per_s=None)
        return ExitStatus.PASS
    if path.suffix in (".pickle", ".pkl"):
        from harness.profiling.memory.summary import summarize_memory

        forms.MEMORY.show([summarize_memory(path)], format)
        return ExitStatus.PASS
    from harness.formats.inspect import inspect_path

    contents = inspect_path(path)
    if contents["kind"] in ("golden", "recording"):
        from harness.oracle.contents import with_contents

        contents = with_contents(contents)
    forms.INSPECTED.show(contents, format)
    against = contents.get("against_config", {})
    return ExitStatus.MISMATCH if against.get("missing") or against.get("misshapen") else ExitStatus.PASS
