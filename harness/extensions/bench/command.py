"""`harness bench`: how fast, against whom."""

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.base.files import writing
from harness.command import options as opt
from harness.command.forms import Forms
from harness.command.progress import progress_bar
from harness.command.strict import StrictCommand
from harness.errors import Code, ExitStatus, HarnessError

BENCH = Forms(
    human="harness.extensions.bench.report:bench_text", json="harness.extensions.bench.report:BenchResult.json"
)

app = typer.Typer(name="bench", no_args_is_help=True, help="Time an engine against its peers.")


@app.callback()
def bench() -> None:
    """Time an engine against its peers."""


@app.command("engine", cls=StrictCommand)
def bench_engine(
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="tiny, 142m, qwen3-0.6b or qwen3-8b, with random weights.")
    ] = "142m",
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_HUB_ID", help="Checkpoint of your own, in place of a shape.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = "cpu",
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Times that everything is timed, in turn.")] = 3,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests of uneven lengths. [default: the shape's own]")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Engine to time.")] = "reference",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="hf-generate, hf-continuous, llamacpp or an engine. Repeatable. [default: all but other engines]",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the weights and prompts.")] = 0,
    engine_option: opt.EngineOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write the JSON to as well.")] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, BENCH.option()] = "human",
) -> int:
    """Time prefill, decode and continuous batching of an engine, HuggingFace and llama.cpp.

    All get the same weights and prompts, in the same run, and must generate the same tokens first.
    """
    if out is not None and out.exists():
        raise HarnessError(Code.OUTPUT_EXISTS, "the file is there already", where=out, hint="choose another --out")
    with progress_bar() as report:
        from harness.extensions.bench.run import run_bench
        from harness.formats.checkpoint import Checkpoint, resolve
        from harness.plan import check_device

        check_device(device)
        result = run_bench(
            shape_name=model or shape,
            checkpoint=None if model is None else Checkpoint(resolve(model, local_files_only=local_files_only)),
            dtype=dtype,
            device=device,
            repeats=repeats,
            seed=seed,
            num_requests=requests,
            engine=engine,
            peer_names=peer or (),
            engine_options=opt.parse_engine_options(engine_option),
            progress=report,
        )
    if out is not None:
        with writing(out):
            out.write_text(json.dumps(result.json(), indent=1) + "\n", encoding="utf-8")
    BENCH.show(result, format)
    return ExitStatus.PASS
