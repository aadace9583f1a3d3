"""`harness serve`: the reference engine behind an HTTP interface."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.command import options as opt
from harness.command.output import write
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.checkpoint import Checkpoint, resolve

if TYPE_CHECKING:
    from fastapi import FastAPI

API_KEY = "HARNESS_API_KEY"


def serve(
    model: opt.Model = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name that the model is served under. [default: --model]")
    ] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    engine_option: opt.EngineOption = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="NAME=FOLDER",
            help="LoRA adapter in PEFT's format, served as a model of this name. Repeatable.",
        ),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
) -> int:
    """Serve a model with the reference engine, behind the completions and chat interface of OpenAI.

    Standard output gets one line, the address, when requests are taken. Ctrl-C ends it. If the environment has
    HARNESS_API_KEY, clients must send it as their bearer token.
    """
    with _listening(host, port) as listener, progress_bar() as report:
        report("loading", 0, 1)
        _refuse_without_packages()
        from harness.cli.generate import embedded_model, open_reference_engine
        from harness.engines.reference_threads import engine_threads
        from reference_engine.server.app import build_app
        from reference_engine.server.text import Text

        adapters = _adapters(lora)
        checkpoint = Checkpoint(resolve(model or embedded_model(), local_files_only=local_files_only))
        served = name or model or checkpoint.folder.name
        options = ["max_num_seqs=64", "enable_prefix_caching=true", *(engine_option or [])]
        with open_reference_engine(
            checkpoint, dtype=dtype, device=device, options=options, adapters=adapters
        ) as engine:
            api_key = os.environ.get(API_KEY) or None
            app = build_app(engine, Text(checkpoint.folder), model=served, api_key=api_key)
            report("serving", 1, 1)
            with engine_threads(engine.model_config.hidden_size, str(engine.runner.device)):
                _run(app, listener)
    return ExitStatus.PASS


def _adapters(options: list[str] | None) -> dict[str, Path]:
    """Parse NAME=FOLDER options."""
    adapters = {}
    for option in options or ():
        name, _, folder = option.partition("=")
        if not name or not folder:
            what = "an adapter is NAME=FOLDER"
            raise HarnessError(Code.BAD_OPTION, what, where="--lora", expected="NAME=FOLDER", actual=option)
        adapters[name] = Path(folder)
    return adapters


def _listening(host: str, port: int) -> socket.socket:
    """Take the port first: what fails there fails before anything costs time."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        what = f"the address cannot be listened at: {error.strerror}"
        raise HarnessError(
            Code.BAD_OPTION, what, where="--host, --port", actual=f"{host}:{port}", hint="--port 0 takes a free one"
        ) from error
    # asyncio sets it only for sockets that say TCP, which these do not: bodies waited 40 ms after their headers
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _refuse_without_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise HarnessError(
            Code.BAD_OPTION, f"the server needs a package that is not installed: {error.name}",
            where="harness serve", hint="pip install -e '.[serve]' in the harness's checkout",
        ) from error  # fmt: skip


def _run(app: "FastAPI", listener: socket.socket) -> None:
    import uvicorn

    from reference_engine.server.connections import MAX_CONNECTIONS, ImpatientProtocol

    address, port = listener.getsockname()[:2]  # it takes connections already, and uvicorn will serve them
    write(f"http://{f'[{address}]' if ':' in address else address}:{port}")
    config = uvicorn.Config(
        app,
        http=ImpatientProtocol,
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    uvicorn.Server(config).run(sockets=[listener])
