"""One answer of a server, with all that it is judged by."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from harness.errors import Code
from harness.extensions.server.check.result import LogprobResult
from harness.extensions.server.completion import Completion
from harness.extensions.server.truth import TruthRow
from harness.results.check import Finding, TokenResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """Log probabilities that an answer must have: the probe found them."""

    has_logprobs: bool
    """Of the new tokens."""
    num_top: int
    """Likeliest tokens of each new token."""
    has_prompt: bool
    """Of the tokens of the prompt."""
    counts_prompt: bool
    """Whether the tokens of the prompt are known to the server as they were sent, so that it can count them."""
    is_named_alone: Callable[[int], bool]
    """Whether the server's name of a token is no other token's: two tokens of one name leave one entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCompletion:
    """One answer with what it is judged by."""

    request: int
    prompt: tuple[int, ...]
    answer: Completion
    rows: Mapping[int, TruthRow]
    """Of the first schedule's walk, which the answer may leave at a tie."""
    walked: tuple[int, ...]
    """The new tokens along which the rows are true."""
    asked_tokens: int
    eos: frozenset[int]
    promised: Promised

    @property
    def num_shared(self) -> int:
        """New tokens that the answer has in common with the walk."""
        pairs = zip(self.answer.token_ids, self.walked, strict=False)
        return next((at for at, (own, walked) in enumerate(pairs) if own != walked), min(self.lengths))

    @property
    def lengths(self) -> tuple[int, int]:
        """New tokens of the answer, and of the walk."""
        return len(self.answer.token_ids), len(self.walked)

    def finding(self, message: str, position: int | None = None, code: Code = Code.ENDPOINT_LOGPROBS) -> Finding:
        """Return a finding about this answer."""
        return Finding(code=code, message=message, request=self.request, position=position)

    def row(self, at: int) -> TruthRow | None:
        """Return the row that gives the new token of a number; None after the end of the walk."""
        return self.rows.get(len(self.prompt) + at - 1)

    @property
    def parts(self) -> bool:
        """Whether the answer leaves the walk."""
        return self.num_shared < min(self.lengths)


_MISSING = -9990.0
"""At and below it a log probability says `none`: servers write minus infinity as -9999 or so."""
_UNDERFLOW = math.log(2.0**-126)
"""Log probability of the smallest normal float32: a server that takes the logarithm of a softmax has none below it."""


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether a log probability can be compared: `null`, NaN, minus infinity and what stands for it cannot."""
    return value is not None and math.isfinite(value) and value > _MISSING


def unpromised(case: JudgedCompletion) -> Iterator[Finding]:
    """Find log probabilities that the server gave to the probe, and does not give to this request."""
    answer, begin = case.answer, len(case.prompt)
    if case.promised.has_logprobs:
        given = [token in own for token, own in zip(answer.token_ids, answer.logprobs or (), strict=False)]
        yield from _lacking(case, given, len(answer.token_ids), "of the new tokens", begin)
        yield from _too_few(case)
        yield from _of_others(case)
    if case.promised.has_prompt:
        first = 1 + answer.num_unechoed
        pairs = list(zip(case.prompt, answer.prompt_logprobs or (), strict=False))[first:]
        yield from _lacking(
            case, [token in own for token, own in pairs], begin - first, "of the prompt's tokens", first
        )


def _lacking(
    case: JudgedCompletion, given: Sequence[bool], num_expected: int, kind: str, begin: int
) -> Iterator[Finding]:
    num_given = sum(given)
    if num_given < num_expected:
        at = next((at for at, is_given in enumerate(given) if not is_given), len(given))
        what = f"{num_given or 'none'} of {num_expected} log probabilities {kind} are there; the probe got them"
        yield case.finding(what, begin + at)


def _too_few(case: JudgedCompletion) -> Iterator[Finding]:
    """Find a token for which fewer of the likeliest tokens are named than for the probe's."""
    for at, num_named in enumerate(case.answer.num_named):
        row = case.row(at) if at <= case.num_shared else None
        likeliest = row.top[: case.promised.num_top] if row is not None else ()
        num_expected = sum(case.promised.is_named_alone(token) for token in likeliest)
        if num_named < num_expected:
            what = f"{num_named or 'none'} of the {num_expected} likeliest tokens are named; the probe got them"
            yield case.finding(what, len(case.prompt) + at)
            return


def _of_others(case: JudgedCompletion) -> Iterator[Finding]:
    for at, (own, token_id) in enumerate(zip(case.answer.logprobs_of, case.answer.token_ids, strict=False)):
        if own not in (None, token_id):
            what = f"the log probabilities of token {at} are of {own}, the answer has {token_id}"
            yield case.finding(what, len(case.prompt) + at, Code.ENDPOINT_TOKENS)
            return


def strange(
    case: JudgedCompletion, position: int, row: TruthRow, given: Mapping[int, float | None]
) -> Iterator[Finding]:
    """Find the first value that no log probability of its token can have."""
    for token_id, value in given.items():
        what = _strangeness(value, row.logprobs.get(token_id, -math.inf))
        if what is not None:
            code = Code.NOT_FINITE if value is not None and math.isnan(value) else Code.ENDPOINT_LOGPROBS
            yield case.finding(f"the log probability of token {token_id} is {what}", position, code)
            return


def _strangeness(value: float | None, expected: float) -> str | None:
    if value is None:
        return f"null, HF's is {expected:.3g}"
    if math.isnan(value) or value > 1e-3:
        return f"{value}"
    if not is_number(value) and expected > _UNDERFLOW:
        return f"{value}, which stands for none; HF's is {expected:.3g}"
    return None


def left_out(
    case: JudgedCompletion, position: int, row: TruthRow, known: Mapping[int, float], threshold: float
) -> Iterator[Finding]:
    """Find a token that is likelier than one of the likeliest tokens that the server names."""
    num_top = min(case.promised.num_top, len(row.top))
    if num_top < 1:
        return
    named = sorted((row.logprobs[token] for token in known), reverse=True)[:num_top]
    last = min([row.logprobs[row.top[num_top - 1]], *named[num_top - 1 :]])
    better = next((token for token in row.top if token not in known and case.promised.is_named_alone(token)), None)
    if better is not None and row.logprobs[better] - last > threshold:
        yield case.finding(
            f"token {better} is not among the {num_top} likeliest ones, and is likelier than the last of them by "
            f"{row.logprobs[better] - last:.3g}, noise allows {threshold:.3g}",
            position,
        )


_RMS_BOUND, _RMS_BOUND_PER_ROOT = 1.5, 4.0
"""RMS of a sound server's errors over that of HF's, at most: the first, plus the second over the root of the rows.

Calibrated with tests/calibrations/endpoint_floors.py (reports/cpu/endpoints.md)."""
_MAX_BOUND, _MAX_BOUND_PER_ROW = 2.5, 80.0
"""The same for the largest error, with the second over the rows themselves. Of a few rows one may have all the weight
(the others' tokens are certain), and HF's error there is a single draw: a sound server had 5.6 times as much over 16
rows, in 1 of 10 to 30 checks. Of many rows several have weight."""
_MOST_FINDINGS = 3
"""Findings of a kind that are worth saying of one request."""


@dataclass(slots=True, kw_only=True)
class ScheduleJudgement:
    """The verdict on the answers of one schedule."""

    tokens: TokenResult
    logprobs: tuple[LogprobResult, ...]
    findings: list[Finding] = field(default_factory=list)
    num_parted: int = 0


def judge(cases: Sequence[JudgedCompletion]) -> ScheduleJudgement:
    """Judge the answers of one schedule."""
    noise = max((row.logit_noise for case in cases for row in case.rows.values()), default=0.0)
    tokens = _Tokens(threshold=2 * noise)  # each of two logits may be off
    errors = {kind: _Errors(kind=kind) for kind in ("chosen", "top", "prompt")}
    findings = []
    for case in cases:
        findings += [*_end(case, tokens.threshold), *tokens.add(case), *_add_errors(case, errors, tokens.threshold)]
    results = tuple(own.result() for own in errors.values() if own.num_values)
    summary = [_unsound(result) for result in results if not result.is_sound]
    return ScheduleJudgement(
        tokens=tokens.result,
        logprobs=results,
        findings=[*summary, *findings],
        num_parted=sum(case.parts for case in cases),
    )


@dataclass(slots=True, kw_only=True)
class _Tokens:
    """Counts of tokens that are right, ties, or wrong."""

    threshold: float
    compared: int = 0
    equal: int = 0
    ties: int = 0

    @property
    def result(self) -> TokenResult:
        return TokenResult(compared=self.compared, equal=self.equal, ties=self.ties)

    def add(self, case: JudgedCompletion) -> Iterator[Finding]:
        """Judge the tokens up to and with the first that leaves the walk."""
        num_said = 0
        for at, token_id in enumerate(case.answer.token_ids[: case.num_shared + 1]):
            row = case.row(at)
            if row is None:
                return
            self.compared += 1
            margin = row.margin(token_id)
            if margin <= 0:
                self.equal += 1
            elif margin <= self.threshold:
                self.ties += 1
            elif num_said < _MOST_FINDINGS:
                num_said += 1
                what = f"its logit is {margin:.3g} below the best, noise allows {self.threshold:.3g}"
                message = f"token {at} is {token_id}, expected {row.top[0]}: {what}"
                yield case.finding(message, len(case.prompt) + at, Code.TOKENS_DIFFER)


def _end(case: JudgedCompletion, threshold: float) -> Iterator[Finding]:
    """Judge how many tokens there are, and whether the model ends there."""
    num, reason = len(case.answer.token_ids), case.answer.finish_reason
    what = wrong_length(num, case.asked_tokens, reason)
    if what is None and reason == "stop" and not _ends_at_eos(case, threshold):
        what = f"the answer stops after {num} tokens, where the model does not end"
    for item in (what, *_miscounted(case)):
        if item is not None:
            yield case.finding(item, code=Code.ENDPOINT_TOKENS)


def wrong_length(num: int, num_asked: int, reason: str | None) -> str | None:
    """Return what is wrong with an answer of so many tokens that ends for a reason; None: nothing."""
    if num > num_asked:
        return f"{num} tokens where {num_asked} were asked for"
    if reason not in ("length", "stop"):
        return f"the answer ends after {num} of {num_asked} tokens with finish_reason {reason!r}"
    if reason == "length" and num < num_asked:
        return f"{num} tokens where {num_asked} were asked for, and finish_reason is 'length'"
    return None


def _miscounted(case: JudgedCompletion) -> Iterator[str]:
    """Judge the server's own counts: an end-of-sequence token that it does not name may be counted or not."""
    answer, num = case.answer, len(case.answer.token_ids)
    if answer.num_new_tokens not in (None, num, num + (answer.finish_reason == "stop")):
        yield f"usage counts {answer.num_new_tokens} new tokens, the answer has {num}"
    if case.promised.counts_prompt and answer.num_prompt_tokens not in (None, len(case.prompt)):
        yield f"usage counts {answer.num_prompt_tokens} tokens of the prompt, {len(case.prompt)} were sent"


def _ends_at_eos(case: JudgedCompletion, threshold: float) -> bool:
    """Whether the last token ends a text, or such a token comes next."""
    tokens = case.answer.token_ids
    if tokens and tokens[-1] in case.eos:
        return True
    row = case.row(len(tokens))
    if case.num_shared < len(tokens) or row is None:
        return True  # after a tie the truth is not known
    return any(token_id in row.logprobs and row.margin(token_id) <= threshold for token_id in case.eos)


@dataclass(slots=True, kw_only=True)
class _Errors:
    """Errors of log probabilities of one kind, and HF's own for the same tokens."""

    kind: str
    own: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    rows: set[tuple[int, int]] = field(default_factory=set)

    @property
    def num_values(self) -> int:
        return len(self.own)

    def add(self, place: tuple[int, int], row: TruthRow, token_id: int, value: float) -> None:
        self.own.append(value - row.logprobs[token_id])
        self.noise.append(max(abs(row.control[token_id] - row.logprobs[token_id]), row.resolution))
        self.places.append(place)
        self.rows.add(place)

    def result(self) -> LogprobResult:
        num_rows = len(self.rows)
        worst = max(range(len(self.own)), key=lambda at: abs(self.own[at]))
        rms, rms_noise = _rms(self.own), _rms(self.noise)
        largest, largest_noise = abs(self.own[worst]), max(self.noise)
        rms_bound, max_bound = bounds(num_rows)
        return LogprobResult(
            kind=self.kind,
            num_rows=num_rows,
            num_values=self.num_values,
            rms=rms,
            rms_noise=rms_noise,
            rms_bound=rms_bound,
            max=largest,
            max_noise=largest_noise,
            max_bound=max_bound,
            worst_request=self.places[worst][0],
            worst_position=self.places[worst][1],
            is_sound=rms <= rms_bound * rms_noise and largest <= max_bound * largest_noise,
        )


def bounds(num_rows: int) -> tuple[float, float]:
    """Return the bounds of the root mean square and of the maximum, over so many rows, in units of HF's own noise."""
    return _RMS_BOUND + _RMS_BOUND_PER_ROOT / math.sqrt(num_rows), _MAX_BOUND + _MAX_BOUND_PER_ROW / num_rows


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _add_errors(case: JudgedCompletion, errors: Mapping[str, _Errors], threshold: float) -> Iterator[Finding]:
    """Collect the errors of one answer's log probabilities; yield what is missing, or is no log probability at all."""
    yield from unpromised(case)
    for at, given in enumerate((case.answer.logprobs or ())[: case.num_shared + 1]):
        row, position = case.row(at), len(case.prompt) + at
        if row is None:
            return
        yield from strange(case, position, row, given)
        known = {token: value for token, value in given.items() if is_number(value) and token in row.logprobs}
        token_id = case.answer.token_ids[at]
        if token_id in known:
            errors["chosen"].add((case.request, position), row, token_id, known[token_id])
        if len(known) > 1:
            for token, value in known.items():
                errors["top"].add((case.request, position), row, token, value)
        yield from left_out(case, position, row, known, threshold)
    for position, given in enumerate(case.answer.prompt_logprobs or ()):
        row = case.rows.get(position - 1)
        if row is None or position <= case.answer.num_unechoed:
            continue
        yield from strange(case, position, row, given)
        token_id = case.prompt[position]
        logprob = given.get(token_id)
        if is_number(logprob):
            errors["prompt"].add((case.request, position), row, token_id, logprob)


def _unsound(result: LogprobResult) -> Finding:
    parts = []
    if result.rms_ratio > result.rms_bound:
        parts.append(f"root mean square {result.rms_ratio:.3g} times HF's noise, at most {result.rms_bound:.3g}")
    if result.max_ratio > result.max_bound:
        parts.append(f"largest error {result.max_ratio:.3g} times HF's largest, at most {result.max_bound:.3g}")
    kind = {"chosen": "of the chosen tokens", "top": "of the likeliest tokens", "prompt": "of the prompt"}[result.kind]
    return Finding(
        code=Code.ENDPOINT_LOGPROBS,
        message=f"the log probabilities {kind} are off: {'; '.join(parts)}",
        request=result.worst_request,
        position=result.worst_position,
    )
