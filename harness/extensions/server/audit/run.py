"""The job: ask a server for draws, run every hypothesis along them, exclude."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from harness.base.files import scratch_folder
from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.server.audit import logprobs, tokens
from harness.extensions.server.audit.chats import rendered, renderer_of
from harness.extensions.server.audit.hypotheses import (
    ServedHypothesis,
    load_hypothesis,
    parse_hypotheses,
    parse_settings,
)
from harness.extensions.server.audit.result import AuditResult, HypothesisResult
from harness.extensions.server.audit.views import Given, View, named
from harness.extensions.server.endpoint.address import Address
from harness.extensions.server.endpoint.answer import Completion
from harness.extensions.server.endpoint.truth import Rounding
from harness.extensions.server.sampler.ask import AskedSampler, ask_draws
from harness.extensions.server.sampler.draws import Draws, drawn, read_draws
from harness.extensions.server.sampler.evidence import Draw
from harness.extensions.server.sampler.settings import TOKENS, DrawRequest, SamplerSetting
from harness.oracle.sampling import SamplingSettings
from harness.plan import Plan

FALSE_CLAIM = 1e-3
_MOST_KEPT = 1 << 27
"""Numbers that are kept of whole distributions, over all hypotheses."""


def run_audit(
    plan: Plan,
    address: Address,
    names: Sequence[str],
    *,
    num_tokens: int = 600,
    ask: Sequence[str] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditResult:
    """Find out which of some hypotheses a server serves.

    The plan says checkpoint, dtype of the server, and precision of the truth; its prompts are not used. The first of
    the `names` is the hypothesis that is said to be served; `ask` has parameters of the sampler, as NAME=VALUE; at
    least `num_tokens` are asked for.

    Raises:
        HarnessError: the input cannot be used; the server is not there, or answers nothing that can be judged.
    """
    report, asked = progress or no_progress, parse_settings(ask, SamplingSettings(), where="--ask")
    hypotheses = parse_hypotheses(names, asked)
    templates = {hypothesis.template for hypothesis in hypotheses}
    setting = SamplerSetting(name="audit", settings=asked, is_chat=templates != {None})
    renderers = {template: renderer_of(plan.checkpoint, template) for template in templates} if setting.is_chat else {}
    answers = ask_draws(plan, address, [setting], num_tokens, seed=seed, num_again=0, progress=report)
    vocab_size, begin = answers.hf.vocab_size, time.perf_counter()
    draws, failed = _draws(answers)
    given = [_given(answers, request, draw) for request, draw in draws.values()]
    every = max(1, ceil(2 * len(draws) * vocab_size * len(hypotheses) / _MOST_KEPT))
    seen = {key: rendered(draws, own, answers.names) for key, own in renderers.items()} or {None: draws}
    views = _views(plan, hypotheses, seen, given, vocab_size=vocab_size, every=every, progress=report)
    judged = _Judged(hypotheses=hypotheses, views=views, given=_table(draws, given))
    return AuditResult(
        url=address.url,
        server=answers.probed.server,
        served_model=answers.probed.dialect.model,
        model=plan.case.model,
        dtype=plan.case.dtype,
        num_tokens=len(draws),
        num_requests=len({number for number, _ in draws}),
        num_logprobs=sum(map(len, map(named, given))),
        false_claim=FALSE_CLAIM,
        hypotheses=tuple(judged.results()),
        notes=(f"{failed} requests failed",) if failed else (),
        server_s=answers.seconds,
        truth_s=time.perf_counter() - begin,
    )


def _draws(asked: AskedSampler) -> tuple[Draws, int]:
    """Return the draws, and the number of requests that failed.

    Raises:
        HarnessError: no request was answered, or tokens of one cannot be told: the others are not drawn at random.
    """
    errors = [answer for answer in asked.answers.values() if isinstance(answer, HarnessError)]
    untold = [error for error in errors if error.code is Code.ENDPOINT_CANNOT]
    if untold or len(errors) == len(asked.answers):
        raise (untold or errors)[0]
    draws = drawn(asked)
    if not draws:
        raise HarnessError(Code.ENDPOINT_CANNOT, "no answer has a token", where="--endpoint")
    return draws, len(errors)


def _given(asked: AskedSampler, request: DrawRequest, draw: Draw) -> Given:
    answer = asked.answers[request.number]
    assert isinstance(answer, Completion)
    return dict(answer.logprobs_at(draw.step) or {})


def _table(draws: Draws, given: Sequence[Given]) -> logprobs.Given | None:
    """Return all log probabilities in the order of the draws; None if there are none."""
    numbers = {number: at for at, number in enumerate(dict.fromkeys(number for number, _ in draws))}
    entries = [
        (own[token_id], row, numbers[number])
        for row, ((number, _), own) in enumerate(zip(draws, given, strict=True))
        for token_id in named(own)
    ]
    if not entries:
        return None
    values, rows, requests = zip(*entries, strict=True)
    return logprobs.Given(
        values=torch.tensor(values).double(), rows=torch.tensor(rows), requests=torch.tensor(requests)
    )


def _views(
    plan: Plan,
    hypotheses: Sequence[ServedHypothesis],
    seen: Mapping[Path | None, Draws],
    given: Sequence[Given],
    *,
    vocab_size: int,
    every: int,
    progress: Progress,
) -> list[View]:
    """Run each model once, for all hypotheses that have it; `seen` has the draws by the template of their prompts."""
    draws = next(iter(seen.values()))
    views = [View(own.settings, len(draws), every=every) for own in hypotheses]
    numbers = {(request.number, draw.step): at for at, (request, draw) in enumerate(draws.values())}
    groups: dict[tuple[str, Path | None, Rounding | None, Path | None], list[int]] = {}
    for number, own in enumerate(hypotheses):
        groups.setdefault((own.weights.lower(), own.lora, own.cache, own.template), []).append(number)
    with scratch_folder("harness-audit-") as scratch:
        for members in groups.values():
            first, own_views = hypotheses[members[0]], [views[number] for number in members]
            hf = load_hypothesis(first, plan, scratch, vocab_size=vocab_size)

            def read(
                request: DrawRequest,
                draw: Draw,
                logits: torch.Tensor,
                control: torch.Tensor,
                to: list[View] = own_views,
            ) -> None:
                at = numbers[request.number, draw.step]
                for view in to:
                    view.add(at, draw, given[at], logits, control)

            own_draws, truth = seen[first.template], plan.case.truth
            read_draws(hf, own_draws, read, truth=truth, progress=progress, label=first.name, cache=first.cache)
    return views


@dataclass(frozen=True, slots=True)
class _Judged:
    """All hypotheses before all answers."""

    hypotheses: Sequence[ServedHypothesis]
    views: Sequence[View]
    given: logprobs.Given | None

    def results(self) -> Iterator[HypothesisResult]:
        """Yield what is found of each."""
        alpha = FALSE_CLAIM / 2  # for the tokens, and for the log probabilities
        excluded = tokens.excluded_after(self.views, alpha)
        readings = logprobs.readings_of(self.views) if self.given is not None else []
        for at, own in enumerate(self.hypotheses):
            ours = [reading for reading in readings if reading.at == at]
            others = [reading for reading in readings if reading.at != at]
            yield HypothesisResult(
                name=own.name,
                log_likelihood=float(self.views[at].own.mean()),
                excluded_after=excluded[at],
                is_excluded_by_logprobs=self.given is not None
                and all(logprobs.is_excluded(our, others, self.given, alpha) for our in ours),
                readings=() if self.given is None else tuple(logprobs.fit_of(our, self.given) for our in ours),
                needed={
                    other.name: self._needed(at, number, readings, alpha)
                    for number, other in enumerate(self.hypotheses)
                    if number != at
                },
            )

    def _needed(
        self, served: int, other: int, readings: Sequence[logprobs.HypothesisValues], alpha: float
    ) -> int | None:
        """Return how many tokens exclude one hypothesis if another one is served, by what tells it sooner."""
        found = [tokens.num_needed(self.views[served], self.views[other], alpha, len(self.views))]
        if self.given is not None:
            firsts = {reading.at: reading for reading in reversed(readings)}  # of each hypothesis the raw ones
            num_others = sum(reading.at != other for reading in readings)
            num = logprobs.num_needed(firsts[served], firsts[other], self.given, alpha, num_others)
            found.append(None if num is None else num * TOKENS)
        return min((ceil(num) for num in found if num is not None), default=None)
