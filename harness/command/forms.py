"""The forms of each type of result: a command offers those that its result has, and refuses any other."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import Any

import typer

from harness.command.output import terminal_width, write, write_json
from harness.errors import Code, HarnessError


class Forms:
    """The forms of a result: each is a function, `module:name`, which is imported when it is asked for.

    The function takes the result, and of `width`, `color`, `tablefmt` and what the command adds the arguments that it
    has. It returns a text, or a document that is written as JSON.
    """

    def __init__(self, *, human: str, is_fenced: bool = False, **others: str) -> None:
        """Take the functions; with `is_fenced`, Markdown is the terminal's lines as they are."""
        self._is_fenced = is_fenced
        self.functions = {"human": human} | ({"markdown": human} if is_fenced else {}) | others

    def option(self) -> Any:
        """Return the option `--format` of a command that has such a result."""
        choices = f"<{'|'.join(self.functions)}>"
        return typer.Option("--format", metavar=choices, parser=self.chosen, help="How to print the result.")

    def chosen(self, form: str) -> str:
        """Return the form of that name.

        Raises:
            HarnessError: BAD_OPTION.
        """
        if form in self.functions:
            return form
        what = f"this result has no form {form!r}"
        raise HarnessError(Code.BAD_OPTION, what, where="--format", expected=", ".join(self.functions), actual=form)

    def function(self, form: str) -> Callable[..., str | dict[str, Any]]:
        """Import what makes a form."""
        module, _, name = self.functions[self.chosen(form)].partition(":")
        return attrgetter(name)(import_module(module))  # type: ignore[no-any-return]

    def show(self, result: object, form: str, **added: object) -> None:
        """Write a result to standard output."""
        function = self.function(form)
        arguments = {
            "width": terminal_width(),
            "color": sys.stdout.isatty() and not os.environ.get("NO_COLOR"),
            "tablefmt": "github" if form == "markdown" else "simple",
        } | added
        known = signature(function).parameters
        shown = function(result, **{key: value for key, value in arguments.items() if key in known})
        if isinstance(shown, str):
            if form == "markdown" and self._is_fenced:
                from harness.report.check.markdown import fenced

                shown = fenced(shown) + "\n"
            write(shown, end="" if shown.endswith("\n") else "\n")
        else:
            write_json(shown)


def document(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a result that is a document already."""
    return summary


_DOCUMENT = f"{__name__}:document"
_REPORT = "harness.report"
DOCUMENT = f"{_REPORT}.document:document"
"""Makes a document of any result."""

CHECKS = Forms(
    human=f"{_REPORT}.check.dtypes:checks_text",
    markdown=f"{_REPORT}.check.dtypes:checks_markdown",
    json=f"{_REPORT}.check.dtypes:checks_json",
    github=f"{_REPORT}.annotations:checks_github",
    sarif=f"{_REPORT}.annotations:checks_sarif",
    power=f"{_REPORT}.check.power:power_text",
)
CHECK_COST = Forms(
    human=f"{_REPORT}.check.terminal:cost_text", markdown=f"{_REPORT}.check.terminal:cost_text", json=DOCUMENT
)
WEIGHTS = Forms(human=f"{_REPORT}.weights:weights_text", markdown=f"{_REPORT}.weights:weights_text", json=DOCUMENT)
DUMPS = Forms(human=f"{_REPORT}.dumps:dumps_text", is_fenced=True, json=DOCUMENT)
MEASUREMENT = Forms(human=f"{_REPORT}.measurement:measurement_text", is_fenced=True, json=DOCUMENT)
PROFILE = Forms(human=f"{_REPORT}.profile:profile_text", json=f"{_REPORT}.profile:profile_json")
GATE = Forms(
    human=f"{_REPORT}.gate:gate_text",
    json=f"{_REPORT}.gate:gate_json",
    github=f"{_REPORT}.annotations:gate_github",
    sarif=f"{_REPORT}.annotations:gate_sarif",
)
TRACES = Forms(
    human=f"{_REPORT}.trace:summary_text",
    json=f"{_REPORT}.document:files_document",
    csv=f"{_REPORT}.trace:summary_csv",
)
TRACE_DIFF = Forms(
    human=f"{_REPORT}.trace:diff_text", json=f"{_REPORT}.trace:diff_json", csv=f"{_REPORT}.trace:diff_csv"
)
CRITICAL_PATHS = Forms(human=f"{_REPORT}.trace:critical_paths_text", json=f"{_REPORT}.document:files_document")
MEMORY = Forms(human=f"{_REPORT}.memory:memory_text", json=f"{_REPORT}.document:files_document")
MEMORY_AT = Forms(human=f"{_REPORT}.memory:moments_text", json=f"{_REPORT}.document:files_document")
MEMORY_DIFF = Forms(human=f"{_REPORT}.memory:memory_diff_text", json=DOCUMENT)
INSPECTED = Forms(human="harness.formats.inspect:render_text", json=_DOCUMENT)
MODULES = Forms(human="harness.formats.checkpoint.modules:modules_text", json=_DOCUMENT)
VALUES = Forms(human="harness.formats.values:values_text", json=_DOCUMENT)
SETTINGS = Forms(human=f"{_REPORT}.settings:settings_text", json=f"{_REPORT}.settings:settings_json")
GOLDEN = Forms(human="harness.cli.golden:golden_text", json=_DOCUMENT)
TAP_MAP = Forms(human="harness.cli.tap_map:map_text", json=_DOCUMENT)
RECORDING = Forms(human="harness.cli.record:recording_text", json=_DOCUMENT)
