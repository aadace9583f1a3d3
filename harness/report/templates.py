"""Templates of pages: every value is escaped, and a name without a value is an error."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.errors import printable


@cache
def templates(*folders: Path) -> Environment:
    """Return the templates of folders, the first of one name; they can apply the filter `printable`."""
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment
