"""`harness generate`: continue a prompt with the reference engine."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.case import load_case
from harness.checkpoint import embedded_cases, resolve
from harness.cli import options as opt
from harness.cli.answer import Answer
from harness.cli.output import write, write_json
from harness.cli.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from reference_engine import LLMEngine, SamplingParams


def generate(
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")],
    model: opt.Model = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Draw among K tokens; 0: among all.")] = 0,
    top_p: Annotated[float, typer.Option(metavar="P", help="Draw among the likeliest tokens of this mass.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(metavar="P", help="Draw among tokens of this share of the likeliest one's probability.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Equal seeds draw equal tokens.")] = 0,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    engine_option: opt.EngineOption = None,
    lora: opt.Lora = None,
    local_files_only: opt.LocalFilesOnly = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    show_stats: Annotated[bool, typer.Option("--show-stats", help="Print counts and times on standard error.")] = False,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Continue a prompt with the reference engine.

    Standard output has the continuation alone. It ends at the model's own end-of-sequence token, or after
    --max-new-tokens.
    """
    if stream and format is opt.Format.JSON:
        raise HarnessError(
            Code.BAD_OPTION, "JSON is written at the end, not streamed", where="--stream", hint="leave one of them away"
        )
    with progress_bar() as report:
        report("loading", 0, 1)
        from harness.engines.reference_errors import reference_errors  # seconds to import
        from reference_engine import SamplingParams

        with reference_errors("SamplingParams"):
            params = SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                adapter=None if lora is None else "lora",
            )
        folder = resolve(model or embedded_model(), local_files_only=local_files_only)
        token_ids = _token_ids(prompt, folder, chat=chat)
        adapters = {} if lora is None else {"lora": lora}
        engine = open_reference_engine(folder, dtype=dtype, device=device, options=engine_option, adapters=adapters)
    with reference_errors(folder):
        answer = _answer(engine, token_ids, params, _show if stream else None)
    if format is opt.Format.JSON:
        write_json(answer.json())
    else:
        write("" if stream else answer.text)
    if show_stats:
        typer.echo(answer.stats(), err=True)
    return ExitStatus.PASS


def embedded_model() -> str:
    """Return the model that is used where none is named."""
    return load_case(embedded_cases() / "default.toml").model


def _token_ids(prompt: str, folder: Path, *, chat: bool) -> list[int]:
    if not (folder / "tokenizer.json").is_file():
        raise HarnessError(
            Code.NO_TOKENIZER, "the checkpoint has no tokenizer", where=folder, expected="tokenizer.json",
            hint="copy it there: text goes in and comes out",
        )  # fmt: skip
    if chat:
        from harness.cli.chat import chat_token_ids

        return chat_token_ids(prompt, folder)
    from harness.plan import tokenize

    return tokenize(prompt, folder, where="--prompt")


def open_reference_engine(
    folder: Path,
    *,
    dtype: str | None,
    device: str | None,
    options: list[str] | None,
    adapters: Mapping[str, Path] | None = None,
) -> "LLMEngine":
    """Open the reference engine, for one request at a time unless `options` say otherwise.

    Raises:
        HarnessError: the device is not there, or the engine cannot serve the checkpoint.
    """
    from harness.engines.reference_errors import reference_errors
    from harness.engines.reference_options import parse_reference_options
    from harness.plan import check_device, resolve_dtype
    from reference_engine import EngineConfig, LLMEngine

    check_device(device or "cpu")
    given = {"max_num_seqs": 1, **parse_reference_options(opt.parse_engine_options(options))}
    with reference_errors(folder):
        config = EngineConfig(dtype=resolve_dtype(dtype or "auto", folder), device=device or "cpu", **given)
        return LLMEngine(folder, config, adapters=adapters)


def _answer(
    engine: "LLMEngine", token_ids: list[int], params: "SamplingParams", show: Callable[[str], None] | None
) -> Answer:
    """Run the request, and hand each piece of text to `show` when it is there."""
    from harness.threads import suitable_threads
    from reference_engine.detokenizer import Detokenizer

    detokenizer, pieces, generated, seconds = Detokenizer(engine.tokenizer.decode), [], [], []
    finish_reason = None
    with suitable_threads(engine.model_config.hidden_size) if engine.runner.device.type == "cpu" else nullcontext():
        start = time.perf_counter()
        engine.add_request(token_ids, params)
        while finish_reason is None:
            for output in engine.step():  # prompts longer than a step's budget take several steps without an output
                seconds.append(time.perf_counter() - start)
                generated.append(output.token_id)
                finish_reason = output.finish_reason
                pieces.append(detokenizer.add(output.token_id))
                if finish_reason is not None:
                    pieces[-1] += detokenizer.finish()
                if show is not None:
                    show(pieces[-1])
    return Answer(
        text="".join(pieces),
        token_ids=generated,
        finish_reason=finish_reason.value,
        num_prompt_tokens=len(token_ids),
        elapsed_seconds=seconds[-1],
        ttft_ms=1000 * seconds[0],
        device=str(engine.runner.device),
        dtype=str(engine.runner.dtype).removeprefix("torch."),
    )


def _show(piece: str) -> None:
    if piece:
        write(piece, end="")
