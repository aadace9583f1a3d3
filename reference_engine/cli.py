"""`reference-engine generate` and `reference-engine serve`.

Only the result goes to standard output; statistics and errors go to standard error. The exit status is 0, 2 for bad
input, or 128 plus the number of the signal that ended the command.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reference_engine.errors import ConfigError, EngineError, RequestError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from reference_engine import LLMEngine, SamplingParams

__all__ = ["main", "run"]

API_KEY = "HARNESS_API_KEY"
BAD_INPUT = 2
_FORMATS = ("human", "json")
_EMPTY_ALLOWED = ("--prompt",)
"""Options that report an empty value with a different error."""

# Newer versions of typer bundle click under a private name, older ones depend on click. This base class fits both.
_ClickError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app = typer.Typer(
    name="reference-engine", help="Generate text or serve a model with the reference engine.", add_completion=False,
    pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True,
)  # fmt: skip

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Checkpoint: a folder, the name of an embedded one, or a hub id. [default: qwen3-tiny, embedded]",
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="DTYPE", help="float32, bfloat16, float16, or auto: the dtype of the checkpoint."),
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")]
EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine-option", metavar="NAME=VALUE", help="Field of EngineConfig. Repeatable."),
]
LocalFilesOnly = Annotated[
    bool, typer.Option("--local-files-only", help="Use only local files; do not contact the model hub.")
]


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="Text to continue.")] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            "--chat",
            metavar="FILE",
            help="JSON file with a conversation, instead of --prompt: a list of messages, or messages and tools. The "
            "chat template of the checkpoint turns it into a prompt.",
        ),
    ] = None,
    model: Model = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(metavar="T", help="Sampling temperature; 0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample from the K most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the most likely tokens whose probabilities add up to P.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(metavar="P", help="Minimum probability of a token, relative to that of the most likely one."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    engine_option: EngineOption = None,
    lora: Annotated[Path | None, typer.Option("--lora", metavar="FOLDER", help="LoRA adapter in PEFT format.")] = None,
    local_files_only: LocalFilesOnly = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the text while it is generated.")] = False,
    show_stats: Annotated[
        bool, typer.Option("--show-stats", help="Print token counts and times to standard error.")
    ] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print the result.")
    ] = "human",
) -> None:
    """Continue a prompt or a conversation.

    Standard output gets only the continuation. It ends at an end-of-sequence token, or after --max-new-tokens.
    """
    _refuse_form(format, stream)
    request = _Request.of(prompt, chat)
    from reference_engine import SamplingParams  # here, since torch takes seconds to import
    from reference_engine.launch import find_model

    adapter = None if lora is None else "lora"
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
        adapter=adapter,
    )  # fmt: skip
    folder = find_model(model, local_files_only=local_files_only)
    token_ids = request.token_ids(folder)
    notes = [*request.notes(folder), *_unused_defaults(folder, params)]
    adapters = {} if lora is None else {"lora": lora}
    options = ["max_num_seqs=1", *(engine_option or [])]
    with _open_engine(folder, dtype, device, options, adapters) as engine:
        continuation = replace(_continue(engine, token_ids, params, streams=stream), notes=notes)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if stream:
        _write("\n")
    else:
        _write(f"{continuation.text}\n" if format == "human" else _json_text(continuation.json()))
    if show_stats:
        typer.echo(continuation.stats(), err=True)


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the served model. [default: --model]")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    engine_option: EngineOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="NAME=FOLDER",
            help="LoRA adapter in PEFT format, served as a model of this name. Repeatable.",
        ),
    ] = None,
    local_files_only: LocalFilesOnly = False,
) -> None:
    """Serve a model with an OpenAI-compatible API.

    Prints the address as one line when the server is ready. Ctrl-C stops it. If the environment variable
    HARNESS_API_KEY is set, clients must send it as a bearer token.
    """
    with _listen(host, port) as listener:  # first: what fails here fails before anything costs time
        _refuse_without_packages()
        from reference_engine.launch import engine_threads, find_model
        from reference_engine.server.app import build_app
        from reference_engine.server.text import Text

        adapters = {name: Path(folder) for name, folder in (_parse_pair(option, "--lora") for option in lora or ())}
        folder = find_model(model, local_files_only=local_files_only)
        options = ["max_num_seqs=64", "enable_prefix_caching=true", *(engine_option or [])]
        with _open_engine(folder, dtype, device, options, adapters) as engine:
            api_key = os.environ.get(API_KEY) or None
            server = build_app(engine, Text(folder), model=name or model or folder.name, api_key=api_key)
            with engine_threads(engine.model_config.hidden_size, str(engine.runner.device)):
                _run_server(server, listener)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A continuation, and how long it took."""

    text: str
    token_ids: list[int]
    pieces: list[str | None]
    """Of the tokens, as the vocabulary writes them."""
    prompt_token_ids: list[int]
    prompt_pieces: list[str | None]
    finish_reason: str
    num_prompt_tokens: int
    elapsed_seconds: float
    """From the request to the last token; loading comes before."""
    ttft_ms: float
    """Time to first token."""
    device: str
    dtype: str
    notes: list[str] = field(default_factory=list)
    """Remarks on the prompt and the sampling."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by elapsed time."""
        return len(self.token_ids) / self.elapsed_seconds

    @property
    def tpot_ms(self) -> float:
        """Time per output token after the first; NaN where there is one alone."""
        num_later = len(self.token_ids) - 1
        return (1000 * self.elapsed_seconds - self.ttft_ms) / num_later if num_later else math.nan

    def stats(self) -> str:
        """Return everything but the text on one line."""
        return (
            f"prompt_tokens={self.num_prompt_tokens} generated_tokens={len(self.token_ids)} "
            f"elapsed_seconds={self.elapsed_seconds:.4f} tokens_per_second={self.tokens_per_second:.2f} "
            f"ttft_ms={self.ttft_ms:.2f} tpot_ms={self.tpot_ms:.2f} device={self.device} dtype={self.dtype}"
        )

    def json(self) -> dict[str, Any]:
        """Return everything as JSON-able data."""
        values = asdict(self)
        return {"schema_version": 1, **values} | {
            "prompt_tokens": values.pop("num_prompt_tokens"),
            "generated_tokens": len(self.token_ids),
            "tokens_per_second": self.tokens_per_second,
            "tpot_ms": None if math.isnan(self.tpot_ms) else self.tpot_ms,
        }


@dataclass(frozen=True, slots=True)
class _Request:
    """A text, or a conversation and the tools that it may call."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, prompt: str | None, chat: Path | None) -> _Request:
        """Read the request of the options; exactly one of both is given.

        Raises:
            ConfigError: not one of both is given, or the file holds no conversation.
            RequestError: the prompt is empty.
        """
        if (prompt is None) == (chat is None):
            raise ConfigError(
                "one request is continued", where="--prompt, --chat", expected="one of both",
                actual="neither" if prompt is None else "both",
                hint="A conversation in the file may end with the prompt.",
            )  # fmt: skip
        if chat is not None:
            return cls._read_chat(chat)
        if not str(prompt).strip():
            raise RequestError("the prompt is empty", where="--prompt", actual=repr(prompt), hint="Give some text.")
        return cls(prompt)

    @classmethod
    def _read_chat(cls, path: Path) -> _Request:
        where, expected = f"--chat {path}", 'a list of messages, or {"messages": [...], "tools": [...]}'
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the file cannot be read: {error.strerror}", where=where) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the conversation is no JSON: {error}", where=where, expected=expected) from error
        table = content if isinstance(content, dict) else {"messages": content}
        messages, tools = table.get("messages"), table.get("tools") or []
        lists = [value for value in (messages, tools) if isinstance(value, list)]
        are_tables = all(isinstance(item, dict) for items in lists for item in items)
        if len(lists) < 2 or not messages or not are_tables or table.keys() - {"messages", "tools"}:
            raise ConfigError("the file holds no conversation", where=where, expected=expected)
        return cls(None, tuple(messages), tuple(tools))

    def token_ids(self, folder: Path) -> list[int]:
        """Return the tokens of the prompt, by the tokenizer of a checkpoint.

        Raises:
            ConfigError: it has none.
            RequestError: it has no chat template, or this refuses the conversation.
        """
        from reference_engine.requests.tokenizer import Tokenizer
        from reference_engine.server.text import Text

        if self.text is not None:
            return Tokenizer(folder).encode(self.text)
        return Text(folder).encode_chat(list(self.messages), list(self.tools) or None)

    def notes(self, folder: Path) -> list[str]:
        """Return a note if the text begins with a token that the tokenizer of a checkpoint adds once more."""
        from reference_engine.requests.tokenizer import Tokenizer

        begin = None if self.text is None else Tokenizer(folder).doubled_begin(self.text)
        what = f"the prompt begins with {begin}, and the tokenizer adds another one: leave it out of the text"
        return [] if begin is None else [what]


def _unused_defaults(folder: Path, params: SamplingParams) -> list[str]:
    """Return a note if generation_config.json has sampling settings that differ from those used."""
    from reference_engine.checkpoint.config_file import read_json

    path = folder / "generation_config.json"
    table = read_json(path) if path.is_file() else {}
    names = ("temperature", "top_k", "top_p", "min_p") if table.get("do_sample") else ()
    defaults = [f"{name}={table[name]}" for name in names if table.get(name) not in (None, getattr(params, name))]
    return [f"generation_config.json has {', '.join(defaults)}: not used, options set the sampling"] if defaults else []


def _open_engine(folder: Path, dtype: str, device: str, options: Sequence[str], adapters: dict[str, Path]) -> LLMEngine:
    from reference_engine import EngineConfig, LLMEngine
    from reference_engine.device import open_device
    from reference_engine.launch import choose_backend, parse_options

    pairs = dict(_parse_pair(option, "--engine-option") for option in options)
    open_device(device)  # refuse it before kernels are compiled
    choice = choose_backend(pairs, folder=folder, device=device, has_adapters=bool(adapters))
    if choice.why_slower:
        typer.echo(choice.description, err=True)
    config = EngineConfig(dtype=dtype, device=device, **parse_options(choice.options))
    return LLMEngine(folder, config, adapters=adapters)


def _continue(engine: LLMEngine, token_ids: list[int], params: SamplingParams, *, streams: bool) -> GeneratedText:
    """Generate tokens, and write each piece of text as it comes if it is to be streamed."""
    from reference_engine.launch import engine_threads
    from reference_engine.requests.detokenizer import Detokenizer

    detokenizer = Detokenizer(engine.tokenizer.decode)
    pieces: list[str] = []
    generated: list[int] = []
    seconds: list[float] = []
    finish_reason = "length"
    with engine_threads(engine.model_config.hidden_size, str(engine.runner.device)):
        start = time.perf_counter()
        for token_id, reason in _tokens(engine, token_ids, params):
            seconds.append(time.perf_counter() - start)
            generated.append(token_id)
            pieces.append(detokenizer.add(token_id))
            if reason is not None:
                finish_reason = reason
                pieces[-1] += detokenizer.finish()
            if streams and pieces[-1]:
                _write(pieces[-1])
    return GeneratedText(
        text="".join(pieces),
        token_ids=generated,
        pieces=engine.tokenizer.pieces(generated),
        prompt_token_ids=token_ids,
        prompt_pieces=engine.tokenizer.pieces(token_ids),
        finish_reason=finish_reason,
        num_prompt_tokens=len(token_ids),
        elapsed_seconds=seconds[-1],
        ttft_ms=1000 * seconds[0],
        device=str(engine.runner.device),
        dtype=str(engine.runner.dtype).removeprefix("torch."),
    )


def _tokens(engine: LLMEngine, token_ids: list[int], params: SamplingParams) -> Iterator[tuple[int, str | None]]:
    """Yield each new token, and why it is the last one, if it is."""
    engine.add_request(token_ids, params)
    while engine.has_unfinished():  # a prompt longer than a step's budget takes several steps without an output
        for output in engine.step():
            yield output.token_id, output.finish_reason and output.finish_reason.value


def _parse_pair(option: str, where: str) -> tuple[str, str]:
    name, _, value = option.partition("=")
    if not name or not value:
        expected = "NAME=FOLDER" if where == "--lora" else "NAME=VALUE"
        subject = "an adapter" if where == "--lora" else "an engine option"
        raise ConfigError(f"{subject} is {expected}", where=where, expected=expected, actual=option)
    return name, value


def _refuse_form(format: str, stream: bool) -> None:
    if format not in _FORMATS:
        raise ConfigError("unknown form", where="--format", expected=" or ".join(_FORMATS), actual=format)
    if stream and format == "json":
        raise ConfigError("JSON is written at the end, not streamed", where="--stream", hint="Leave one of them away.")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"the address cannot be listened at: {error.strerror}", where="--host, --port", actual=f"{host}:{port}",
            hint="--port 0 takes a free one.",
        ) from error  # fmt: skip
    # asyncio sets it only for sockets that say TCP, which these do not: bodies waited 40 ms after their headers
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _refuse_without_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the server needs a package that is not installed: {error.name}", where="reference-engine serve",
            hint="pip install -e '.[serve]' in a checkout.",
        ) from error  # fmt: skip


def _run_server(server: FastAPI, listener: socket.socket) -> None:
    import uvicorn

    from reference_engine.server.connections import MAX_CONNECTIONS, ImpatientProtocol

    address, port = listener.getsockname()[:2]  # it takes connections already, and uvicorn will serve them
    _write(f"http://{f'[{address}]' if ':' in address else address}:{port}\n")
    config = uvicorn.Config(
        server,
        http=ImpatientProtocol,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Run the command line and exit the process; a signal ends it with 128 and its number."""
    ended_by: list[int] = []
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # not every locale has all characters

    def end(number: int, frame: FrameType | None) -> None:
        ended_by.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        status = 0
    sys.exit(128 + ended_by[0] if ended_by else status)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    as_json = "--format=json" in arguments or ("--format", "json") in pairwise(arguments)
    try:
        _refuse_empty(arguments)
        status = typer.main.get_command(app)(list(arguments), prog_name="reference-engine", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except (typer.Abort, KeyboardInterrupt) as error:
        raise KeyboardInterrupt from error
    except EngineError as error:
        return _report(error, type(error).__name__, as_json=as_json)
    except _ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return BAD_INPUT
        context = error.ctx
        path = context.command_path if context else "reference-engine"
        usage = ConfigError(error.format_message(), where=path, hint=f"{path} --help")
        return _report(usage, "UsageError", as_json=as_json)


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an option that is given empty, usually by an unset variable of a script: it is not its default."""
    for option, value in pairwise([*arguments, "-"]):
        name, equals, text = option.partition("=")
        if name.startswith("--") and name not in _EMPTY_ALLOWED and (value == "" or (equals and not text)):
            raise ConfigError(f"{name} is given empty", where=name, actual="''", hint="Give it a value.")


def _report(error: EngineError, code: str, *, as_json: bool) -> int:
    details = {"where": error.where, "expected": error.expected, "actual": error.actual}
    lines = [f"{code}: {error.what}"]
    named = {**details, "try": error.hint or None}
    lines += [f"  {name + ':':10}{value}" for name, value in named.items() if value is not None]
    typer.echo(_printable("\n".join(lines)), err=True)
    if as_json:
        texts = {name: None if value is None else str(value) for name, value in details.items()}
        error_document = {"code": code, "message": error.what, **texts, "hint": error.hint or None}
        _write(_json_text({"schema_version": 1, "error": error_document}))
    return BAD_INPUT


def _json_text(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False, indent=1) + "\n"


def _printable(text: str) -> str:
    """Return text without what a terminal would obey: names in files may be hostile."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _write(text: str) -> None:
    """Write to standard output at once; a reader that went away (`| head`) changes nothing about the result."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the rest fails again at exit
