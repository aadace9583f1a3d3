"""`harness check`: the main job."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.cli.output import print_result
from harness.cli.progress import progress_bar


def check(
    model: opt.Model = None,
    engine: opt.EngineName = "reference",
    engine_option: opt.EngineOption = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    prompt: opt.PromptText = None,
    prompt_file: opt.PromptFile = None,
    token_ids: opt.TokenIds = None,
    max_new_tokens: opt.MaxNewTokens = None,
    schedule: opt.ScheduleNames = None,
    case: opt.CaseFile = None,
    out: Annotated[Path | None, typer.Option(help="Folder, new or empty, to keep the engine's recordings in.")] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Check an engine against HuggingFace, row by row, operation by operation.

    Without arguments: the reference engine on the embedded qwen3-tiny under the schedules plain, chunked and batched.
    """
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        from harness.check import run_check  # noqa: PLC0415: seconds to import

        plan = opt.build_plan(
            case_file=case,
            model=model,
            engine=engine,
            engine_options=engine_option,
            dtype=dtype,
            device=device,
            prompts=prompt,
            prompt_file=prompt_file,
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            schedules=schedule,
            local_files_only=local_files_only,
        )
        result = run_check(plan, out=out, progress=report)
    return print_result(result, format)
