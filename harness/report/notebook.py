"""A text for a terminal as something that rich prints, and as HTML that a notebook shows."""

from collections.abc import Callable
from io import StringIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_WIDEST = 1000
_PRE = "<pre style=\"font-family: Menlo, 'DejaVu Sans Mono', Consolas, monospace; line-height: 1.2\">{code}</pre>"


class AnsiText:
    """A text with ANSI colours that is laid out for the width of rich's console; brackets in it are no markup."""

    def __init__(self, render: Callable[[int], str]) -> None:
        """Take a function from a width in columns to the text."""
        self._render = render

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.from_ansi(self._render(options.max_width).rstrip("\n"), no_wrap=True, overflow="ignore")


def pre_html(text: str) -> str:
    """Return a text with ANSI colours as one `<pre>` with styles of its own; nothing in it becomes markup."""
    console = Console(record=True, file=StringIO(), width=_WIDEST, color_system="standard", force_terminal=True)
    console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=_PRE)
