"""Options that several commands share, and their conversion into the arguments of `plan_request`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from harness.base.files import parse_json, read_text
from harness.errors import Code, HarnessError
from harness.formats.case import Case, RequestSpec, Truth, load_case


def _option_of(field: str) -> Any:
    """Return the typer option that sets a field of a case."""
    declared = Case.options()[field]
    return typer.Option(declared.name, metavar=declared.metavar, help=declared.help)


Model = Annotated[str | None, _option_of("model")]
EngineOption = Annotated[list[str] | None, _option_of("engine_options")]
Dtype = Annotated[str | None, _option_of("dtype")]
Device = Annotated[str | None, _option_of("device")]
TruthChoice = Annotated[
    str | None,
    typer.Option("--truth", metavar="|".join(get_args(Truth)), help=Case.options()["truth"].help),
]
Lora = Annotated[Path | None, _option_of("lora")]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float32, bfloat16, float16, or auto: the dtype of the checkpoint. Repeatable: the table compares the "
        "dtypes. [default: auto]",
    ),
]
PromptText = Annotated[
    list[str] | None, typer.Option("--prompt", metavar="TEXT", help="Text prompt of one request. Repeatable.")
]
PromptFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="File with the prompt of one request: text or, in a .json file, a conversation for the chat template: a "
        "list of messages, or messages and tools. Repeatable.",
    ),
]
TokenIds = Annotated[
    list[str] | None, typer.Option(metavar="IDS", help="Prompt of one request as token ids: 1,2,3. Repeatable.")
]
Continuations = Annotated[
    list[str] | None,
    typer.Option(
        "--continuation",
        metavar="IDS",
        help="Token ids that follow a prompt, instead of HuggingFace's greedy tokens: 1,2,3. Give one for each "
        "request, in the order of the requests.",
    ),
]
CaseFile = Annotated[
    Path | None,
    typer.Option("--case", metavar="FILE", help="Case file (TOML); options override it."),
]
LocalFilesOnly = Annotated[
    bool, typer.Option("--local-files-only", help="Use only local files; do not contact the model hub.")
]


ENGINE = ("engine", "engine_options", "engine_timeout_s", "engine_python")
"""Fields of a case about the engine under test."""
WORKLOAD = ("device", "truth", "requests", "max_new_tokens")
"""Fields of a case about the workload and the device. Every command except `check` also has `dtype`."""

Fields = dict[str, Any]
"""Arguments of `plan_request`: the fields of a case that the user set, and `case` for the case file."""

_REQUESTS = {"prompt": PromptText, "prompt_file": PromptFiles, "token_ids": TokenIds}
_OTHERS = {"continuation": Continuations, "case": CaseFile}


class CaseOptions:
    """The options of a command that set fields of a case.

    The command receives the fields that the user set, as arguments of `plan_request`. A command may also name `case`,
    the case file that options override, and `continuation`, which becomes part of `requests`.
    """

    def __init__(self, *names: str) -> None:
        """Take the fields, in the order of the command's help."""
        options = Case.options()
        self.types: dict[str, Any] = {}
        """The type of each parameter of the command, by its name."""
        for name in names:
            if name in options:
                self.types[name] = Annotated[options[name].kind | None, _option_of(name)]
            else:
                self.types |= _REQUESTS if name == "requests" else {name: _OTHERS[name]}

    def gather(self, arguments: Mapping[str, Any]) -> Fields:
        """Return the fields of a case that the user set.

        Raises:
            HarnessError: a value cannot be parsed.
        """
        arguments = {name: value for name, value in arguments.items() if value not in (None, [])}
        fields = {name: value for name, value in arguments.items() if name in Case.model_fields}
        if fields.get("engine_timeout_s") == 0:
            fields |= {"isolate": False}
            del fields["engine_timeout_s"]
        if isinstance(adapters := fields.get("lora"), list):
            fields |= {"lora": adapters[0]} | ({"other_loras": adapters[1:]} if adapters[1:] else {})
        if "engine_options" in fields:
            fields["engine_options"] = parse_engine_options(fields["engine_options"])
        if requests := _requests(
            **{name: arguments[name] for name in (*_REQUESTS, "continuation") if name in arguments}
        ):
            fields["requests"] = requests
        if "continuation" in arguments and "max_new_tokens" in arguments:
            what = "the length of the continuation sets the number of new tokens"
            raise HarnessError(Code.BAD_OPTION, what, where="--max-new-tokens", hint="leave --max-new-tokens out")
        if "case" in arguments:
            fields["case"] = load_case(arguments["case"])
            if "engine_timeout_s" in arguments:  # it says both, as the case does with `isolate`
                both = {"isolate": None, "engine_timeout_s": None}
                fields["case"] = fields["case"].model_copy(update=both)
        return fields


EVERY_OPTION = CaseOptions(
    "model", "hf", "tensors", "names", *ENGINE, "device", "requests", "max_new_tokens", "schedules", "only", "case",
    "lora", "mtp", "budget_s", "explain_s", "rows",
)  # fmt: skip
"""Options of `harness check` except --dtype, which it declares itself because it may be repeated. The other fields of a
case are set in case files or by `harness.check`."""
EVERY_OPTION.types["lora"] = Annotated[
    list[Path] | None,
    typer.Option(
        "--lora",
        metavar="FOLDER",
        help="LoRA adapter in PEFT format. Repeatable: the engine serves the additional adapters to other requests, "
        "and the report names rows that got one of them by mistake.",
    ),
]


def _requests(
    prompt: Sequence[str] = (),
    prompt_file: Sequence[Path] = (),
    token_ids: Sequence[str] = (),
    continuation: Sequence[str] = (),
) -> list[RequestSpec]:
    """Return the requests of the options, in the order text, files, token ids."""
    requests = [_text_request(text, "--prompt") for text in prompt]
    requests += [read_request(path, "--prompt-file") for path in prompt_file]
    requests += [RequestSpec(token_ids=_parse_ids(text, "--token-ids")) for text in token_ids]
    if not continuation:
        return requests
    following = [_parse_ids(text, "--continuation") for text in continuation]
    if len(following) != len(requests):
        what, expected = "each request needs its continuation", f"{len(requests)}, one for each prompt given"
        hint = "give --prompt, --prompt-file or --token-ids, and as many --continuation"
        raise HarnessError(
            Code.BAD_OPTION, what, where="--continuation", expected=expected, actual=len(following), hint=hint
        )
    pairs = zip(requests, following, strict=True)
    return [request.model_copy(update={"continuation": ids}) for request, ids in pairs]


def read_request(path: Path, option: str) -> RequestSpec:
    """Return the request of a file: its text or, for a .json file, its conversation.

    Raises:
        HarnessError: EMPTY_PROMPT, or BAD_OPTION: it cannot be read.
    """
    if path.suffix.lower() == ".json":
        return _read_chat(path, option)
    return _text_request(_read_text(path, option), f"{option} {path}")


def _text_request(text: str, where: str) -> RequestSpec:
    if not text.strip():
        raise HarnessError(
            Code.EMPTY_PROMPT, "the prompt is empty", where=where, actual=repr(text), hint="give some text"
        )
    return RequestSpec(prompt=text)


def _read_chat(path: Path, option: str) -> RequestSpec:
    expected = 'a list of messages, or {"messages": [...], "tools": [...]}'
    try:
        content = parse_json(_read_text(path, option))
    except ValueError as error:
        what = f"the conversation is not valid JSON: {error}"
        raise HarnessError(Code.BAD_OPTION, what, where=option, expected=expected, actual=path) from error
    conversation = content if isinstance(content, dict) else {"messages": content}
    try:
        if unknown := sorted(conversation.keys() - {"messages", "tools"}):
            raise ValueError(f"{', '.join(unknown)}: not understood")
        return RequestSpec(messages=conversation.get("messages"), tools=conversation.get("tools"))
    except ValueError as error:  # pydantic's too
        what = "the file holds no conversation"
        raise HarnessError(
            Code.BAD_OPTION, what, where=f"{option} {path}", expected=expected, actual=str(error).splitlines()[0]
        ) from error


def _read_text(path: Path, where: str) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        what = f"the file cannot be read: {reason}"
        raise HarnessError(Code.BAD_OPTION, what, where=where, actual=path) from error


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
    """Parse NAME=VALUE options. The last value of a repeated name counts."""
    parsed = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals or not name or not value:
            what = "an engine option is NAME=VALUE"
            raise HarnessError(Code.BAD_OPTION, what, where="--engine-option", expected="NAME=VALUE", actual=option)
        parsed[name] = value
    return parsed
