"""The findings on a tap, in words."""

import math

import torch

from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.compare.align import Rows
from harness.judge.compare.judged import TapJudgement
from harness.judge.compare.propagated import Propagation
from harness.results.check import Finding


def bad_finding(judged: TapJudgement) -> Finding:
    """Say in words how a bad tap is bad."""
    at, tap, code = judged.first_bad, judged.operation.tap, judged.code
    request, position = int(judged.rows.request[at]), int(judged.rows.position[at])
    count = f"{int(judged.bad.sum())} of {len(judged.rows)} rows, the first at request {request}, position {position}"
    errors = judged.errors
    if code is Code.NOT_FINITE:
        clause = " though its inputs are" if errors else ""
        message = f"{tap} is not finite{clause} in {count}"
    elif code is Code.CACHE_DIFFERS:
        message = f"{tap} read back through the block table differs from what was written in {count}"
    elif code is Code.STATE_DIFFERS:
        assert errors is not None
        share = f"{float(errors.roundings[at]):.3g} roundings, bound {float(errors.bound[at]):.3g}"
        message = f"{tap} read back is not the state after the rows before it, in {count}: {share}"
    elif errors is not None and judged.operation.kind is Kind.CHOICE:
        message = f"{tap} chose other indices than HF does from the same scores in {count}: {_distance(judged)}"
    elif errors is not None:
        share = f"{float(errors.roundings[at]):.3g} roundings, bound {float(errors.bound[at]):.3g}"
        way = f", computed through {len(errors.unrecorded)} taps that were not recorded" if errors.unrecorded else ""
        message = f"{tap} is out of bounds in {count}: {share}{way}"
    elif judged.propagated is not None and not judged.propagated.has_noise:
        bound = f"bound {judged.propagated.bound:.3g}"
        message = f"{tap} differs by {judged.ratio_at(at):.3g} times what rounding adds up to ({bound}) in {count}"
    else:
        message = f"{tap} is {judged.ratio_at(at):.3g} times as far from the truth as HF in {count}"
    message += _not_tried(judged)
    return Finding(code=code, message=message, tap=tap, request=request, position=position)


def _not_tried(judged: TapJudgement) -> str:
    """Say which conventions the operation was not held to, because they raised."""
    failures = () if judged.errors is None else judged.errors.failures
    return f"; conventions that could not be tried: {', '.join(failures)}" if failures else ""


def _distance(judged: TapJudgement) -> str:
    assert judged.errors is not None
    distance = float(judged.errors.roundings[judged.first_bad])
    if math.isfinite(distance):
        return f"their scores lie {distance:.3g} times as far below as rounding explains"
    return "an index does not exist, or is there twice"


def choice_finding(tap: str, rows: Rows) -> Finding:
    """Say where a router that no replay judged chose otherwise: without the truth's scores, no tie is known."""
    at = rows.first(torch.ones(len(rows), dtype=torch.bool))
    request, position = int(rows.request[at]), int(rows.position[at])
    message = (
        f"{tap} chose other indices than EXPECTED in {len(rows)} rows, the first at request {request}, position "
        f"{position}; whether their scores are tied, --model tells"
    )
    return Finding(code=Code.PROPAGATED_ERROR, message=message, tap=tap, request=request, position=position)


def systematic_finding(judged: TapJudgement) -> Finding:
    """Say in words in which direction the rows of a tap are off, none of which is out of bounds."""
    effect, tap = judged.effect, judged.operation.tap
    assert effect is not None
    what = f"{effect.kind} {effect.which}".strip()
    message = (
        f"{tap} has a {what} of {effect.size:+.3g} ({effect.low:+.3g} to {effect.high:+.3g} at 95 %), "
        f"{abs(effect.roundings):.2g} roundings, in {effect.num_rows} rows (t = {abs(effect.statistic):.3g}): "
        f"rounding has no direction{_not_tried(judged)}"
    )
    return Finding(code=judged.code, message=message, tap=tap)


def oracle_finding(propagation: Propagation) -> Finding | None:
    """Say where the expected side is not finite, if it is so anywhere."""
    for tap, errors in propagation.errors.items():
        broken = ~torch.isfinite(errors.metrics.expected_norm)
        if bool(broken.any()):
            at = errors.rows.first(broken)
            request, position = int(errors.rows.request[at]), int(errors.rows.position[at])
            message = f"the expected side of {tap} is not finite at request {request}, position {position}"
            return Finding(code=Code.ORACLE_NOT_FINITE, message=message, tap=tap, request=request, position=position)
    return None
