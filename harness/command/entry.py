"""A command as the command line lists it: its name, its panel and its help, before its module is imported."""

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
    """One command; an extension names its own by an entry point of the group `inference_harness.commands`."""

    name: str
    panel: Panel
    help: str
    """One line."""
    target: str
    """`module:name` of a function, or of the `typer.Typer` of a group of commands."""
    has_engines: bool = False
    """Whether the help of the command lists the engines that are installed."""

    def __post_init__(self) -> None:
        """Refuse a panel that the help does not have, and a name that nobody could type as a command.

        Raises:
            ValueError: there is no such panel, or the name is not lower case words joined by hyphens.
        """
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a command")
        object.__setattr__(self, "panel", Panel(self.panel))
