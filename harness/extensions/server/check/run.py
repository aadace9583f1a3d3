"""The job: probe a server, send the prompts in every way, run the truth along its tokens, judge."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.check.causes import explain_answers
from harness.extensions.server.check.judge import JudgedCompletion, Promised, judge
from harness.extensions.server.check.requests import ScheduledRequests, Sent, Way, ask
from harness.extensions.server.check.result import EndpointResult, ScheduleResult
from harness.extensions.server.client import Client
from harness.extensions.server.completion import Completion
from harness.extensions.server.logprobs import is_number
from harness.extensions.server.names import TokenNames
from harness.extensions.server.probe import Probed, failure, note_ignore_eos
from harness.extensions.server.truth import BackgroundTruth, Rows, eos_of
from harness.judge.jobs.opened import planned_model
from harness.oracle.requests import Prompt, check_prompt
from harness.plan import Plan


def check_endpoint(
    plan: Plan,
    address: Address,
    *,
    num_again: int = 4,
    progress: Progress | None = None,
) -> EndpointResult:
    """Check a server against HF.

    The plan says model, adapter, prompts, dtype of the server, and precision of the truth. `num_again` prompts are sent
    again in other ways.

    Raises:
        HarnessError: the input cannot be used; the server is not there, or answers nothing that can be judged.
    """
    begin, report = time.perf_counter(), progress or no_progress
    report("model", 0, 1)
    hf = planned_model(plan)
    for index, prompt in enumerate(plan.prompts):
        check_prompt(hf, prompt, index)
    eos, loaded = eos_of(hf), time.perf_counter()
    with BackgroundTruth(hf, truth=plan.case.truth, is_server_here=address.is_loopback) as background:
        asked = asyncio.run(
            ask(plan, address, num_again, eos=eos, vocab_size=hf.vocab_size, add_walks=background.add, progress=report)
        )
        require_an_answer(asked.runs[0])
        answered = time.perf_counter()
        truth = background.finish(lambda done, total: report("truth", done, total))
    runs, probed = asked.runs, asked.probed
    note_ignore_eos(probed, (answer for run in runs for answer in run.answers.values()), eos)
    results = tuple(
        judge_run(run, runs[0], plan.prompts, truth, eos, promises_of(probed, asked.names, run.way)) for run in runs
    )
    explanation = None
    if not plan.case.stops_early and not all(logprobs.is_sound for logprobs in results[0].logprobs):
        report("cause", 0, 1)
        explanation = explain_answers(hf, runs[0], truth, seconds=plan.case.explain_s)
    return EndpointResult(
        **probed.about(address, plan),
        num_requests=len(plan.prompts),
        capabilities=tuple(probed.capabilities),
        runs=results,
        server_s=answered - loaded,
        truth_s=background.seconds,
        all_s=time.perf_counter() - begin,
        explanation=explanation,
        notes=(
            *plan.notes,
            *_notes(probed, results, asked.client),
            _not_asked(probed, runs, asked.client),
            "not judged: other fields of answers than tokens, text, log probabilities, ends and counts",
        ),
    )


def require_an_answer(run: ScheduledRequests) -> None:
    """Raise the first error if no request was answered."""
    errors = [sent.result for sent in run.sent if isinstance(sent.result, HarnessError)]
    if len(errors) == len(run.sent):
        raise errors[0]


def promises_of(probed: Probed, names: TokenNames, way: Way) -> Promised:
    """Return what the answers of a way must have."""
    dialect = probed.dialect.plain() if way in (Way.PLAIN, Way.TEXT) else probed.dialect
    are_ids = probed.has("return_tokens_as_token_ids")
    return Promised(
        has_logprobs=dialect.num_logprobs > 0,
        num_top=dialect.num_top,
        has_prompt=way is Way.PROMPT,
        counts_prompt=dialect.takes_token_ids and way is not Way.TEXT,
        is_named_alone=(lambda _token_id: True) if are_ids else names.is_named_alone,
    )


def judge_run(
    run: ScheduledRequests,
    first: ScheduledRequests,
    prompts: Sequence[Prompt],
    truth: Mapping[int, Rows],
    eos: frozenset[int],
    promised: Promised,
) -> ScheduleResult:
    """Judge the answers of one way.

    The truth goes along the answers of the `first` way; it has rows by the number of the request.
    """
    cases = (_case(sent, first, prompts, truth, eos, promised) for sent in run.sent)
    judgement = judge([case for case in cases if case is not None])
    failures = [failure(sent.request, sent.result) for sent in run.sent if isinstance(sent.result, HarnessError)]
    return ScheduleResult(
        schedule=run.way.value,
        num_requests=len(run.sent),
        num_failed=len(failures),
        num_tokens=sum(len(answer.token_ids) for answer in run.answers.values()),
        tokens=judgement.tokens,
        logprobs=judgement.logprobs,
        num_diverged=judgement.num_diverged,
        max_difference=None if run is first else _difference(run, first, prompts),
        seconds=run.seconds,
        findings=(*failures, *judgement.findings),
    )


def _case(
    sent: Sent,
    first: ScheduledRequests,
    prompts: Sequence[Prompt],
    truth: Mapping[int, Rows],
    eos: frozenset[int],
    promised: Promised,
) -> JudgedCompletion | None:
    walked = first.answers.get(sent.request)
    if not isinstance(sent.result, Completion) or walked is None:
        return None
    num_before = len(sent.prompt) - len(prompts[sent.request].token_ids)
    return JudgedCompletion(
        request=sent.request,
        prompt=sent.prompt,
        answer=sent.result,
        rows=truth[sent.request],
        walked=walked.token_ids[num_before:],
        asked_tokens=sent.max_tokens,
        eos=eos,
        promised=promised,
    )


def _difference(run: ScheduledRequests, first: ScheduledRequests, prompts: Sequence[Prompt]) -> float | None:
    """Return the largest difference of a log probability between two runs, over the tokens that they share."""
    differences = (
        abs(value - first_logprobs[token_id])
        for sent in run.sent
        for logprobs, first_logprobs in _shared(sent, first, prompts)
        for token_id, value in logprobs.items()
        if is_number(value) and is_number(first_logprobs.get(token_id))
    )
    return max(differences, default=None)


def _shared(sent: Sent, first: ScheduledRequests, prompts: Sequence[Prompt]) -> Iterator[tuple[Any, Any]]:
    """Yield the log probabilities of the tokens that an answer and the first one have in common, of both."""
    answer, walked = sent.result, first.answers.get(sent.request)
    if not isinstance(answer, Completion) or walked is None:
        return
    begin = len(sent.prompt) - len(prompts[sent.request].token_ids)
    tokens = zip(answer.token_ids, walked.token_ids[begin:], strict=False)
    for at, (token_id, walked_id) in enumerate(tokens):
        logprobs, first_logprobs = answer.logprobs_at(at), walked.logprobs_at(begin + at)
        if logprobs is not None and first_logprobs is not None:
            yield logprobs, first_logprobs
        if token_id != walked_id:
            return


_WAYS = {
    Way.ALONE: "the same prompts in other ways (--again)",
    Way.CONTINUED: "token ids as prompts",
    Way.STREAMED: "streams",
    Way.PROMPT: "log probabilities of prompts",
    Way.TEXT: "prompts as text",
    Way.SEVERAL: "several answers to one prompt",
}


def _not_asked(probed: Probed, runs: Sequence[ScheduledRequests], client: Client) -> str:
    """Say what no request was sent for, so that nothing is known of it."""
    asked = {run.way for run in runs} | ({Way.TEXT} if not probed.dialect.takes_token_ids else set())
    unasked = [what for way, what in _WAYS.items() if way not in asked]
    unasked += [f"the models {', '.join(probed.other_models[:3])}"] if probed.other_models else []
    sent = [item for run in runs for item in run.sent]
    plain = [item for run in runs for item in run.sent if run.way is Way.PLAIN]
    longest = max((len(item.prompt) for item in sent), default=0)
    most = max((len(item.result.token_ids) for item in sent if isinstance(item.result, Completion)), default=0)
    unasked += ["streams without log probabilities"] if len(plain) < 2 else []
    is_ended = any(isinstance(item.result, Completion) and item.result.finish_reason == "stop" for item in sent)
    unasked += [] if is_ended else ["answers to an end of text"]
    unasked += ["chats", "temperatures above 0", f"prompts of more than {longest:,} tokens"]
    unasked += [f"more than {most:,} new tokens", client.not_asked]
    return f"not asked: {', '.join(unasked)}"


def _is_drawn(result: ScheduleResult) -> bool:
    has_wrong_tokens = any(finding.code is Code.TOKENS_DIFFER for finding in result.findings)
    return has_wrong_tokens and bool(result.logprobs) and all(logprobs.is_sound for logprobs in result.logprobs)


def _notes(probed: Probed, results: Sequence[ScheduleResult], client: Client) -> Iterator[str]:
    if not probed.has("logprobs"):
        yield "the server gives no log probabilities: tokens alone were judged, and a near-tie hides much"
    elif not any(result.logprobs for result in results):
        yield f"{Code.NOTHING_CHECKED}: no log probability could be judged"
    if any(_is_drawn(result) for result in results):
        yield "log probabilities are sound where tokens are not the likeliest: the server penalises or draws"
    if client.num_retries:
        yield f"{client.num_retries} requests were sent again, after {client.waited_s:.1f} s of waiting"
