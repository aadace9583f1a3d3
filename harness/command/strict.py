"""A command that takes an option given empty for what it is: a mistake, usually of a script's unset variable."""

from typing import Any

import typer
import typer.core

from harness.errors import Code, HarnessError

_HAVE_AN_ERROR_OF_THEIR_OWN = {"prompt", "token_ids"}
"""An empty prompt is EMPTY_PROMPT."""


class StrictCommand(typer.core.TyperCommand):
    """Refuses an option or argument that is given empty: it would be taken for its default, or for this folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments of the command.

        Raises:
            HarnessError: BAD_OPTION.
        """
        arguments, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in self.params:
            values = arguments.get(parameter.name)
            is_empty = "" in (values if isinstance(values, list | tuple) else [values])
            if is_empty and parameter.name not in _HAVE_AN_ERROR_OF_THEIR_OWN:
                name = parameter.opts[0] if parameter.opts[0].startswith("-") else str(parameter.name).upper()
                what, hint = f"{name} is given empty", "give it a value, or leave it out"
                raise HarnessError(Code.BAD_OPTION, what, where=name, actual="''", hint=hint)
        return super().parse_args(ctx, args)
