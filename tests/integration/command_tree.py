"""The commands of the command line with their parameters, those of groups by their path: `trace summary`."""

from collections.abc import Iterator
from typing import Any

import typer

from harness.cli.main import build_app, commands


def leaves(names: frozenset[str] | None = None) -> dict[str, Any]:
    """Return the commands by their paths; of some names alone where they are given."""
    root = typer.main.get_command(build_app())
    chosen = [name for name in commands() if names is None or name in names]
    return dict(leaf for name in chosen for leaf in _leaves(root.get_command(None, name), name))


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not (children := getattr(command, "commands", None)):
        yield path, command
        return
    for name, child in children.items():
        yield from _leaves(child, f"{path} {name}")


def parameters(command: Any) -> list[str]:
    """Return the options and arguments of a command in the order of its help."""
    return [parameter.opts[0] for parameter in command.params if parameter.opts[0] != "--help"]


def with_an_empty_value(command: Any) -> Iterator[list[str]]:
    """Yield the arguments of a command with one of its options or arguments given empty, but of prompts."""
    for parameter in command.params:
        if not getattr(parameter, "is_flag", False) and parameter.name not in ("prompt", "token_ids"):
            yield [parameter.opts[0], ""] if parameter.opts[0].startswith("-") else [""]
