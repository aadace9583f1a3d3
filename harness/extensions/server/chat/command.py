"""`harness server chat`: what a server makes of a conversation, against HF's chat template."""

from typing import Annotated

import typer

from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.extensions.server.address import AddressOptions

TOKENS = Forms(human="harness.extensions.server.chat.report:tokens_text", json=DOCUMENT, is_fenced=True)


@grouped
def chat(
    server: AddressOptions,
    *,
    model: opt.Model = None,
    conversations: Annotated[int, typer.Option(min=1, metavar="N", help="Number of conversations to generate.")] = 100,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of the conversations.")] = 0,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, TOKENS.option()] = "human",
) -> int:
    """Check how a server turns conversations into tokens.

    Generates conversations (system message, history, tools, reasoning, unusual text), renders them with the chat
    template of the checkpoint, and compares the tokens with those of the server. Reports each difference with the
    shortest conversation that shows it.
    """
    address = server.address()
    with progress_bar() as report:
        from harness.extensions.server.chat.run import check_tokens
        from harness.formats.checkpoint import Checkpoint, embedded_model, resolve

        name = model or embedded_model()
        checkpoint = Checkpoint(resolve(name, local_files_only=local_files_only))
        result = check_tokens(
            checkpoint, address, model=name, num_conversations=conversations, seed=seed, progress=report
        )
    TOKENS.show(result, format)
    return STATUS[result.outcome]
