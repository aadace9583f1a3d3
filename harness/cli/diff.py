"""`harness diff`: compare two recordings, or two folders of tensors; measure two recordings in two precisions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.inspect import is_dump
from harness.formats.schedule import TRIGGERS


def diff(
    expected: Annotated[Path, typer.Argument(metavar="EXPECTED", help="Golden, or recording of another engine.")],
    actual: Annotated[Path, typer.Argument(metavar="ACTUAL", help="Recording under test.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID", help="Checkpoint; with it, the harness also judges every operation by replay."
        ),
    ] = None,
    lora: opt.Lora = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device for the replay: cpu, cuda, cuda:1, ...")
    ] = "cpu",
    truth: opt.TruthChoice = None,
    taps: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Taps that the recording must hold: all, cache, logits or tokens, as in `harness check`, or a glob of "
            "names. Repeatable. [default: all]",
        ),
    ] = None,
    lacking: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE", help="Site that the engine of ACTUAL cannot record: k_cache, mlp.act, ... Repeatable."
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRIGGER",
            help=f"Trigger that the recording must have reached: {', '.join(TRIGGERS)}. Repeatable. [default: decode]",
        ),
    ] = None,
    close: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            min=0,
            help="For folders of tensors: a tensor is close if it differs by at most FACTOR times as much as earlier "
            "tensors, or FACTOR roundings. For two dtypes: shows the first operation whose error exceeds FACTOR "
            "roundings. [default: 10]",
        ),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.CHECKS.option()] = "human",
) -> int:
    """Compare two recordings, or two folders of tensors.

    Without --model, judges rows by their distance from the golden, relative to the rounding error of HuggingFace. With
    --model, also judges every operation separately: replays it on the recorded inputs.

    For recordings of engines in two dtypes, shows the error of each layer in roundings to the coarser dtype, and its
    growth. Nothing is judged, and the exit status is 0.

    For two folders of tensors (.npy, .npz, .safetensors, .pt) that two engines dumped for the same prompt, matches
    tensors by content. Shows the first tensor, in the order of the run, whose difference is far larger than rounding
    explains.
    """
    of_judging: dict[str, object] = {"--lora": lora, "--truth": truth, "--lacking": lacking, "--require": require}
    of_judging |= {"--device": None if device == "cpu" else device}
    if is_dump(expected) and is_dump(actual):
        of_model = {"--model": model, "--taps": taps, "--local-files-only": local_files_only or None}
        _refuse_unused(of_model | of_judging, "two folders of tensors")
        return _diff_dumps(expected, actual, close, format)
    from harness.judge.jobs.measure import has_two_precisions

    if model is None and has_two_precisions(expected, actual):
        _refuse_unused(of_judging, "recordings in two dtypes")
        return _measure(expected, actual, taps or ("*",), close, format)
    _refuse_unused({"--close": close}, "two recordings")
    with progress_bar() as report:
        from harness.judge.jobs.diff import run_diff
        from harness.report.check.dtypes import DtypeChecks

        report("comparing", 0, 1)
        result = run_diff(
            expected,
            actual,
            model=model,
            lora=lora,
            taps=tuple(taps or ("*",)),
            lacking=tuple(lacking or ()),
            require=tuple(require or ("decode",)),
            truth=truth or "auto",
            device=device,
            progress=report,
            local_files_only=local_files_only,
        )
    forms.CHECKS.show(DtypeChecks(results=[result]), format)
    return STATUS[result.outcome]


def _diff_dumps(expected: Path, actual: Path, close: float | None, format: str) -> int:
    with progress_bar() as report:
        from harness.judge.dumps import CLOSE, compare_dumps

        result = compare_dumps(expected, actual, close=CLOSE if close is None else close, progress=report)
    forms.DUMPS.show(result, format)
    return STATUS[result.outcome]


def _measure(expected: Path, actual: Path, taps: Sequence[str], close: float | None, format: str) -> int:
    from harness.judge.jobs.measure import LEVEL, run_measurement

    measured = run_measurement(expected, actual, taps=taps, level=LEVEL if close is None else close)
    forms.MEASUREMENT.show(measured, format)
    return ExitStatus.PASS


def _refuse_unused(options: Mapping[str, object], compared: str) -> None:
    """Refuse options that a comparison would ignore."""
    for name, value in options.items():
        if value is not None:
            raise HarnessError(
                Code.BAD_OPTION, f"a comparison of {compared} does not take it", where=name, actual=value
            )
