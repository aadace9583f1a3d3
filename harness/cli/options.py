"""Options that several commands share, and how they become a plan."""

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.files import read_text
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec, load_case
from harness.formats.schedule import schedules_help

if TYPE_CHECKING:
    from harness.plan import Plan


class Format(StrEnum):
    """The form of a command's result on standard output."""

    HUMAN = "human"
    JSON = "json"


class ReportFormat(StrEnum):
    """The form of a comparison on standard output."""

    HUMAN = "human"
    MARKDOWN = "markdown"
    JSON = "json"


class Truth(StrEnum):
    """Precision in which HuggingFace's own forward says what is right."""

    AUTO = "auto"
    FLOAT64 = "float64"
    FLOAT32 = "float32"


class TapPreset(StrEnum):
    """The taps that an engine must show."""

    ALL = "all"
    CACHE = "cache"
    LOGITS = "logits"
    TOKENS = "tokens"


Model = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_HUB_ID",
        help="Checkpoint: a folder, a .gguf file, an embedded one by its name, or a hub id. "
        "[default: qwen3-tiny, embedded]",
    ),
]
HFOrigin = Annotated[
    str | None,
    typer.Option(
        "--hf",
        metavar="FOLDER",
        help="HuggingFace checkpoint that a .gguf model was made from: its configuration and tokenizer are used, and "
        "every tensor of the file is held against it.",
    ),
]
EngineName = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="Engine under test. [default: reference]")
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Option of the engine: block_size=32, attention_backend=contiguous; for hf attention=eager. Repeatable.",
    ),
]
Only = Annotated[
    TapPreset | None,
    typer.Option(
        "--taps",
        "--only",
        help="What the engine must show: all taps that it does not declare lacking, its cache and logits, its logits, "
        "or its tokens alone. [default: all]",
    ),
]
Isolate = Annotated[
    bool | None,
    typer.Option(
        "--isolate/--no-isolate",
        help="Run the engine in a process of its own, whose end is an error. [default: for engines of other packages]",
    ),
]
EngineTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Longest time for opening the engine, and for each schedule, in a process of its own. [default: 3600]",
    ),
]
EnginePython = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Python of the environment that the engine is installed in; it needs numpy, and nothing else of ours. "
        "[default: this one]",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="float32, bfloat16, float16, or auto: the checkpoint's own. [default: auto]"),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float32, bfloat16, float16, or auto: the checkpoint's own. Repeatable: the table then sets them side by "
        "side. [default: auto]",
    ),
]
Device = Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ... [default: cpu]")]
TruthChoice = Annotated[
    Truth | None,
    typer.Option(
        "--truth",
        help="Precision of the truth; auto: float64 for engines in float32, float32 for those in 16 bits. "
        "[default: auto]",
    ),
]
PromptText = Annotated[
    list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text of one request. Repeatable.")
]
PromptFile = Annotated[Path | None, typer.Option(metavar="FILE", help="File with the text of one request.")]
TokenIds = Annotated[list[str] | None, typer.Option(metavar="IDS", help="Token ids of one request: 1,2,3. Repeatable.")]
Continuations = Annotated[
    list[str] | None,
    typer.Option(
        "--continuation",
        metavar="IDS",
        help="Token ids that follow a prompt in the place of HuggingFace's greedy ones: 1,2,3. Once for each request, "
        "in their order.",
    ),
]
MaxNewTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens to generate for each request. [default: 24]")
]
ScheduleNames = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help=f"{schedules_help()}, where N is the tokens of a chunk or the number of ranks; comma list or repeated. "
        "[default: plain, chunked and batched, as far as the prompts can reach them]",
    ),
]
CaseFile = Annotated[
    Path | None,
    typer.Option("--case", metavar="FILE", help="Case (TOML) to take everything from that no other option gives."),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Check a server with OpenAI's completions, in place of an engine; the environment's HARNESS_API_KEY is "
        "its key.",
    ),
]
ServedModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the model at the server. [default: the first it lists]")
]
Lora = Annotated[
    Path | None,
    typer.Option("--lora", metavar="FOLDER", help="LoRA adapter in PEFT's format, beside the model's own weights."),
]
OtherLora = Annotated[
    list[Path] | None,
    typer.Option(
        "--other-lora", metavar="FOLDER",
        help="Adapter that the engine serves to other requests: rows that got it are told so. Repeatable.",
    ),
]  # fmt: skip
Concurrency = Annotated[int | None, typer.Option(metavar="N", help="Most requests at a time. [default: 8]")]
RequestTimeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Longest silence of the server in a request. [default: 60]")
]
Again = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Prompts that the server gets again alone, repeated, reversed, continued. [default: 4]"
    ),
]
LocalFilesOnly = Annotated[bool, typer.Option("--local-files-only", help="Never ask the model hub.")]
OutFormat = Annotated[Format, typer.Option("--format", help="How to print the result.")]
OutReportFormat = Annotated[ReportFormat, typer.Option("--format", help="How to print the result.")]


ENGINE = ("engine", "engine_option", "isolate", "engine_timeout", "engine_python")
"""Fields of `CliOptions` about the engine under test."""
WORKLOAD = ("device", "truth", "prompt", "prompt_file", "token_ids", "max_new_tokens")
"""Fields of `CliOptions` about what is run, and where; every command but `check` has `dtype` besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliOptions:
    """Options of the command line that say what is to be run; None for those that were not given.

    A command names the fields that are its options: see `grouped`.
    """

    model: Model = None
    hf: HFOrigin = None
    engine: EngineName = None
    engine_option: EngineOption = None
    isolate: Isolate = None
    engine_timeout: EngineTimeout = None
    engine_python: EnginePython = None
    dtype: Dtype = None
    device: Device = None
    truth: TruthChoice = None
    prompt: PromptText = None
    prompt_file: PromptFile = None
    token_ids: TokenIds = None
    max_new_tokens: MaxNewTokens = None
    continuation: Continuations = None
    schedule: ScheduleNames = None
    only: Only = None
    case: CaseFile = None
    lora: Lora = None
    other_lora: OtherLora = None

    def plan(self, *, local_files_only: bool) -> "Plan":
        """Return the plan: the case, or the embedded default, with what was given in place of its own.

        Raises:
            HarnessError: an option makes no sense, or a name in it cannot be resolved.
        """
        from harness.plan import plan_request  # seconds to import

        return plan_request(
            case=None if self.case is None else load_case(self.case),
            model=self.model,
            hf=self.hf,
            engine=self.engine,
            engine_options=parse_engine_options(self.engine_option),
            dtype=self.dtype,
            device=self.device,
            truth=self.truth,
            requests=self.requests(),
            max_new_tokens=self.max_new_tokens,
            schedules=self.schedule or (),
            local_files_only=local_files_only,
            only=self.only,
            isolate=self.isolate,
            engine_timeout_s=self._positive_timeout(),
            engine_python=self.engine_python,
            lora=self.lora,
            other_loras=self.other_lora or (),
        )

    def requests(self) -> list[RequestSpec]:
        """Return the requests that were given, in the order text, file, token ids; none if none were."""
        texts = [("--prompt", text) for text in self.prompt or ()]
        if self.prompt_file is not None:
            texts.append((f"--prompt-file {self.prompt_file}", _read_text(self.prompt_file)))
        for where, text in texts:
            if not text.strip():
                raise HarnessError(
                    Code.EMPTY_PROMPT, "the prompt is empty", where=where, actual=repr(text), hint="give some text"
                )
        requests = [RequestSpec(prompt=text) for _, text in texts]
        requests += [RequestSpec(token_ids=_parse_ids(text, "--token-ids")) for text in self.token_ids or ()]
        return self._continued(requests) if self.continuation else requests

    def _continued(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        """Give each request its continuation."""
        given = [_parse_ids(text, "--continuation") for text in self.continuation or ()]
        if len(given) != len(requests):
            what, expected = "each request needs its continuation", f"{len(requests)}, one for each prompt given"
            hint = "give --prompt or --token-ids, and as many --continuation"
            raise HarnessError(
                Code.BAD_OPTION, what, where="--continuation", expected=expected, actual=len(given), hint=hint
            )
        if self.max_new_tokens is not None:
            what = "a continuation says how many tokens follow"
            raise HarnessError(Code.BAD_OPTION, what, where="--max-new-tokens", hint="leave --max-new-tokens out")
        pairs = zip(requests, given, strict=True)
        return [request.model_copy(update={"continuation": token_ids}) for request, token_ids in pairs]

    def _positive_timeout(self) -> float | None:
        if self.engine_timeout is not None and not 0 < self.engine_timeout < math.inf:
            raise HarnessError(
                Code.BAD_OPTION,
                "the time limit must be positive",
                where="--engine-timeout",
                expected="seconds",
                actual=self.engine_timeout,
            )
        return self.engine_timeout


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        what = f"the prompt file cannot be read: {reason}"
        raise HarnessError(Code.BAD_OPTION, what, where="--prompt-file", actual=path) from error


def _parse_ids(text: str, option: str) -> list[int]:
    hint = f"{option} 1,2,3"
    if not text.strip():
        raise HarnessError(Code.EMPTY_PROMPT, "the prompt has no token", where=option, actual=repr(text), hint=hint)
    try:
        return [int(word) for word in (text.split(",") if "," in text else text.split())]
    except ValueError:
        what = "token ids must be integers separated by commas"
        raise HarnessError(Code.BAD_OPTION, what, where=option, actual=repr(text), hint=hint) from None


def parse_engine_options(options: list[str] | None) -> dict[str, str]:
    """Parse NAME=VALUE options; of a name that is given twice the last counts."""
    parsed = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals or not name or not value:
            what = "an engine option is NAME=VALUE"
            raise HarnessError(Code.BAD_OPTION, what, where="--engine-option", expected="NAME=VALUE", actual=option)
        parsed[name] = value
    return parsed
