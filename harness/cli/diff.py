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
        typer.Option(metavar="PATH_OR_HUB_ID", help="Checkpoint; with it, every operation is also judged by replay."),
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
            help="Of folders of tensors: how many times as much as the tensors before it, or as one rounding, a tensor "
            "may differ to be called close. No bound is derived without a model. Of two precisions: roundings from "
            "which an operation is named. [default: 10]",
        ),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.CHECKS.option()] = "human",
) -> int:
    """Compare two recordings, or two folders of tensors.

    Without --model, rows are judged by their distance from the golden, relative to the rounding error of HuggingFace.
    With --model, every operation is also judged separately: it is replayed on the recorded inputs.

    Two recordings of engines in two dtypes are measured, not judged: the error of each layer in roundings to the
    coarser dtype, and its growth. The exit status is 0 whatever was measured.

    Tensors of two folders (.npy, .npz, .safetensors, .pt), which any two engines dumped of the same prompt, are matched
    by their content. The result is the first tensor in the order of the run whose difference is far larger than
    rounding makes it.
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
