"""Entry point of the command line: runs a command and turns its result or error into an exit status."""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import typer
import typer.core

from harness.base import plugins
from harness.base.environment import own_commit
from harness.cli import resident
from harness.cli.supervisor import supervise
from harness.command.entry import CommandEntry, Panel
from harness.command.interrupts import INTERRUPTED, Interrupts
from harness.command.output import results_on, write, write_json
from harness.command.strict import StrictCommand
from harness.engines import installed_engine_names
from harness.errors import Code, ExitStatus, HarnessError
from harness.version import __version__

_REFUSALS = {
    errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ELOOP, errno.EMFILE, errno.ENAMETOOLONG, errno.ENFILE,
    errno.ENODEV, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""Errors of the system, not bugs of the harness: no disk space, no folder for temporary files, no permission."""

# Newer versions of typer bundle click under a private name, older ones depend on click. This base class fits both.
_ClickError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_STANDARD_ERROR = 2
_HELP = "Check an LLM inference engine against HuggingFace, row by row, operation by operation."
_ENVIRONMENT = """\b
Exit status:
  0  pass
  1  mismatch, or an expected tap was not recorded
  2  usage error or bad input; docs/errors has a page for each code
  3  internal error (a bug in the harness)
  4  performance regression only
  5  nothing was checked

\b
Environment:
  HARNESS_CACHE      cache folder for goldens and hashes [default: ~/.cache/inference-harness]
  HARNESS_CACHE_GB   GB above which the least recently used of it is evicted [default: half of the file system]
  HARNESS_RESIDENT   minutes that a process with all imports waits for the next check [default: there is none]
  HARNESS_TRACEBACK  set to 1 to print the traceback of an error
"""


def _core(
    name: str, panel: Panel, help: str, function: str | None = None, *, has_engines: bool = False
) -> CommandEntry:
    module = name.replace("-", "_")
    target = f"harness.cli.{module}:{function or module}"
    return CommandEntry(name=name, panel=panel, help=help, target=target, has_engines=has_engines)


_COMMANDS = (
    _core("check", Panel.CHECK, "Check an engine against HuggingFace.", has_engines=True),
    _core("golden", Panel.CHECK, "Record the reference values of HuggingFace."),
    _core("record", Panel.CHECK, "Record an engine for `harness diff`.", has_engines=True),
    _core("diff", Panel.CHECK, "Compare two recordings, or two folders of tensors."),
    _core("inspect", Panel.CHECK, "Show files, checkpoints and weights, or the settings and taps of an engine."),
    _core("new-adapter", Panel.CHECK, "Write the files of a new adapter."),
    _core("profile", Panel.PROFILE, "Profile prefill and decode of an engine.", has_engines=True),
    _core("gate", Panel.PROFILE, "Compare a profile with a baseline."),
)
"""Commands of the core, in the order of the help. Commands of extensions follow in their panels."""


def main() -> None:
    """Run the command line and exit the process. A signal ends it as Ctrl-C does, and temporary files are removed."""
    arguments = sys.argv[1:]
    try:
        _refuse_closed_streams()
        process = None

        def begin(giving: int, lifeline: int) -> resident.Forked | None:
            nonlocal process
            process = resident.begin(arguments, giving, lifeline)
            return process

        status = supervise(lambda: run_listening(arguments), begin)
        if process is None and resident.is_wanted(arguments):
            resident.leave_behind()
    except HarnessError as error:
        status = _report(error, as_json=wants_json(arguments))
    sys.exit(status)


def run_listening(arguments: Sequence[str]) -> int:
    """Run a command that signals can end; its result reaches standard output even if an engine redirects that."""
    with os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace") as results, results_on(results):
        return Interrupts().listen(lambda: run(arguments))


def _refuse_closed_streams() -> None:
    """Refuse to run if standard output is closed; open the null device where a standard stream is closed.

    Otherwise the next file that is opened would get the descriptor of that stream.
    """
    is_closed = sys.stdout is None
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(opened)
    if sys.stderr is None:
        sys.stderr = open(_STANDARD_ERROR, "w", closefd=False)  # noqa: SIM115  it stays open
    if is_closed:
        what = "standard output is closed: the result could not be written"
        raise HarnessError(Code.CANNOT_WRITE, what, hint="send it to /dev/null")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # tables use characters that some locales cannot encode
    try:
        _refuse_missing_docstrings()
        command = typer.main.get_command(build_app())
        status = int(command(list(arguments), prog_name="harness", standalone_mode=False) or ExitStatus.PASS)
    except (KeyboardInterrupt, typer.Abort):  # older versions of typer: newer ones return a status
        status = INTERRUPTED
    except BaseException as error:
        if type(error).__name__ == "NoArgsIsHelpError" and isinstance(error, _ClickError):
            error.show()
            return ExitStatus.BAD_INPUT
        if not _is_of_interrupt(error):
            return _report(_as_harness_error(error), as_json=wants_json(arguments))
        status = INTERRUPTED
    if status == INTERRUPTED:
        typer.echo("interrupted", err=True)
    return status


def _is_of_interrupt(error: BaseException | None) -> bool:
    """Whether an interrupt caused an error: Python wraps one that it gets in `__set_name__`."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _refuse_missing_docstrings() -> None:
    if sys.flags.optimize > 1:
        raise HarnessError(
            Code.BAD_OPTION,
            "transformers needs docstrings, but Python was started without them",
            where="python -OO, or PYTHONOPTIMIZE",
            expected="at most -O",
            hint="unset PYTHONOPTIMIZE, and do not use -OO",
        )


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for JSON, even if they cannot be parsed."""
    return "--format=json" in arguments or ("--format", "json") in pairwise(arguments)


def _as_harness_error(error: BaseException) -> HarnessError:
    if isinstance(error, HarnessError):
        return error
    if isinstance(error, _ClickError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "harness"
        return HarnessError(Code.BAD_OPTION, error.format_message(), where=command, hint=f"{command} --help")
    if not isinstance(error, Exception):
        return HarnessError(
            Code.NO_VERDICT,
            f"{type(error).__name__} ended the command: {error}",
            where="harness",
            expected="a result on standard output",
            hint="an engine in this process, or a library, raised it",
        )
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        return HarnessError(
            Code.SYSTEM_REFUSED,
            f"the operating system refuses: {error.strerror}",
            where=error.filename,
            hint="HARNESS_TRACEBACK=1 shows which call failed",
        )
    return HarnessError(
        Code.INTERNAL,
        f"{type(error).__name__}: {error}",
        where="harness",
        hint="this is a bug of the harness: set HARNESS_TRACEBACK=1 and report what it prints",
    )


def _report(error: HarnessError, *, as_json: bool) -> int:
    if os.environ.get("HARNESS_TRACEBACK"):
        traceback.print_exc()
    typer.echo(str(error), err=True)
    if as_json:
        write_json({"schema_version": 1, "error": error_json(error)})
    return error.exit_status


def error_json(error: HarnessError) -> dict[str, Any]:
    """Return an error as JSON-able data."""
    details = {"where": error.where, "expected": error.expected, "actual": error.actual, "hint": error.hint}
    return {"code": error.code.value, "message": error.what} | {
        name: None if value is None else str(value) for name, value in details.items()
    }


def commands() -> dict[str, CommandEntry]:
    """Return all commands in the order of the help: of each panel the core's, then those of the extensions.

    Raises:
        HarnessError: EXTENSION_FAILED.
    """
    known = {command.name: command for command in _COMMANDS}
    for name, command in plugins.load_all(plugins.COMMANDS, CommandEntry).items():
        if command.name != name:
            plugins.refuse(plugins.COMMANDS, name, f"calls its command {command.name!r}: the names must be equal")
        if name in known:
            plugins.refuse(plugins.COMMANDS, name, "has the name of a command of the harness")
        known[name] = command
    panels = list(Panel)
    return {item.name: item for item in sorted(known.values(), key=lambda item: panels.index(item.panel))}


class _Commands(typer.core.TyperGroup):
    """The group of all commands. A command's module is imported only when the command runs or shows its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of the help."""
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is none of that name."""
        command = commands().get(cmd_name)
        return None if command is None else _imported(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under the headings of their panels, without importing them."""
        known = commands().values()
        for panel in Panel:
            rows = [(command.name, command.help) for command in known if command.panel is panel]
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


def _imported(command: CommandEntry) -> Any:
    module, _, name = command.target.partition(":")
    try:
        target = getattr(import_module(module), name)
    except Exception as error:
        if isinstance(error, HarnessError) or command.target.startswith("harness."):
            raise
        plugins.refuse(plugins.COMMANDS, command.name, f"cannot be imported: {type(error).__name__}: {error}", error)
    if isinstance(target, typer.Typer):
        group = typer.main.get_group(target)
        group.name = command.name
        return group
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    names = ", ".join(installed_engine_names()) if command.has_engines else ""
    engines = f"Engines installed here: {names}. docs/write-an-adapter.md shows how to add one." if names else None
    app.command(command.name, cls=StrictCommand, epilog=engines)(target)
    return typer.main.get_command(app)


def build_app() -> typer.Typer:
    """Return the typer app with all commands."""
    app = typer.Typer(
        name="harness",
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback(help=_HELP, epilog=_ENVIRONMENT)(_options)
    return app


def _version(shown: bool) -> None:
    if shown:
        commit = own_commit()
        write(f"harness {__version__}" + (f", commit {commit}" if commit else ""))
        raise typer.Exit


def _options(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_version,
        is_eager=True,
        help="Print the version and, if known, the commit.",
    ),
) -> None:
    pass
