"""`harness server`: everything that is asked of a server over HTTP."""

import typer

from harness.command.strict import StrictCommand
from harness.extensions.server.audit.command import audit
from harness.extensions.server.chat.command import chat
from harness.extensions.server.check.command import check
from harness.extensions.server.load.command import load
from harness.extensions.server.sampler.command import sampler

app = typer.Typer(
    name="server",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Check an OpenAI-compatible server: tokens, sampler, chat, weights, and answers under load.",
)
for _command in (check, sampler, chat, audit, load):
    app.command(cls=StrictCommand)(_command)
