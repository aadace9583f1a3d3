"""`harness generate`: continue a prompt, with the reference engine or another."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.answer import TimedContinuation
from harness.command import forms
from harness.command import options as opt
from harness.command.output import write
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.case import RequestSpec, load_case
from harness.formats.checkpoint import Checkpoint, embedded_cases, resolve

if TYPE_CHECKING:
    from reference_engine import LLMEngine, SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")] = None,
    model: opt.Model = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Engine that continues it; others than reference: greedily only.")
    ] = "reference",
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
    chat: Annotated[
        Path | None,
        typer.Option(
            "--chat",
            metavar="FILE",
            help="JSON file with a conversation in the prompt's place: a list of messages, or messages and tools. The "
            "checkpoint's chat template makes the prompt.",
        ),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text as it comes.")] = False,
    show_stats: Annotated[bool, typer.Option("--show-stats", help="Print counts and times on standard error.")] = False,
    format: Annotated[str, forms.CONTINUATION.option()] = "human",
) -> int:
    """Continue a prompt or a conversation with the reference engine, or with another that is installed.

    Standard output has the continuation alone. It ends at the model's own end-of-sequence token, or after
    --max-new-tokens.
    """
    if stream and format == "json":
        raise HarnessError(
            Code.BAD_OPTION, "JSON is written at the end, not streamed", where="--stream", hint="leave one of them away"
        )
    request = opt.one_request(prompt, chat)
    with progress_bar() as report:
        report("loading", 0, 1)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        ask = _Ask(max_new_tokens, sampling, lora, dtype, device, engine_option)
        if engine == "reference":
            open_source = partial(_reference_source, _sampling_params(ask))
        else:
            _refuse_sampling(engine, ask)
            open_source = partial(_engine_source, engine)
        checkpoint = Checkpoint(resolve(model or embedded_model(), local_files_only=local_files_only))
        token_ids = _token_ids(request, checkpoint)
        source = open_source(checkpoint, token_ids, ask)
    answer = _answer(source, checkpoint, len(token_ids), _show if stream else None)
    if stream:
        write("")
    else:
        forms.CONTINUATION.show(answer, format)
    if show_stats:
        typer.echo(answer.stats(), err=True)
    return ExitStatus.PASS


@dataclass(frozen=True, slots=True)
class _Ask:
    """The options of the continuation, and of the engine."""

    max_new_tokens: int
    sampling: Mapping[str, float]
    lora: Path | None
    dtype: str | None
    device: str | None
    engine_options: list[str] | None


@dataclass(frozen=True, slots=True)
class _Source:
    """An engine that is loaded, and what it runs on."""

    tokens: Iterator[tuple[int, str | None]]
    """New tokens, each with why it is the last one, if it is; nothing is computed before the first is asked for."""
    device: str
    dtype: str


def _sampling_params(ask: _Ask) -> "SamplingParams":
    from harness.engines.reference_errors import reference_errors  # seconds to import
    from reference_engine import SamplingParams

    adapter = None if ask.lora is None else "lora"
    with reference_errors("SamplingParams"):
        return SamplingParams(max_new_tokens=ask.max_new_tokens, adapter=adapter, **ask.sampling)  # type: ignore[arg-type]


def _reference_source(params: "SamplingParams", checkpoint: Checkpoint, token_ids: list[int], ask: _Ask) -> _Source:
    adapters = {} if ask.lora is None else {"lora": ask.lora}
    engine = open_reference_engine(
        checkpoint, dtype=ask.dtype, device=ask.device, options=ask.engine_options, adapters=adapters
    )
    dtype = str(engine.runner.dtype).removeprefix("torch.")
    return _Source(_reference_tokens(engine, checkpoint.folder, token_ids, params), str(engine.runner.device), dtype)


def _reference_tokens(
    engine: "LLMEngine", folder: Path, token_ids: list[int], params: "SamplingParams"
) -> Iterator[tuple[int, str | None]]:
    from harness.engines.reference_errors import reference_errors

    with reference_errors(folder):
        engine.add_request(token_ids, params)
        while engine.has_unfinished():  # prompts longer than a step's budget take several steps without an output
            for output in engine.step():
                yield output.token_id, output.finish_reason and output.finish_reason.value


def _refuse_sampling(engine: str, ask: _Ask) -> None:
    for option, given in (("--temperature", ask.sampling["temperature"]), ("--lora", ask.lora)):
        if given:
            raise HarnessError(
                Code.BAD_OPTION, f"the engine {engine!r} is asked for the likeliest tokens of the model alone",
                where=option, expected="not given", actual=given, hint="--engine reference",
            )  # fmt: skip


def _engine_source(name: str, checkpoint: Checkpoint, token_ids: list[int], ask: _Ask) -> _Source:
    from harness.cli.continue_prompt import continue_prompt
    from harness.plan import check_device, resolve_dtype

    device = ask.device or "cpu"
    check_device(device)
    dtype = resolve_dtype(ask.dtype or "auto", checkpoint)
    options = opt.parse_engine_options(ask.engine_options)
    tokens = continue_prompt(
        name, checkpoint, token_ids, dtype=dtype, device=device, options=options, max_new_tokens=ask.max_new_tokens
    )
    return _Source(tokens, device, dtype)


def embedded_model() -> str:
    """Return the model that is used if none is named."""
    return load_case(embedded_cases() / "default.toml").model


def _token_ids(request: RequestSpec, checkpoint: Checkpoint) -> list[int]:
    from harness.plan import prompt_tokens
    from reference_engine.requests.tokenizer import has_tokenizer

    if not has_tokenizer(checkpoint.folder):
        raise HarnessError(
            Code.NO_TOKENIZER, "the checkpoint has no tokenizer", where=checkpoint.folder, expected="tokenizer.json",
            hint="copy it there: text goes in and comes out",
        )  # fmt: skip
    return list(prompt_tokens(request, checkpoint, where="--prompt"))


def open_reference_engine(
    checkpoint: Checkpoint,
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
    from harness.engines.reference_backend import choose_backend
    from harness.engines.reference_errors import reference_errors
    from harness.engines.reference_options import parse_reference_options
    from harness.plan import check_device, resolve_dtype
    from reference_engine import EngineConfig, LLMEngine

    check_device(device or "cpu")
    chosen = choose_backend(
        opt.parse_engine_options(options),
        folder=checkpoint.folder,
        device=device or "cpu",
        has_adapters=bool(adapters),
    )
    if chosen.why_slower:
        typer.echo(chosen.description, err=True)
    given = {"max_num_seqs": 1, **parse_reference_options(chosen.options)}
    with reference_errors(checkpoint.folder):
        config = EngineConfig(dtype=resolve_dtype(dtype or "auto", checkpoint), device=device or "cpu", **given)
        return LLMEngine(checkpoint.folder, config, adapters=adapters)


def _answer(
    source: _Source, checkpoint: Checkpoint, num_prompt_tokens: int, show: Callable[[str], None] | None
) -> TimedContinuation:
    """Take the tokens, and hand each piece of text to `show` when it is there."""
    from harness.engines.reference_errors import reference_errors
    from harness.engines.reference_threads import engine_threads
    from reference_engine.requests.detokenizer import Detokenizer
    from reference_engine.requests.tokenizer import Tokenizer

    with reference_errors(checkpoint.folder):
        detokenizer = Detokenizer(Tokenizer(checkpoint.folder).decode)
    pieces: list[str] = []
    generated: list[int] = []
    seconds: list[float] = []
    finish_reason = "length"
    with engine_threads(checkpoint.hidden_size, source.device):
        start = time.perf_counter()
        for token, reason in source.tokens:
            seconds.append(time.perf_counter() - start)
            generated.append(token)
            pieces.append(detokenizer.add(token))
            if reason is not None:
                finish_reason = reason
                pieces[-1] += detokenizer.finish()
            if show is not None:
                show(pieces[-1])
    return TimedContinuation(
        text="".join(pieces),
        token_ids=generated,
        finish_reason=finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        elapsed_seconds=seconds[-1],
        ttft_ms=1000 * seconds[0],
        device=source.device,
        dtype=source.dtype,
    )


def _show(piece: str) -> None:
    if piece:
        write(piece, end="")
