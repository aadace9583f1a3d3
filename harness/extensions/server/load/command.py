"""`harness server load`: a server under an open load, with every answer checked."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.grouped import grouped
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.extensions.server.address import AddressOptions

if TYPE_CHECKING:
    from harness.results.check import Outcome

LOAD = Forms(human="harness.extensions.server.load.report:load_text", json=DOCUMENT, is_fenced=True)
COMPARISON = Forms(human="harness.extensions.server.load.against:comparison_text", json=DOCUMENT, is_fenced=True)


@grouped
def load(
    server: AddressOptions,
    arguments: Annotated[opt.Fields, opt.CaseOptions("model", "device", "truth")],
    *,
    dtype: opt.Dtype = None,
    num_requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="Number of random requests.")
    ] = 64,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="DIST", help="Distribution of prompt lengths: 128, 64..512 (uniform) or exp:256.")
    ] = "16..64",
    new_tokens: Annotated[
        str, typer.Option(metavar="DIST", help="Distribution of the maximum number of new tokens.")
    ] = "16",
    requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines file of requests, instead of random ones: prompt, prompt_token_ids or prompt_tokens; "
            "max_tokens; at.",
        ),
    ] = None,
    rate: Annotated[
        float, typer.Option(metavar="R", help="Mean requests per second of a Poisson process; inf: all at once.")
    ] = 8.0,
    burst: Annotated[int, typer.Option(min=1, metavar="N", help="Number of requests that arrive together.")] = 1,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MS", help="Latency limit for goodput in ms: ttft=200, tpot=50, e2e=2000. Repeatable."
        ),
    ] = None,
    at_least: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Minimum fraction of requests within all limits; below it the exit status is 4.",
        ),
    ] = None,
    judged: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of answers to check. [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of prompts, lengths and arrivals.")] = 0,
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Second server; compare its times with those of the first, in turns A B B A."),
    ] = None,
    blocks: Annotated[
        int, typer.Option(min=5, metavar="N", help="With --against: number of blocks of four loads.")
    ] = 5,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, LOAD.option()] = "human",
) -> int:
    """Put a load on a server, and check every answer.

    The client sends each request at its time of arrival, without waiting for earlier answers. Answers are greedy and
    streamed. After the load, HuggingFace checks the tokens of each answer. --dtype is the dtype of the server.
    With --against, the exit status is 4 if the second server is slower, and 5 if noise hides it.
    """
    limits = dict(_limit(item) for item in limit or ())
    address = server.address()
    if not rate > 0:
        raise HarnessError(Code.BAD_OPTION, "it must be positive", where="--rate", actual=rate)
    if against is not None and at_least is not None:
        what = "a comparison asks whether the second server is slower, not for a share of good requests"
        raise HarnessError(Code.BAD_OPTION, what, where="--at-least", hint="leave out --at-least or --against")
    with progress_bar() as report:
        from harness.extensions.server.load.against import compare_loads
        from harness.extensions.server.load.run import LoadOptions, run_load
        from harness.extensions.server.truth import eos_of, plain_ids
        from harness.judge.jobs.opened import planned_model
        from harness.oracle.request_file import Arrivals, LoadRequest, drawn_requests, parse_lengths, read_requests
        from harness.plan import plan_engine, tokenize

        lengths = parse_lengths(prompt_tokens, "--prompt-tokens"), parse_lengths(new_tokens, "--new-tokens")
        plan = plan_engine(**arguments, dtype=dtype, local_files_only=local_files_only)
        report("model", 0, 1)
        hf = planned_model(plan)
        ids, arrivals = plain_ids(hf, eos_of(hf)), Arrivals(rate=rate, burst=burst)
        read = partial(tokenize, checkpoint=hf.checkpoint, where=str(requests))

        def draw(block: int) -> list[LoadRequest]:
            if requests is None:
                return drawn_requests(num_requests, *lengths, arrivals, ids=ids, seed=seed + block)
            return read_requests(requests, read, arrivals, ids=ids, seed=seed + block, max_tokens=lengths[1])

        options = LoadOptions(arrivals=_words(rate, burst), limits_ms=limits, num_judged=judged, seed=seed)
        asked = draw(0)
        address = address if server.concurrency else replace(address, concurrency=len(asked))
        if against is None:
            result = run_load(plan, hf, address, asked, options, progress=report)
        else:
            both = address, replace(address, url=against)
            comparison = compare_loads(plan, hf, both, draw, options, num_blocks=blocks, progress=report)
    if against is not None:
        COMPARISON.show(comparison, format)
        status = _status(comparison.outcome, comparison.is_slower)
        return status if status != ExitStatus.PASS or comparison.is_conclusive else ExitStatus.NOTHING_CHECKED
    LOAD.show(result, format)
    return _status(result.outcome, at_least is not None and result.good_share < at_least)


def _status(outcome: "Outcome", is_slow: bool) -> int:
    status = STATUS[outcome]
    return ExitStatus.REGRESSION if status == ExitStatus.PASS and is_slow else status


def _words(rate: float, burst: int) -> str:
    if math.isinf(rate):
        return "all at once"
    return f"{rate:g} a second" + (f" in bursts of {burst}" if burst > 1 else "")


def _limit(text: str) -> tuple[str, float]:
    from harness.extensions.server.load.run import TIMES

    name, _, value = text.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if name not in TIMES or not 0 < limit < math.inf:
        expected = f"{'=MS, '.join(TIMES)}=MS"
        raise HarnessError(Code.BAD_OPTION, "this is no limit", where="--limit", expected=expected, actual=text)
    return name, limit
