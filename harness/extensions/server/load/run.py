"""The job: probe a server, send streamed requests when they are due, run the truth along the answers, judge."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.check.requests import BLOCK_PROMPTS, ScheduledRequests, Sent, Way, walk_of
from harness.extensions.server.check.run import judge_run, promises_of, require_an_answer
from harness.extensions.server.client import Client, has_status
from harness.extensions.server.completion import COMPLETIONS, Completion, Dialect, join_events, only_choice, read_answer
from harness.extensions.server.load.result import LoadResult, Quantiles
from harness.extensions.server.names import TokenNames
from harness.extensions.server.probe import Probed, probe
from harness.extensions.server.truth import Rows, Walk, eos_of, walk_truth
from harness.oracle.model import HFModel
from harness.oracle.request_file import LoadRequest
from harness.oracle.requests import Prompt, check_prompt
from harness.plan import Plan
from harness.profiling.timing import percentiles_ms

TIMES = ("ttft", "tpot", "e2e")
"""Times of one request, which may have a limit."""
_TURNED_AWAY = (429, 503)
"""Statuses with which a server under too much load may refuse."""
_LATE_S = 0.05
"""Lateness of the client from which on a note says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One request, its answer, and the times of both, in seconds after the start."""

    sent: Sent
    due_s: float
    sent_s: float
    part_s: tuple[float, ...]
    """When each part with new tokens came; empty for a request that failed."""
    end_s: float

    @property
    def is_answered(self) -> bool:
        """Whether there is a whole answer."""
        return isinstance(self.sent.result, Completion)


async def _send_when_due(
    client: Client, dialect: Dialect, names: TokenNames, requests: Sequence[LoadRequest], on_done: Callable[[], None]
) -> list[TimedAnswer]:
    """Send each request when it is due, and return the answers in the order of the requests."""
    prompts = [request.prompt for request in requests]
    bodies = [dialect.body(prompt.token_ids, prompt.max_new_tokens, names) for prompt in prompts]
    begin = time.perf_counter()

    async def ask(number: int) -> TimedAnswer:
        prompt, due_s = prompts[number], requests[number].at_s
        await asyncio.sleep(max(0.0, begin + due_s - time.perf_counter()))
        sent_s, part_s = time.perf_counter() - begin, tuple[float, ...]()
        result: Completion | HarnessError
        try:
            events = await client.timed_stream(COMPLETIONS, bodies[number])
            end_s = time.perf_counter() - begin
            part_s = tuple(at - begin for at, event in events if _has_tokens(event))
            body = join_events([event for _, event in events])
            result = read_answer(body, prompt.token_ids, names, where=COMPLETIONS)
        except HarnessError as error:
            result, end_s = error, time.perf_counter() - begin
        on_done()
        sent = Sent(request=number, prompt=prompt.token_ids, max_tokens=prompt.max_new_tokens, result=result)
        return TimedAnswer(sent=sent, due_s=due_s, sent_s=sent_s, part_s=part_s, end_s=end_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(number)) for number in range(len(requests))]
    return [task.result() for task in tasks]


def _has_tokens(event: Any) -> bool:
    if isinstance(event, dict) and event.get("choices") == []:
        return False
    part = only_choice(event, where=COMPLETIONS)
    return bool(part.get("text") or part.get("token_ids"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is judged and counted."""

    arrivals: str
    limits_ms: Mapping[str, float]
    num_judged: int | None = None
    """Answers to judge, chosen by the seed; None: all."""
    seed: int = 0


def run_load(
    plan: Plan,
    hf: HFModel,
    address: Address,
    requests: Sequence[LoadRequest],
    options: LoadOptions,
    *,
    progress: Progress | None = None,
) -> LoadResult:
    """Put a load on a server, and judge what it answers.

    The plan's prompts are not used. So many requests as the address says are under way at most.

    Raises:
        HarnessError: a prompt does not fit the model; the server is not there, cannot stream, or answers nothing.
    """
    report = progress or no_progress
    for index, request in enumerate(requests):
        check_prompt(hf, request.prompt, index)
    names = TokenNames(plan.checkpoint, vocab_size=hf.vocab_size)
    probed, num_retries, client, answers = asyncio.run(_send(plan, address, names, requests, report))
    run = ScheduledRequests(
        way=Way.STREAMED, sent=tuple(item.sent for item in answers), seconds=max(item.end_s for item in answers)
    )
    require_an_answer(run)
    begin = time.perf_counter()
    eos, prompts = eos_of(hf), [request.prompt for request in requests]
    truth = _truth(hf, _walks(run, prompts, _chosen(run, options), eos), plan.case.truth, report)
    kept = tuple(sent for sent in run.sent if sent.request in truth or _is_failure(sent.result))
    judgement = judge_run(replace(run, sent=kept), run, prompts, truth, eos, promises_of(probed, names, Way.STREAMED))
    truth_s = time.perf_counter() - begin
    wrong = {finding.request for finding in judgement.findings}
    done = [item for item in answers if item.is_answered]
    return LoadResult(
        **probed.about(address, plan),
        arrivals=options.arrivals,
        num_requests=len(requests),
        num_answered=len(done),
        num_turned_away=sum(_is_turned_away(sent.result) for sent in run.sent),
        num_prompt_tokens=sum(len(item.sent.prompt) for item in done),
        num_new_tokens=sum(len(answer.token_ids) for answer in run.answers.values()),
        seconds=run.seconds,
        late_ms=_quantiles([item.sent_s - item.due_s for item in answers]),
        times_ms={name: _quantiles(values) for name, values in _times(done).items() if values},
        limits_ms=options.limits_ms,
        num_good=sum(item.sent.request not in wrong and _is_within(item, options.limits_ms) for item in done),
        num_judged=len(truth),
        answers=judgement,
        truth_s=truth_s,
        notes=(
            *_notes(probed, answers, len(truth), len(done), num_retries),
            f"not asked: temperatures above 0, streams that the client leaves, {client.not_asked}",
        ),
    )


async def _send(
    plan: Plan, address: Address, names: TokenNames, requests: Sequence[LoadRequest], report: Progress
) -> tuple[Probed, int, Client, list[TimedAnswer]]:
    """Return the probe's result, how often the probe was sent again, the client, and the answers."""
    report("probe", 0, 1)
    async with Client(replace(address, concurrency=1)) as client:
        probed = await probe(client, requests[0].prompt.token_ids, names, fallback_model=plan.case.model)
        num_retries = client.num_retries
    if not probed.has("streaming"):
        what = "the server does not stream, so no token has a time of its own"
        raise HarnessError(Code.ENDPOINT_CANNOT, what, where=address.url, hint="harness server check judges it")
    num_done = 0

    def is_done() -> None:
        nonlocal num_done
        num_done += 1
        report("server", num_done, len(requests))

    probed.dialect = _plain(probed)
    async with Client(replace(address, retries=0)) as client:
        return probed, num_retries, client, await _send_when_due(client, probed.dialect, names, requests, is_done)


def _plain(probed: Probed) -> Dialect:
    """Return the dialect without log probabilities, which cost a server time, where tokens are named without them."""
    if not probed.has("return_token_ids"):
        return probed.dialect
    return replace(probed.dialect, num_logprobs=0, num_top=0)


def _chosen(run: ScheduledRequests, options: LoadOptions) -> set[int]:
    numbers = sorted(run.answers)
    if options.num_judged is None or options.num_judged >= len(numbers):
        return set(numbers)
    return set(random.Random(options.seed).sample(numbers, options.num_judged))


def _walks(
    run: ScheduledRequests, prompts: Sequence[Prompt], chosen: Set[int], eos: Set[int]
) -> Iterator[tuple[int, Walk]]:
    for sent in run.sent:
        walk = walk_of(prompts[sent.request], [sent], eos=eos, num_top=1) if sent.request in chosen else None
        if walk is not None:
            yield sent.request, walk


def _truth(hf: HFModel, walks: Iterable[tuple[int, Walk]], precision: str, report: Progress) -> dict[int, Rows]:
    """Run the truth along the answers, once the load is over: it takes the same machine's cores."""
    numbered = list(walks)
    rows = dict[int, Rows]()
    for begin in range(0, len(numbered), BLOCK_PROMPTS):
        report("truth", begin, len(numbered))
        numbers, block = zip(*numbered[begin : begin + BLOCK_PROMPTS], strict=True)
        rows.update(zip(numbers, walk_truth(hf, block, truth=precision), strict=True))
    return rows


def _is_failure(result: Completion | HarnessError) -> bool:
    """Whether a request failed in a way that is a finding."""
    return isinstance(result, HarnessError) and not _is_turned_away(result)


def _is_turned_away(result: Completion | HarnessError) -> bool:
    return isinstance(result, HarnessError) and has_status(result, _TURNED_AWAY)


def _times_of(answer: TimedAnswer) -> dict[str, float]:
    """Return the times of one answer, in seconds; an answer without a token has no first one."""
    assert isinstance(answer.sent.result, Completion)
    times, number = {"e2e": answer.end_s - answer.sent_s}, len(answer.sent.result.token_ids)
    if answer.part_s:
        times["ttft"] = answer.part_s[0] - answer.sent_s
        if number > 1 and len(answer.part_s) > 1:  # of an answer in one part no later token has a time
            times["tpot"] = (answer.part_s[-1] - answer.part_s[0]) / (number - 1)
    return times


def _times(answers: Sequence[TimedAnswer]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ("ttft", "tpot", "itl", "e2e")}
    for answer in answers:
        for name, seconds in _times_of(answer).items():
            times[name].append(seconds)
        times["itl"] += [after - before for before, after in pairwise(answer.part_s)]
    return times


def _is_within(answer: TimedAnswer, limits_ms: Mapping[str, float]) -> bool:
    times = _times_of(answer)
    return all(1e3 * times.get(name, 0.0) <= limit for name, limit in limits_ms.items())


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    quantiles = percentiles_ms(seconds)
    return Quantiles(
        num_values=quantiles.num_samples,
        mean=1e3 * fmean(seconds),
        p50=quantiles.median,
        p90=quantiles.p90,
        p99=quantiles.p99,
        max=1e3 * max(seconds),
    )


def _notes(
    probed: Probed, answers: Sequence[TimedAnswer], num_judged: int, num_answered: int, num_retries: int
) -> Iterator[str]:
    if num_retries:
        yield f"{num_retries} requests of the probe were sent again, before the load: the server was not ready"
    if probed.dialect.num_logprobs:
        yield "the server names tokens only with log probabilities, so they were asked for: they cost it time"
    if num_judged < num_answered:
        yield f"{num_judged:,} of {num_answered:,} answers were checked against HF's truth"
    late = max(answer.sent_s - answer.due_s for answer in answers)
    if late > _LATE_S:
        yield f"the client was late by up to {1e3 * late:.0f} ms: the load was less even than asked for"
