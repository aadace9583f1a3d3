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
        Path | None, typer.Argument(metavar="PATH", help="A .safetensors or .gguf file, or a checkpoint folder.")
    ] = None,
    *,
    given: Annotated[opt.Given, opt.CaseOptions("model", "hf", *opt.ENGINE, "dtype", "device")],
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.INSPECTED.option()] = "human",
) -> int:
    """Show what is in a safetensors or GGUF file, or a checkpoint.

    Header, tensors, dtypes, shapes, offsets and shards; for a checkpoint also what is missing for its config.

    With --engine NAME in the place of PATH: the settings that the engine has made of --model (theta, rotary
    frequencies, eps, windows, head sizes, experts, ...) beside HuggingFace's. Nothing is run. The exit status is 1 if
    one differs, and 5 if the engine shows none.
    """
    if path is not None and not given:
        from harness.formats.inspect import inspect_path

        forms.INSPECTED.show(inspect_path(path), format)
        return ExitStatus.PASS
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
