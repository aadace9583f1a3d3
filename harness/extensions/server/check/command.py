"""`harness server check`: a server's tokens and log probabilities against HF's."""

from typing import Annotated

import typer

from harness.command import options as opt
from harness.command.forms import Forms
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.extensions.server.address import AddressOptions
from harness.formats.case import RequestSpec

ENDPOINT = Forms(
    human="harness.extensions.server.check.report:endpoint_text",
    json="harness.extensions.server.check.report:endpoint_json",
    is_fenced=True,
)

_OF_A_SERVER = (
    "model", "hf", "dtype", "device", "truth", "requests", "max_new_tokens", "lora", "other_loras", "explain_s",
)  # fmt: skip
"""Fields of a case that say what the server should answer, and how long a cause is looked for."""


@grouped
def check(
    server: AddressOptions,
    arguments: Annotated[opt.Fields, opt.CaseOptions(*_OF_A_SERVER)],
    *,
    again: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Number of prompts to send again: alone, repeated, reversed and continued."
        ),
    ] = 4,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, ENDPOINT.option()] = "human",
) -> int:
    """Check the tokens and log probabilities of a server.

    HuggingFace computes the log probabilities of the tokens that the server returns. --dtype is the dtype of the
    server.
    """
    address = server.address()  # first: it says which package the client lacks
    with progress_bar() as report:
        from harness.extensions.server.check.run import check_endpoint
        from harness.plan import plan_request

        if not {"model", "requests"} & arguments.keys():
            arguments["requests"] = [RequestSpec(prompt=text) for text in _DEFAULT_PROMPTS]
        plan = plan_request(**arguments, local_files_only=local_files_only)
        result = check_endpoint(plan, address, num_again=again, progress=report)
    ENDPOINT.show(result, format)
    return STATUS[result.outcome]


_DEFAULT_PROMPTS = ("hu rin pun | hu", "shau zen shu zei da dan | shau", "dei lou zo ge | dei lou", "vau win to | vau")
"""For the embedded model, which recites."""
