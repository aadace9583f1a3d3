"""`harness server audit`: which of some hypotheses a server serves."""

from typing import Annotated

import typer

from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.extensions.server.address import AddressOptions

AUDIT = Forms(human="harness.extensions.server.audit.report:audit_text", json=DOCUMENT, is_fenced=True)


@grouped
def audit(
    server: AddressOptions,
    arguments: Annotated[opt.Fields, opt.CaseOptions("model", "device", "truth")],
    *,
    hypotheses: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What the server may serve, as a comma-separated list, its claim first: dtypes, fp8, q4, types of "
            "`harness quant`, folders; each with +lora=FOLDER, +kv=fp8, +template=FILE, +temperature=0.7, ...",
        ),
    ],
    dtype: opt.Dtype = None,
    tokens: Annotated[int, typer.Option(min=10, metavar="N", help="Minimum number of tokens to request.")] = 600,
    ask: Annotated[
        str,
        typer.Option(
            metavar="SETTINGS", help="Sampling parameters to request: temperature=0.7,top_p=0.9. [default: none]"
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of the prompts and requests.")] = 0,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, AUDIT.option()] = "human",
) -> int:
    """Find out what a server serves, from its answers.

    Tests named hypotheses against the tokens and log probabilities of the server, and lists the hypotheses left. Claims
    a hypothesis only if it is the last one. --dtype is the dtype of the server.
    """
    address = server.address()
    with progress_bar() as report:
        from harness.extensions.server.audit.run import run_audit
        from harness.plan import plan_engine

        plan = plan_engine(**arguments, dtype=dtype, local_files_only=local_files_only)
        result = run_audit(
            plan, address, hypotheses.split(","), num_tokens=tokens, ask=ask.split(",") if ask else (), seed=seed,
            progress=report,
        )  # fmt: skip
    AUDIT.show(result, format)
    return STATUS[result.outcome]
