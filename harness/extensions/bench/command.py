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

app = typer.Typer(
    name="bench", no_args_is_help=True, rich_markup_mode=None, help="Compare the speed of an engine with other engines."
)


@app.callback()
def bench() -> None:
    """Compare the speed of an engine with other engines."""


@app.command("engine", cls=StrictCommand)
def bench_engine(
    shape: Annotated[
        str, typer.Option(metavar="NAME", help="tiny, 142m, qwen3-0.6b or qwen3-8b, with random weights.")
    ] = "142m",
    model: Annotated[
        str | None, typer.Option(metavar="PATH_OR_HUB_ID", help="Checkpoint to use instead of a shape.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...")] = "cpu",
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of times that each measurement is repeated.")
    ] = 3,
    requests: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Number of requests of different lengths. [default: as set by the shape]"
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Equal requests of a decode step. Repeatable. [default: 1 and 16]"),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="Tokens of their prompts. Repeatable. [default: as set by the shape]"),
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Engine to time.")] = "reference",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Engine to compare with: hf-generate, hf-continuous, llamacpp, hf-static, gpt-fast or an installed "
            "engine. Repeatable. [default: the first three; on a GPU all but llamacpp]",
        ),
    ] = None,
    float8_weights: Annotated[
        bool,
        typer.Option(
            "--float8-weights",
            help="Keep the engine's matrices in float8, in blocks of 128. Its peers get the same values in --dtype.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the weights and prompts.")] = 0,
    engine_option: opt.EngineOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result to this file as JSON.")
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, BENCH.option()] = "human",
) -> int:
    """Compare the speed of an engine with others.

    Times prefill, decode and continuous batching of the engine, HuggingFace and llama.cpp. All engines run the same
    weights and prompts. Before timing, the command checks that they generate the same tokens.
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
            batch_sizes=batch_size or (),
            prompt_lens=prompt_tokens or (),
            engine=engine,
            peer_names=peer or (),
            engine_options=opt.parse_engine_options(engine_option),
            has_float8_weights=float8_weights,
            progress=report,
        )
    if out is not None:
        with writing(out):
            out.write_text(json.dumps(result.json(), indent=1) + "\n", encoding="utf-8")
    BENCH.show(result, format)
    return ExitStatus.PASS
