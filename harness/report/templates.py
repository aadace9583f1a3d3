"""Templates of pages: whatever is put into one is text, never markup, and a name without a value is an error."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.report.check.sentences import printable


@cache
def templates(folder: Path) -> Environment:
    """Return the templates of a folder; they can apply the filter `printable`."""
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment
