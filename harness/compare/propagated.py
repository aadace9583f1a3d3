"""Propagated judgement: an engine's rows against the golden's, as a ratio to the error HF itself makes.

Nothing but a pass over two recordings: tap by tap, memory-mapped, each row found by (request, position).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from harness.compare.align import Locator, Rows, step_rows
from harness.errors import Code
from harness.metrics import RowMetrics, logit_metrics, row_metrics
from harness.metrics import rounding_unit as unit_of
from harness.recording import Recording, Step
from harness.results import Finding, LogitResult
from harness.taps import LOGITS

RATIO_BOUND = 10.0
"""Largest ratio of a row's error to HF's own that passes where nothing but propagation can judge. HF's eager against
HF's sdpa reaches 4 on the tiny models (reports/cpu/noise-floors.md); a bug upstream gives hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedErrors:
    """Distances of one tap to the golden; tensors [rows] in the order of `rows`."""

    rows: Rows
    metrics: RowMetrics
    ratio: torch.Tensor
    """float64: relative L2 error over the noise of the same row."""


@dataclass(slots=True)
class Propagation:
    """All taps' distances, and what could not be compared."""

    errors: dict[str, PropagatedErrors] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    logits: LogitResult | None = None


@dataclass(slots=True)
class _Parts:
    rows: list[Rows] = field(default_factory=list)
    metrics: list[RowMetrics] = field(default_factory=list)
    noise: list[torch.Tensor] = field(default_factory=list)


def propagated_errors(
    actual: Recording, expected: Recording, noise: Mapping[str, torch.Tensor], depths: Mapping[str, int]
) -> Propagation:
    """Compare every tap that both recordings hold.

    Args:
        actual: the engine's recording.
        expected: a golden, or any recording of the same requests.
        noise: HF's own relative L2 error per row of `expected`; taps without it are measured against the noise that
            independent roundings would add up to, `unit * sqrt(operations so far)`.
        depths: number of operations up to and including each tap.
    """
    locator, result = Locator(expected), Propagation()
    parts: dict[str, _Parts] = {}
    logits: list[torch.Tensor] = []
    dtype = getattr(torch, actual.manifest.dtype)
    for step in actual.steps:
        for tap in step.tap_names:
            pair = _pair(step, tap, locator, result)
            if pair is None:
                continue
            rows, found, ours, theirs = pair
            part = parts.setdefault(tap, _Parts())
            part.rows.append(rows)
            part.metrics.append(row_metrics(ours, theirs))
            part.noise.append(_noise(noise.get(tap), found, unit_of(dtype) * math.sqrt(depths.get(tap, 1))))
            if tap == LOGITS:
                logits.append(logit_metrics(ours, theirs))
        step.release()
        _release_if_large(expected, step)
    expected.release()
    result.errors = {tap: _joined(part) for tap, part in parts.items()}
    result.logits = _logit_result(logits)
    return result


def _pair(
    step: Step, tap: str, locator: Locator, result: Propagation
) -> tuple[Rows, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Find the expected rows of a step's tap; rows that the other side lacks are left out."""
    rows, ours = step_rows(step, tap), step.tap(tap)
    found = locator.find(tap, rows)
    present = found[:, 0] >= 0
    if not bool(present.any()):
        return None
    if not bool(present.all()):
        rows, found, ours = rows.select(present), found[present], ours[present]
    theirs = locator.gather(tap, found)
    if ours[0].numel() != theirs[0].numel():
        if not any(finding.tap == tap for finding in result.findings):
            result.findings.append(_shape_finding(tap, ours, theirs, rows))
        return None
    return rows, found, ours.flatten(1), theirs.flatten(1)


def _shape_finding(tap: str, ours: torch.Tensor, theirs: torch.Tensor, rows: Rows) -> Finding:
    message = f"shape of {tap} differs: expected {tuple(theirs.shape[1:])}, actual {tuple(ours.shape[1:])} per row"
    return Finding(
        code=Code.TAP_MISMATCH, message=message, tap=tap, request=int(rows.request[0]), position=int(rows.position[0])
    )


def _noise(noise: torch.Tensor | None, found: torch.Tensor, otherwise: float) -> torch.Tensor:
    if noise is None:
        return torch.full((len(found),), otherwise, dtype=torch.float64)
    rows = noise[found[:, 2]].to(torch.float64)
    # A row where HF happened to be exact says nothing about what rounding may do: the tap's median is the least.
    return rows.clamp(min=float(noise.nanmedian()))


def _release_if_large(recording: Recording, step: Step) -> None:
    """Keep the mapped pages of the other side from piling up."""
    if step.entry.num_bytes > 64 << 20:
        recording.release()


def _joined(part: _Parts) -> PropagatedErrors:
    metrics = RowMetrics.concat(part.metrics)
    error, noise = metrics.relative_l2, torch.cat(part.noise)
    ratio = torch.where((error == 0) & (noise == 0), 0.0, error / noise)
    return PropagatedErrors(rows=Rows.concat(part.rows), metrics=metrics, ratio=ratio)


def _logit_result(parts: list[torch.Tensor]) -> LogitResult | None:
    if not parts:
        return None
    agreement, kl, margin = torch.cat(parts, dim=1)
    return LogitResult(
        num_rows=len(kl), top1_agreement=float(agreement.mean()), kl_max=float(kl.max()), margin_min=float(margin.min())
    )
