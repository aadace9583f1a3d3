"""The same recordings judged as others judge: on layer outputs and logits, against HF, with a tolerance.

Each rule is applied to every row of every layer's output and of the logits, and stops at the first tap that fails. What
the published rule says of whole tensors is said here of rows, which is sharper.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from harness.base.metrics import row_metrics
from harness.formats.recording import Recording
from harness.formats.taps import LOGITS
from harness.judge.compare.align import Locator, match_requests, step_rows
from harness.oracle.golden import Golden
from harness.results.check import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerVerdict:
    """Whether a rule alarms, and at which tap and row first."""

    is_alarm: bool
    tap: str | None = None
    request: int | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """Rows of one tap of one step: [rows, width] float64 each, and HF's own relative error [rows]."""

    actual: torch.Tensor
    expected: torch.Tensor
    noise: torch.Tensor


def _allclose(tolerance: float) -> Callable[[_Pair], torch.Tensor]:
    return lambda pair: torch.isclose(pair.actual, pair.expected, rtol=tolerance, atol=tolerance).all(dim=1)


def _cosine(pair: _Pair) -> torch.Tensor:
    return torch.cosine_similarity(pair.actual, pair.expected, dim=1) >= 0.99


def _sglang(pair: _Pair) -> torch.Tensor:
    """1 - 2xy / (xx + yy) <= 1e-3."""
    squares = pair.actual.square().sum(dim=1) + pair.expected.square().sum(dim=1)
    return 1 - 2 * (pair.actual * pair.expected).sum(dim=1) / squares <= 1e-3


def _msprobe(pair: _Pair) -> torch.Tensor:
    """Cosine over 0.99 and largest difference under 0.001."""
    largest = (pair.actual - pair.expected).abs().amax(dim=1)
    return _cosine(pair) & (largest < 1e-3)


def _flash_attention(pair: _Pair) -> torch.Tensor:
    """At most twice the error of HF in the same dtype; of a norm here, where theirs is of the largest element."""
    return row_metrics(pair.actual, pair.expected).relative_l2 <= 2 * pair.noise


RULES: Mapping[str, Callable[[_Pair], torch.Tensor]] = {
    "allclose 1e-2": _allclose(1e-2),
    "allclose 1e-3": _allclose(1e-3),
    "cosine 0.99": _cosine,
    "SGLang rel 1e-3": _sglang,
    "msprobe": _msprobe,
    "FlashAttention 2x": _flash_attention,
}
TOKENS = "greedy tokens"
"""Equality of the tokens: the one rule that needs no tensors."""


def judge_as_peers(actual: Recording, golden: Golden, run: RunResult) -> dict[str, PeerVerdict]:
    """Return every rule's verdict on one recording."""
    expected = Locator(golden.recording, match_requests(golden.recording, actual))
    verdicts: dict[str, PeerVerdict] = {}
    for tap in _judged_taps(actual):
        for name, verdict in _judge_tap(tap, actual, expected, golden.noise).items():
            verdicts.setdefault(name, verdict)
    judged = {name: verdicts.get(name, PeerVerdict(is_alarm=False)) for name in RULES}
    differs = run.tokens.equal < run.tokens.compared
    return {**judged, TOKENS: PeerVerdict(is_alarm=differs, tap=LOGITS if differs else None)}


def _judged_taps(actual: Recording) -> list[str]:
    names = [entry.name for entry in actual.manifest.taps]
    layers = sorted((name for name in names if name.endswith(".output")), key=lambda name: int(name.split(".")[2]))
    return [*layers, LOGITS]


def _judge_tap(
    tap: str, actual: Recording, expected: Locator, noise: Mapping[str, torch.Tensor]
) -> dict[str, PeerVerdict]:
    """Return the alarms of all rules on one tap, each at its first row by request and position."""
    failing: dict[str, list[tuple[int, int]]] = {}
    for step in actual.steps:
        if not step.has(tap):
            continue
        rows = step_rows(step, tap)
        places = expected.find(tap, rows)
        present = places[:, 0] >= 0
        if not bool(present.any()):
            continue
        rows, places = rows.select(present), places[present]
        pair = _Pair(
            step.tap(tap)[present].flatten(1).to(torch.float64),
            expected.gather(tap, places).flatten(1).to(torch.float64),
            noise[tap][places[:, 2]].to(torch.float64).clamp(min=float(noise[tap].nanmedian())),
        )
        for name, rule in RULES.items():
            for at in (~rule(pair)).nonzero()[:, 0].tolist():
                failing.setdefault(name, []).append((int(rows.request[at]), int(rows.position[at])))
    first = {name: min(rows) for name, rows in failing.items()}
    return {
        name: PeerVerdict(is_alarm=True, tap=tap, request=request, position=position)
        for name, (request, position) in first.items()
    }
