"""`harness estimate`: what a model needs, from its config alone."""

from pathlib import Path
from typing import Annotated

import typer

from harness.command.forms import DOCUMENT, Forms
from harness.errors import Code, ExitStatus, HarnessError

ESTIMATE = Forms(
    human="harness.extensions.estimate.report:estimate_text",
    markdown="harness.extensions.estimate.report:estimate_text",
    json=DOCUMENT,
)

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


def _dtype(name: str) -> str:
    from harness.extensions.estimate.run import ITEMSIZES

    name = _SHORT.get(name, name)
    if name in ITEMSIZES:
        return name
    what = f"no size is known of the dtype {name!r}"
    raise HarnessError(Code.BAD_OPTION, what, where="--dtype", expected=", ".join(ITEMSIZES), actual=name)


def estimate(
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Folder, config.json, embedded checkpoint or hub id. No weights are read."),
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="GPU to estimate for, such as H100. Repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of the weights, including float8.")] = "bfloat16",
    cache_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype of the KV cache. [default: dtype of the weights]")
    ] = None,
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="Number of requests that decode together.")] = 1,
    context: Annotated[int, typer.Option(metavar="L", min=1, help="Context length of each request in tokens.")] = 4096,
    block_size: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per KV cache block.")] = 16,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Profile to compare with: shows its times beside the estimate for the same steps."
        ),
    ] = None,
    format: Annotated[str, ESTIMATE.option()] = "human",
) -> int:
    """Estimate memory, FLOPs and the best possible speed of a model on GPUs, from their data sheets."""
    from harness.base.progress import quiet_transformers
    from harness.extensions.estimate.run import estimate as estimated

    with quiet_transformers():
        result = estimated(
            model,
            dtype=_dtype(dtype),
            cache_dtype=None if cache_dtype is None else _dtype(cache_dtype),
            gpus=gpu or [],
            num_requests=requests,
            context=context,
            block_size=block_size,
            profile=profile,
        )
    ESTIMATE.show(result, format)
    return ExitStatus.PASS
