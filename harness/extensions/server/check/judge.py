"""The server's answers against the truth along its own tokens: tokens, log probabilities, ends.

A token is right if it is the truth's likeliest one, or a tie: within what HF's own logits are off in the server's
dtype. Log probabilities are judged by their root mean square and by their maximum, each relative to the errors that
HF makes for the same tokens. The root mean square is the sharper: a rope base of 20,000 for 10,000 shows in it even in
bfloat16.

The probe found whether the server gives log probabilities. From then on each answer must have them: one that is missing
is a finding, for nothing else would show what it hides.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import Code
from harness.extensions.server.check.result import LogprobResult
from harness.extensions.server.completion import Completion, wrong_length
from harness.extensions.server.logprobs import UNDERFLOW, LogprobErrors, bounds, is_number
from harness.extensions.server.truth import TruthRow
from harness.results.check import Finding, TokenResult

_MOST_FINDINGS = 3
"""Wrong tokens of one request that are listed."""


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
    """One answer, with all that it is judged by."""

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
        pairs = enumerate(zip(self.answer.token_ids, self.walked, strict=False))
        return next((at for at, (token_id, walked) in pairs if token_id != walked), min(self.lengths))

    @property
    def lengths(self) -> tuple[int, int]:
        """New tokens of the answer, and of the walk."""
        return len(self.answer.token_ids), len(self.walked)

    @property
    def diverges(self) -> bool:
        """Whether the answer leaves the walk."""
        return self.num_shared < min(self.lengths)

    def row(self, at: int) -> TruthRow | None:
        """Return the row that gives the new token of a number; None after the end of the walk."""
        return self.rows.get(len(self.prompt) + at - 1)

    def finding(self, message: str, position: int | None = None, code: Code = Code.ENDPOINT_LOGPROBS) -> Finding:
        """Return a finding about this answer."""
        return Finding(code=code, message=message, request=self.request, position=position)


@dataclass(slots=True, kw_only=True)
class ScheduleJudgement:
    """The verdict on the answers of one schedule."""

    tokens: TokenResult
    logprobs: tuple[LogprobResult, ...]
    findings: list[Finding] = field(default_factory=list)
    num_diverged: int = 0


def judge(cases: Sequence[JudgedCompletion]) -> ScheduleJudgement:
    """Judge the answers of one schedule."""
    noise = max((row.logit_noise for case in cases for row in case.rows.values()), default=0.0)
    tokens = _Tokens(threshold=2 * noise)  # each of two logits may be off
    errors = {kind: _KindOfErrors(kind=kind) for kind in ("chosen", "top", "prompt")}
    findings = []
    for case in cases:
        findings += [*_end(case, tokens.threshold), *tokens.add(case), *_missing_logprobs(case)]
        findings += _add_new_logprobs(case, errors, tokens.threshold)
        findings += _add_prompt_logprobs(case, errors["prompt"])
    results = tuple(errors_of_kind.result() for errors_of_kind in errors.values() if errors_of_kind.places)
    summary = [_unsound(result) for result in results if not result.is_sound]
    return ScheduleJudgement(
        tokens=tokens.result,
        logprobs=results,
        findings=[*summary, *findings],
        num_diverged=sum(case.diverges for case in cases),
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
    if what is None and case.answer.misspelt is not None:
        what = f"the text is {case.answer.text!r:.100}, and its tokens are {case.answer.misspelt!r:.100}"
    for item in (what, *_miscounted(case)):
        if item is not None:
            yield case.finding(item, code=Code.ENDPOINT_TOKENS)


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


def _missing_logprobs(case: JudgedCompletion) -> Iterator[Finding]:
    """Find log probabilities that the server gave to the probe, and does not give to this request."""
    answer, begin = case.answer, len(case.prompt)
    if case.promised.has_logprobs:
        pairs = list(zip(answer.token_ids, answer.logprobs or (), strict=False))
        yield from _missing(case, pairs, len(answer.token_ids), "of the new tokens", begin)
        yield from _too_few(case)
        yield from _of_another_token(case)
    if case.promised.has_prompt:
        first = 1 + answer.num_unechoed
        pairs = list(zip(case.prompt, answer.prompt_logprobs or (), strict=False))[first:]
        yield from _missing(case, pairs, begin - first, "of the prompt's tokens", first)


def _missing(
    case: JudgedCompletion,
    pairs: Sequence[tuple[int, Mapping[int, float | None]]],
    num_expected: int,
    kind: str,
    begin: int,
) -> Iterator[Finding]:
    """Find tokens without a log probability; `pairs` has those that the answer gives, from position `begin` on."""
    are_there = [token_id in logprobs for token_id, logprobs in pairs]
    num_there = sum(are_there)
    if num_there < num_expected:
        at = next((at for at, is_there in enumerate(are_there) if not is_there), len(are_there))
        what = f"{num_there or 'none'} of {num_expected} log probabilities {kind} are there; the probe got them"
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


def _of_another_token(case: JudgedCompletion) -> Iterator[Finding]:
    pairs = zip(case.answer.logprobs_of, case.answer.token_ids, strict=False)
    for at, (named, token_id) in enumerate(pairs):
        if named not in (None, token_id):
            what = f"the log probabilities of token {at} are of {named}, the answer has {token_id}"
            yield case.finding(what, len(case.prompt) + at, Code.ENDPOINT_TOKENS)
            return


@dataclass(slots=True, kw_only=True)
class _KindOfErrors:
    """Errors of log probabilities of one kind, and the requests and positions that they are of."""

    kind: str
    errors: LogprobErrors = field(default_factory=LogprobErrors)
    places: list[tuple[int, int]] = field(default_factory=list)

    def add(self, place: tuple[int, int], row: TruthRow, token_id: int, value: float) -> None:
        expected = row.logprobs[token_id]
        self.errors.add(value - expected, max(abs(row.control[token_id] - expected), row.resolution))
        self.places.append(place)

    def result(self) -> LogprobResult:
        values, num_rows = self.errors.values, len(set(self.places))
        worst = max(range(len(values)), key=lambda at: abs(values[at]))
        (rms, rms_noise), (largest, largest_noise) = self.errors.rms, self.errors.max
        rms_bound, max_bound = bounds(num_rows)
        return LogprobResult(
            kind=self.kind,
            num_rows=num_rows,
            num_values=len(values),
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


def _add_new_logprobs(
    case: JudgedCompletion, errors: Mapping[str, _KindOfErrors], threshold: float
) -> Iterator[Finding]:
    """Collect the errors of the new tokens' log probabilities; yield values that are wrong by themselves."""
    for at, logprobs in enumerate((case.answer.logprobs or ())[: case.num_shared + 1]):
        row, position = case.row(at), len(case.prompt) + at
        if row is None:
            return
        yield from _impossible(case, position, row, logprobs)
        known = {token: value for token, value in logprobs.items() if is_number(value) and token in row.logprobs}
        token_id = case.answer.token_ids[at]
        if token_id in known:
            errors["chosen"].add((case.request, position), row, token_id, known[token_id])
        if len(known) > 1:
            for token, value in known.items():
                errors["top"].add((case.request, position), row, token, value)
        yield from _left_out(case, position, row, known, threshold)


def _add_prompt_logprobs(case: JudgedCompletion, errors: _KindOfErrors) -> Iterator[Finding]:
    """Do the same for the tokens of the prompt."""
    for position, logprobs in enumerate(case.answer.prompt_logprobs or ()):
        row = case.rows.get(position - 1)
        if row is None or position <= case.answer.num_unechoed:
            continue
        yield from _impossible(case, position, row, logprobs)
        token_id = case.prompt[position]
        logprob = logprobs.get(token_id)
        if is_number(logprob):
            errors.add((case.request, position), row, token_id, logprob)


def _impossible(
    case: JudgedCompletion, position: int, row: TruthRow, logprobs: Mapping[int, float | None]
) -> Iterator[Finding]:
    """Find the first value that no log probability of its token can have."""
    for token_id, value in logprobs.items():
        what = _impossibility(value, row.logprobs.get(token_id, -math.inf))
        if what is not None:
            code = Code.NOT_FINITE if value is not None and math.isnan(value) else Code.ENDPOINT_LOGPROBS
            yield case.finding(f"the log probability of token {token_id} is {what}", position, code)
            return


def _impossibility(value: float | None, expected: float) -> str | None:
    if value is None:
        return f"null, HF's is {expected:.3g}"
    if math.isnan(value) or value > 1e-3:
        return f"{value}"
    if not is_number(value) and expected > UNDERFLOW:
        return f"{value}, which stands for none; HF's is {expected:.3g}"
    return None


def _left_out(
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
