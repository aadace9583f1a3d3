"""Options that several commands share, and how they become a plan."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.case import RequestSpec
from harness.errors import Code, HarnessError


class Format(StrEnum):
    """How a command writes its result to standard output."""

    HUMAN = "human"
    MARKDOWN = "markdown"
    JSON = "json"


Model = Annotated[str | None, typer.Option(help="Checkpoint folder or hub id. [default: the embedded qwen3-tiny]")]
EngineName = Annotated[str, typer.Option("--engine", help="Engine under test; see `harness check --help`.")]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE for the engine (block_size=32, attention_backend=contiguous; for hf attention=eager)."
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
PromptText = Annotated[
    list[str] | None, typer.Option("--prompt", help="Text of a request; may be given several times.")
]
PromptFile = Annotated[Path | None, typer.Option(help="File with the text of one request.")]
TokenIds = Annotated[
    list[str] | None, typer.Option(help="Token ids of a request, separated by commas; may be given several times.")
]
MaxNewTokens = Annotated[int | None, typer.Option(help="Tokens to generate for each request. [default: 24]")]
ScheduleNames = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        help="plain, chunked[:N], batched, mixed[:N]; may be given several times. [default: the first three]",
    ),
]
LocalFilesOnly = Annotated[bool, typer.Option("--local-files-only", help="Never ask the model hub.")]
OutFormat = Annotated[Format, typer.Option("--format", help="How to print the result.")]
CaseFile = Annotated[Path | None, typer.Option("--case", help="Take everything from this case file (TOML).")]

DEFAULT_MAX_NEW_TOKENS = 24


def requests_from(
    prompts: list[str] | None, prompt_file: Path | None, token_ids: list[str] | None
) -> list[RequestSpec]:
    """Return the requests that the options name, in the order text, file, token ids; none if they name none."""
    requests = [RequestSpec(prompt=text) for text in prompts or ()]
    if prompt_file is not None:
        requests.append(RequestSpec(prompt=_read_text(prompt_file)))
    requests += [RequestSpec(token_ids=_parse_ids(text)) for text in token_ids or ()]
    for request in requests:
        if request.prompt is not None and not request.prompt.strip():
            raise HarnessError(Code.EMPTY_PROMPT, "the prompt is empty", where="--prompt", hint="give some text")
    return requests


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(Code.BAD_OPTION, f"the prompt file cannot be read: {error}", where=path) from error


def _parse_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words:
        raise HarnessError(Code.EMPTY_PROMPT, "the prompt has no token", where="--token-ids", hint="--token-ids 1,2,3")
    try:
        return [int(word) for word in words]
    except ValueError:
        raise HarnessError(
            Code.BAD_OPTION,
            "token ids must be integers separated by commas",
            where="--token-ids",
            actual=text,
            hint="--token-ids 1,2,3",
        ) from None


def parse_engine_options(options: list[str] | None) -> dict[str, str]:
    """Parse NAME=VALUE options."""
    parsed = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise HarnessError(
                Code.BAD_OPTION, "an engine option is NAME=VALUE", where="--engine-option", actual=option
            )
        parsed[name] = value
    return parsed


def build_plan(
    *,
    case_file: Path | None = None,
    model: str | None,
    engine: str,
    engine_options: list[str] | None,
    dtype: str,
    device: str,
    prompts: list[str] | None,
    prompt_file: Path | None,
    token_ids: list[str] | None,
    max_new_tokens: int | None,
    schedules: list[str] | None,
    local_files_only: bool,
) -> Any:
    """Return the `check.Plan` of the options: a case file's or the embedded default's, with what is given replaced.

    A model of the user's own without a prompt is an error: no text suits every tokenizer.
    """
    from harness.case import load_case  # noqa: PLC0415
    from harness.check import make_plan  # noqa: PLC0415: imports torch
    from harness.checkpoint import embedded_cases  # noqa: PLC0415

    if max_new_tokens is not None and max_new_tokens < 1:
        raise HarnessError(Code.BAD_OPTION, "--max-new-tokens must be at least 1", actual=max_new_tokens)
    requests = requests_from(prompts, prompt_file, token_ids)
    case = load_case(case_file or embedded_cases() / "default.toml")
    if case_file is None and model is not None and not requests:
        raise HarnessError(
            Code.EMPTY_PROMPT, "a model needs a prompt", where="--model", hint='add --prompt "..." or --token-ids 1,2,3'
        )
    own = case_file is None and (model is not None or bool(requests))
    return make_plan(
        model=model or case.model,
        engine=engine if case_file is None or engine != "reference" else case.engine,
        dtype=dtype if dtype != "auto" else case.dtype,
        device=device if case_file is None or device != "cpu" else case.device,
        requests=requests or case.requests,
        max_new_tokens=max_new_tokens or (DEFAULT_MAX_NEW_TOKENS if own else case.max_new_tokens),
        schedules=schedules or (None if own else case.schedules),
        engine_options={name: str(value) for name, value in case.engine_options.items()}
        | parse_engine_options(engine_options),
        require=() if own or schedules else case.require,
        local_files_only=local_files_only,
    )
