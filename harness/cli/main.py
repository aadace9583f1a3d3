"""Entry point: runs a command and turns every way it can end into an exit status."""

import json
import os
import sys
import traceback
from typing import Any

import click
import typer

from harness import __version__
from harness.errors import Code, ExitStatus, HarnessError


def main() -> None:
    """Run the command line and exit the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status; nothing but its output is left behind."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # the tables use a few characters that not every locale has
    as_json = "json" in arguments and "--format" in arguments or "--format=json" in arguments
    try:
        status = typer.main.get_command(build_app())(arguments, prog_name="harness", standalone_mode=False)
        return int(status or ExitStatus.PASS)
    except HarnessError as error:
        return _report(error, as_json)
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return ExitStatus.BAD_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.PASS
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(_internal(error), as_json)


def _internal(error: Exception) -> HarnessError:
    return HarnessError(
        Code.INTERNAL,
        f"{type(error).__name__}: {error}",
        where="harness",
        hint="this is a bug of the harness: set HARNESS_TRACEBACK=1 and report what it prints",
    )


def _report(error: HarnessError, as_json: bool) -> int:
    if os.environ.get("HARNESS_TRACEBACK"):
        traceback.print_exc()
    print(error, file=sys.stderr)  # noqa: T201: this is the command line
    if as_json:
        print(json.dumps({"schema_version": 1, "error": error_json(error)}))  # noqa: T201
    return error.exit_status


def error_json(error: HarnessError) -> dict[str, Any]:
    """Return an error as JSON-able data."""
    details = {"where": error.where, "expected": error.expected, "actual": error.actual, "hint": error.hint}
    return {"code": error.code.value, "message": error.what} | {
        name: None if value is None else str(value) for name, value in details.items()
    }


def build_app() -> typer.Typer:
    """Put the commands together."""
    from harness.cli import check, diff, golden, inspect, run  # noqa: PLC0415: only when a command runs

    app = typer.Typer(
        name="harness",
        help="Check an LLM inference engine against HuggingFace, row by row, operation by operation.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for command in (check.check, golden.golden, run.run, diff.diff, inspect.inspect):
        app.command(name=command.__name__)(command)
    return app


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"harness {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Check an LLM inference engine against HuggingFace, row by row, operation by operation."""
