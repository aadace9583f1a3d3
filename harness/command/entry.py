"""Name, panel and help of a command, which the command line shows without importing its module."""

import re
from dataclasses import dataclass
from enum import StrEnum

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Panel(StrEnum):
    """Headings of `harness --help`, in their order."""

    CHECK = "Check"
    PROFILE = "Profile"
    SEARCH = "Search"
    SERVERS = "Servers"
    OTHERS = "Others"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    """One command; an extension adds it by an entry point in the group `inference_harness.commands`."""

    name: str
    panel: Panel
    help: str
    """One line."""
    target: str
    """`module:name` of a function, or of the `typer.Typer` of a group of commands."""
    has_engines: bool = False
    """Whether the help of the command lists the installed engines."""

    def __post_init__(self) -> None:
        """Refuse an unknown panel, and an invalid name.

        Raises:
            ValueError: there is no such panel, or the name is not lower case words joined by hyphens.
        """
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a command")
        object.__setattr__(self, "panel", Panel(self.panel))
