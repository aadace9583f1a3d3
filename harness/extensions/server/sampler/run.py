"""The job: ask a server for draws, run the truth along them, judge."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.extensions.server.address import Address
from harness.extensions.server.chat.automaton import Automaton
from harness.extensions.server.client import has_status
from harness.extensions.server.completion import Completion, wrong_length
from harness.extensions.server.logprobs import DefinitionResult
from harness.extensions.server.probe import UNSEEDED, error_text, failure
from harness.extensions.server.sampler.draws import bind_to_schemas, draws_of, read_draws
from harness.extensions.server.sampler.evidence import Draw, SamplerEvidence
from harness.extensions.server.sampler.judge import (
    FALSE_ALARM,
    Levels,
    SettingJudgement,
    judge_independence,
    judge_pooled,
    judge_seeds,
    judge_setting,
    total_log_ratios,
)
from harness.extensions.server.sampler.logprobs import LogprobEvidence
from harness.extensions.server.sampler.requests import (
    NOT_ASKED,
    TOKENS,
    Answers,
    DrawRequest,
    SamplerAnswers,
    SamplerSetting,
    ask_draws,
    chosen_settings,
)
from harness.extensions.server.sampler.result import SamplerResult, SeedResult, SettingResult
from harness.oracle.sampling import Chain
from harness.plan import Plan
from harness.results.check import Finding

_REFUSALS = (400, 404, 405, 422, 501)
"""Statuses that say that a parameter is not served; any other is a failure."""


def check_sampler(
    plan: Plan,
    address: Address,
    *,
    num_draws: int = 200,
    seed: int = 0,
    order: tuple[str, ...] = Chain().steps,
    only: Sequence[str] = (),
    progress: Progress | None = None,
) -> SamplerResult:
    """Check a server's sampler against the exact distributions of HF's logits.

    The plan says model, dtype of the server, and precision of the truth; its prompts are not used. Of each setting, or
    `only` of those named, at least `num_draws` are asked for; `order` has the steps that the server claims.

    Raises:
        HarnessError: the input cannot be used; the server is not there, or answers nothing that can be judged.
    """
    report = progress or no_progress
    settings = chosen_settings(only)
    asked_for = [setting for setting in settings if not setting.lacking(order)]
    is_bound = any(item.schema is not None for item in asked_for)
    automaton = Automaton(plan.checkpoint.tokenizer.hf) if is_bound else None
    asked = ask_draws(plan, address, asked_for, num_draws, seed=seed, progress=report)
    begin = time.perf_counter()
    judged = _Judged(asked, Chain(steps=order), seed=seed, truth=plan.case.truth, automaton=automaton)
    judged.run(report)
    return judged.result(plan, address, settings, truth_s=time.perf_counter() - begin)


class _Judged:
    """All answers, and their comparison with the truth."""

    def __init__(
        self, asked: SamplerAnswers, chain: Chain, *, seed: int, truth: str, automaton: Automaton | None
    ) -> None:
        self._asked, self._truth, self._chain = asked, truth, chain
        names = dict.fromkeys(request.setting.name for request in asked.requests)
        self._evidence = {name: SamplerEvidence(chain=chain, eos=asked.eos, seed=seed) for name in names}
        self._logprobs = LogprobEvidence(chain=chain)
        self._repeated = LogprobEvidence(chain=chain)
        """Log probabilities of requests that were sent again, and drew the same tokens."""
        self._num_without = 0
        """Draws without a log probability."""
        self._refused = dict(self._refusals())
        self._draws = draws_of(asked, left_out=self._refused)
        if automaton is not None:
            self._draws = bind_to_schemas(self._draws, automaton)

    def _answer(self, request: DrawRequest) -> Completion | HarnessError:
        return self._asked.answers[request.number]

    def _refusals(self) -> Iterator[tuple[str, str]]:
        """Yield settings that cannot be judged, with the reason."""
        for name in self._evidence:
            answers = [self._answer(request) for request in self._asked.requests if request.setting.name == name]
            errors = [answer for answer in answers if isinstance(answer, HarnessError)]
            unsupported = [error for error in errors if error.code is Code.ENDPOINT_CANNOT]
            refused = [error for error in errors if has_status(error, _REFUSALS)]
            if unsupported or len(refused) == len(answers):  # a draw that cannot be told is no draw at random
                yield name, error_text((unsupported or refused)[0])

    def run(self, report: Progress) -> None:
        """Run the truth along all answers."""
        read_draws(self._asked.hf, self._draws, self._read, truth=self._truth, progress=report, label="truth")

    def _read(self, request: DrawRequest, draw: Draw, logits: torch.Tensor, control: torch.Tensor) -> None:
        self._evidence[request.setting.name].add(draw, logits, control)
        answer = self._answer(request)
        assert isinstance(answer, Completion)
        if request.setting.schema is not None:  # servers differ in whether they show what a mask has left
            return
        logprobs, position = answer.logprobs_at(draw.step), len(request.prompt) + draw.step
        if draw.step < len(answer.token_ids) and draw.token_ids[0] not in (logprobs or {}):
            self._num_without += 1
        if logprobs is None:
            return
        self._logprobs.add(draw, logprobs, logits, control, position)
        for others in (self._asked.alone, self._asked.again):
            repeated = others.get(request.number)
            if isinstance(repeated, Completion) and repeated.token_ids == answer.token_ids:
                again = repeated.logprobs_at(draw.step)
                again = {answer.token_ids[draw.step]: None} if again is None else again
                self._repeated.add(draw, again, logits, control, position)

    def result(
        self, plan: Plan, address: Address, settings: Sequence[SamplerSetting], *, truth_s: float
    ) -> SamplerResult:
        """Judge everything."""
        evidence = {name: setting for name, setting in self._evidence.items() if setting.draws}
        bare = {setting.name for setting in settings if setting.is_bare}
        claimed = {name: setting for name, setting in evidence.items() if name not in bare}
        levels, over_all = Levels.of(evidence), total_log_ratios(claimed)
        results = tuple(self._setting(setting, levels, over_all) for setting in settings)
        definitions = self._logprobs.results()
        seeds, seed_findings = self._seeds(levels)
        is_named = any(setting.findings for setting in results)
        pooled = judge_pooled(claimed, levels, is_named=is_named)
        follows = {result.name: result.follows for result in results}
        dependent = judge_independence(claimed, levels, follows)
        findings = [*pooled.findings, *dependent, *seed_findings, *self._logprobs.findings, *self._unpromised()]
        findings += self._stale(definitions)
        findings += self._constant()
        if definitions and not any(definition.fits for definition in definitions):
            message = "the log probabilities are of no distribution that is known: " + "; ".join(
                f"{definition.name}: {definition.rms_ratio:.3g} times HF's noise, {definition.num_misfits} misfits"
                for definition in definitions
            )
            findings.insert(0, Finding(code=Code.ENDPOINT_LOGPROBS, message=message))
        probed = self._asked.probed
        return SamplerResult(
            **probed.about(address, plan),
            order=self._chain.steps,
            false_alarm=FALSE_ALARM,
            num_tests=levels.num_tests,
            settings=results,
            seeds=seeds,
            definitions=definitions,
            would_find=pooled.would_find,
            could_miss=pooled.could_miss,
            no_change=pooled.no_change,
            findings=tuple(findings),
            notes=(*_notes(results), f"{NOT_ASKED}, {self._asked.client.not_asked}"),
            server_s=self._asked.seconds,
            truth_s=truth_s,
        )

    def _setting(self, setting: SamplerSetting, levels: Levels, over_all: Mapping[str, float]) -> SettingResult:
        lacking = setting.lacking(self._chain.steps)
        if lacking:
            return SettingResult.left_out(
                setting.name, setting.settings.changed, f"--order has no step {' and no step '.join(lacking)}"
            )
        requests = [request for request in self._asked.requests if request.setting.name == setting.name]
        evidence = self._evidence[setting.name]
        failures = () if setting.name in self._refused else tuple(self._failures(requests))
        judged = judge_setting(setting.name, evidence, levels, over_all) if evidence.draws else SettingJudgement()
        wrong = () if setting.is_bare else judged.findings
        return SettingResult(
            name=setting.name,
            settings=requests[0].settings.changed,
            num_requests=len(requests),
            num_draws=len(evidence.draws),
            num_outside=judged.num_outside,
            shift=judged.shift,
            shift_bound=judged.shift_bound,
            follows=judged.follows,
            not_judged=self._refused.get(setting.name),
            is_claimed=not setting.is_bare,
            body=requests[0].body(self._asked.probed, self._asked.names),
            findings=(*failures, *wrong),
        )

    def _failures(self, requests: Sequence[DrawRequest]) -> Iterator[Finding]:
        for request in requests:
            answer = self._answer(request)
            if isinstance(answer, HarnessError):
                yield failure(request.number, answer)
                continue
            num = len(answer.token_ids)
            what = wrong_length(num, TOKENS, answer.finish_reason)
            if what is None and num < TOKENS and not self._asked.eos:
                what = f"the answer stops after {num} tokens, and the model has no end tokens"
            if what is not None:
                yield Finding(code=Code.ENDPOINT_TOKENS, message=what, request=request.number)

    def _stale(self, definitions: Sequence[DefinitionResult]) -> Iterator[Finding]:
        """Judge the log probabilities of requests that were sent again by the definitions that fit at first."""
        fitting = {definition.name for definition in definitions if definition.fits}
        again = [result for result in self._repeated.results() if result.name in fitting]
        if again and not any(item.fits for item in again):
            best = min(again, key=lambda result: (result.num_misfits, result.rms_ratio))
            message = (
                "the log probabilities of requests that were sent again are wrong, and were right before: they are "
                f"stale, or of other rows ({best.rms_ratio:.3g} times HF's noise, {best.num_misfits} misfits)"
            )
            yield Finding(code=Code.ENDPOINT_LOGPROBS, message=message)

    def _constant(self) -> Iterator[Finding]:
        """Find draws that are the same in each request that has no seed."""
        for capability in self._asked.probed.capabilities:
            if capability.name == UNSEEDED and capability.is_ignored:
                message = f"requests without a seed draw as if they had one and the same: {capability.detail}"
                yield Finding(code=Code.SEED_DIFFERS, message=message)

    def _unpromised(self) -> Iterator[Finding]:
        if self._num_without and self._asked.probed.has("logprobs"):
            num = sum(len(evidence.draws) for evidence in self._evidence.values())
            message = f"{self._num_without} of {num} tokens have no log probability; the probe's tokens had one"
            yield Finding(code=Code.ENDPOINT_LOGPROBS, message=message)

    def _seeds(self, levels: Levels) -> tuple[SeedResult | None, list[Finding]]:
        chosen = {number for number in self._asked.alone if any(number == place[0] for place in self._draws)}
        if not chosen:
            ignored = [
                capability
                for capability in self._asked.probed.capabilities
                if capability.name == "seed" and capability.is_ignored
            ]
            message = "the server takes a seed and does not follow it: {}"
            return None, [Finding(code=Code.SEED_DIFFERS, message=message.format(item.detail)) for item in ignored]
        flips: dict[int, list[float]] = {}
        for draw in (draw for evidence in self._evidence.values() for draw in evidence.draws if draw.request in chosen):
            flips.setdefault(draw.request, []).append(draw.flips)
        counts = {
            "alone than among others": self._num_other(chosen, self._asked.alone),
            "a second time": self._num_other(chosen, self._asked.again),
        }
        excused, findings = judge_seeds(counts, [sum(chances) for chances in flips.values()], levels)
        num_alone, num_again = counts.values()
        return SeedResult(
            num_requests=len(chosen),
            num_draws=sum(map(len, flips.values())),
            num_alone=num_alone,
            num_again=num_again,
            num_excused=excused,
        ), findings

    def _num_other(self, chosen: set[int], others: Answers) -> int:
        """Return how many requests were answered otherwise, or not."""
        firsts = self._asked.answers

        def tokens(answers: Mapping[int, Completion | HarnessError], number: int) -> object:
            answer = answers[number]
            return answer.token_ids if isinstance(answer, Completion) else answer

        return sum(tokens(others, number) != tokens(firsts, number) for number in chosen)


def _notes(results: Sequence[SettingResult]) -> Iterator[str]:
    for result in results:
        if not result.is_claimed and result.follows not in ("as asked", None):
            yield f"where only a temperature is sent, the server has defaults of its own: {result.follows}"
        elif not result.is_claimed and result.follows is None and result.num_draws:
            yield "where only a temperature is sent, the draws follow no chain that is known"
