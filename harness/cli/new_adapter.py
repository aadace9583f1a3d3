"""`harness new-adapter`: a package that puts another engine under test, with a test, to be filled in."""

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from harness.base.files import scratch_folder, writing
from harness.engines import engine_names
from harness.errors import Code, ExitStatus, HarnessError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def new_adapter(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the engine: lower-case letters, digits and hyphens.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for the package. [default: harness-NAME]", show_default=False),
    ] = None,
) -> int:
    """Write the files of a new adapter.

    The package contains an adapter that runs, and its test. docs/write-an-adapter.md explains each part.
    """
    _check_name(name)
    folder = Path(f"harness-{name}") if out is None else out
    if folder.exists():
        what = "the output folder is there already"
        raise HarnessError(Code.OUTPUT_EXISTS, what, where=folder, hint="choose another with --out, or remove it")
    _write(folder, name)
    typer.echo(f"{folder} holds an adapter that runs a transformers model: put your engine in its place")
    typer.echo(f"next: pip install -e '{folder}[test]' && pytest {folder}")
    return ExitStatus.PASS


def _check_name(name: str) -> None:
    expected, actual = "lower case letters and digits, words joined by hyphens; no engine's name", name
    if not _NAME.fullmatch(name):
        what = "this is no name of an engine"
        raise HarnessError(Code.BAD_OPTION, what, where="NAME", expected=expected, actual=actual)
    if name in engine_names():
        what = "an engine of this name is installed"
        raise HarnessError(Code.BAD_OPTION, what, where="NAME", expected=expected, actual=actual)


def _write(folder: Path, name: str) -> None:
    package = f"harness_{name.replace('-', '_')}"
    files = {
        "pyproject.toml": "pyproject.toml",
        f"{package}/__init__.py": "__init__.py",
        f"{package}/adapter.py": "adapter.py",
        "tests/test_adapter.py": "test_adapter.py",
    }
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".writing-", folder.parent) as beside:
            for target, template in files.items():
                text = resources.files(__package__).joinpath("adapter_template", f"{template}.txt").read_text("utf-8")
                path = beside / folder.name / target
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.replace("{name}", name).replace("{package}", package), encoding="utf-8")
            (beside / folder.name).rename(folder)
