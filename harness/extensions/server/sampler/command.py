"""`harness server sampler`: a server's draws against the exact distributions."""

from typing import Annotated

import typer

from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.extensions.server.address import AddressOptions

SAMPLER = Forms(human="harness.extensions.server.sampler.report:sampler_text", json=DOCUMENT, is_fenced=True)


@grouped
def sampler(
    server: AddressOptions,
    arguments: Annotated[opt.Fields, opt.CaseOptions("model", "device", "truth")],
    *,
    dtype: opt.Dtype = None,
    draws: Annotated[int, typer.Option(min=10, metavar="N", help="Minimum number of draws per setting.")] = 200,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of the prompts and requests.")] = 0,
    order: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_STEPS",
            help="Order of the sampling steps that the server claims: transformers, vllm, llamacpp, or comma-separated "
            "steps.",
        ),
    ] = "transformers",
    only: Annotated[
        list[str] | None, typer.Option(metavar="SETTING", help="Setting to judge. Repeatable. [default: all]")
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, SAMPLER.option()] = "human",
) -> int:
    """Check how a server samples its tokens.

    Compares single draws with the exact distribution of each row, for temperature, top-k, top-p, min-p, typical-p,
    penalties and logit_bias. Also checks seeds, and finds which distribution the returned log probabilities belong to.
    --dtype is the dtype of the server.
    """
    address = server.address()
    with progress_bar() as report:
        from harness.extensions.server.sampler.run import check_sampler
        from harness.oracle.sampling import parse_order
        from harness.plan import plan_engine

        steps = parse_order(order)
        plan = plan_engine(**arguments, dtype=dtype, local_files_only=local_files_only)
        result = check_sampler(plan, address, num_draws=draws, seed=seed, order=steps, only=only or (), progress=report)
    SAMPLER.show(result, format)
    return STATUS[result.outcome]
