"""Log probabilities that an answer lacks, and values that are none.

The probe found that the server gives log probabilities. From then on each answer must have them: one that is missing is
a finding, for nothing else would show what it hides.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from harness.errors import Code
from harness.extensions.server.endpoint.case import JudgedCompletion
from harness.extensions.server.endpoint.truth import TruthRow
from harness.results.check import Finding

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
