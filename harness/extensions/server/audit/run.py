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
from harness.extensions.server.address import Address
from harness.extensions.server.audit.evidence import (
    HypothesisValues,
    RowLogprobs,
    ServerLogprobs,
    View,
    comparable_tokens,
    excluded_after,
    fit_of,
    is_excluded,
    num_draws_needed,
    num_requests_needed,
    readings_of,
)
from harness.extensions.server.audit.hypotheses import (
    ServedHypothesis,
    load_hypothesis,
    parse_hypotheses,
    parse_settings,
    render_draws,
    renderer_of,
)
from harness.extensions.server.audit.result import AuditResult, HypothesisResult
from harness.extensions.server.completion import Completion
from harness.extensions.server.sampler.draws import Draws, draws_of, read_draws
from harness.extensions.server.sampler.evidence import Draw
from harness.extensions.server.sampler.requests import TOKENS, DrawRequest, SamplerAnswers, SamplerSetting, ask_draws
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
    the `names` is the hypothesis that the server claims; `ask` has parameters of the sampler, as NAME=VALUE; at
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
    logprobs = [_logprobs(answers, request, draw) for request, draw in draws.values()]
    every = max(1, ceil(2 * len(draws) * vocab_size * len(hypotheses) / _MOST_KEPT))
    seen = {key: render_draws(draws, renderer, answers.names) for key, renderer in renderers.items()} or {None: draws}
    views = _views(plan, hypotheses, seen, logprobs, vocab_size=vocab_size, every=every, progress=report)
    judged = _Judged(hypotheses=hypotheses, views=views, logprobs=_table(draws, logprobs))
    return AuditResult(
        **answers.probed.about(address, plan),
        num_tokens=len(draws),
        num_requests=len({number for number, _ in draws}),
        num_logprobs=sum(map(len, map(comparable_tokens, logprobs))),
        false_claim=FALSE_CLAIM,
        hypotheses=tuple(judged.results()),
        notes=(f"{failed} requests failed",) if failed else (),
        server_s=answers.seconds,
        truth_s=time.perf_counter() - begin,
    )


def _draws(asked: SamplerAnswers) -> tuple[Draws, int]:
    """Return the draws, and the number of requests that failed.

    Raises:
        HarnessError: no request was answered, or tokens of one cannot be told: the others are not drawn at random.
    """
    errors = [answer for answer in asked.answers.values() if isinstance(answer, HarnessError)]
    unsupported = [error for error in errors if error.code is Code.ENDPOINT_CANNOT]
    if unsupported or len(errors) == len(asked.answers):
        raise (unsupported or errors)[0]
    draws = draws_of(asked)
    if not draws:
        raise HarnessError(Code.ENDPOINT_CANNOT, "no answer has a token", where="--endpoint")
    return draws, len(errors)


def _logprobs(asked: SamplerAnswers, request: DrawRequest, draw: Draw) -> RowLogprobs:
    answer = asked.answers[request.number]
    assert isinstance(answer, Completion)
    return dict(answer.logprobs_at(draw.step) or {})


def _table(draws: Draws, logprobs: Sequence[RowLogprobs]) -> ServerLogprobs | None:
    """Return all log probabilities in the order of the draws; None if there are none."""
    numbers = {number: at for at, number in enumerate(dict.fromkeys(number for number, _ in draws))}
    entries = [
        (row_logprobs[token_id], row, numbers[number])
        for row, ((number, _), row_logprobs) in enumerate(zip(draws, logprobs, strict=True))
        for token_id in comparable_tokens(row_logprobs)
    ]
    if not entries:
        return None
    values, rows, requests = zip(*entries, strict=True)
    return ServerLogprobs(
        values=torch.tensor(values).double(), rows=torch.tensor(rows), requests=torch.tensor(requests)
    )


def _views(
    plan: Plan,
    hypotheses: Sequence[ServedHypothesis],
    seen: Mapping[Path | None, Draws],
    logprobs: Sequence[RowLogprobs],
    *,
    vocab_size: int,
    every: int,
    progress: Progress,
) -> list[View]:
    """Run each model once, for all hypotheses that have it; `seen` has the draws by the template of their prompts."""
    draws = next(iter(seen.values()))
    views = [View(hypothesis.settings, len(draws), every=every) for hypothesis in hypotheses]
    numbers = {(request.number, draw.step): at for at, (request, draw) in enumerate(draws.values())}
    groups: dict[tuple[object, ...], list[tuple[ServedHypothesis, View]]] = {}
    for hypothesis, view in zip(hypotheses, views, strict=True):
        key = hypothesis.weights.lower(), hypothesis.lora, hypothesis.cache, hypothesis.template
        groups.setdefault(key, []).append((hypothesis, view))
    with scratch_folder("harness-audit-") as scratch:
        for members in groups.values():
            first = members[0][0]
            hf = load_hypothesis(first, plan, scratch, vocab_size=vocab_size)

            def read(
                request: DrawRequest,
                draw: Draw,
                logits: torch.Tensor,
                control: torch.Tensor,
                members: list[tuple[ServedHypothesis, View]] = members,
            ) -> None:
                at = numbers[request.number, draw.step]
                for _, view in members:
                    view.add(at, draw, logprobs[at], logits, control)

            rendered_draws, truth = seen[first.template], plan.case.truth
            read_draws(hf, rendered_draws, read, truth=truth, progress=progress, label=first.name, cache=first.cache)
    return views


@dataclass(frozen=True, slots=True)
class _Judged:
    """All hypotheses, and what the answers say of them."""

    hypotheses: Sequence[ServedHypothesis]
    views: Sequence[View]
    logprobs: ServerLogprobs | None

    def results(self) -> Iterator[HypothesisResult]:
        """Yield the result of each hypothesis."""
        alpha = FALSE_CLAIM / 2  # for the tokens, and for the log probabilities
        excluded = excluded_after(self.views, alpha)
        readings = readings_of(self.views) if self.logprobs is not None else []
        for at, hypothesis in enumerate(self.hypotheses):
            ours = [reading for reading in readings if reading.at == at]
            others = [reading for reading in readings if reading.at != at]
            yield HypothesisResult(
                name=hypothesis.name,
                log_likelihood=float(self.views[at].log_p.mean()),
                excluded_after=excluded[at],
                is_excluded_by_logprobs=self.logprobs is not None
                and all(is_excluded(our, others, self.logprobs, alpha) for our in ours),
                readings=() if self.logprobs is None else tuple(fit_of(our, self.logprobs) for our in ours),
                needed={
                    rival.name: self._needed(at, number, readings, alpha)
                    for number, rival in enumerate(self.hypotheses)
                    if number != at
                },
            )

    def _needed(self, served: int, rival: int, readings: Sequence[HypothesisValues], alpha: float) -> int | None:
        """Return how many tokens exclude one hypothesis if another one is served, by the evidence that needs fewer."""
        numbers = [num_draws_needed(self.views[served], self.views[rival], alpha, len(self.views))]
        if self.logprobs is not None:
            firsts = {reading.at: reading for reading in reversed(readings)}  # of each hypothesis the raw ones
            num_others = sum(reading.at != rival for reading in readings)
            num = num_requests_needed(firsts[served], firsts[rival], self.logprobs, alpha, num_others)
            numbers.append(None if num is None else num * TOKENS)
        return min((ceil(num) for num in numbers if num is not None), default=None)
