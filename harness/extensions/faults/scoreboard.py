"""The harness's own score: what it found of the faults, where, why, and what it cried wolf at."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.base.progress import Progress
from harness.errors import Code, HarnessError
from harness.extensions.faults.fault import Fault, Variant
from harness.extensions.faults.peers import RULES, TOKENS
from harness.extensions.faults.trial import FaultTrial, try_fault, try_variant
from harness.results.check import Divergence, Explanation, Finding, RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScore:
    """The score of one fault."""

    fault: Fault
    detected: bool
    localised: bool
    """The first alarm is at the true tap and row; or the engine raised if that is the truth."""
    named: bool
    named_wrongly: bool
    """A cause is asserted, and it is not the true one."""
    first: Divergence | Finding | None
    error: str | None
    """The error that the engine raised."""
    explanation: Explanation | None
    peers: dict[str, tuple[bool, bool]]
    """Other people's rules: detected, and in the right layer first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantScore:
    """The score of one benign run."""

    variant: Variant
    seed: int
    is_alarm: bool
    message: str
    """Of the first finding."""
    peers: dict[str, bool]
    """Alarms of other people's rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Everything that was tried."""

    faults: list[FaultScore]
    variants: list[VariantScore]
    seconds: float
    equivalent: list[Fault] = field(default_factory=list)
    """Faults that nothing can show; they are not counted."""

    @property
    def detected(self) -> int:
        """Faults with any alarm."""
        return sum(score.detected for score in self.faults)

    @property
    def localised(self) -> int:
        """Faults found first where they are."""
        return sum(score.localised for score in self.faults)

    @property
    def named(self) -> int:
        """Faults whose cause is said."""
        return sum(score.named for score in self.faults)

    @property
    def named_wrongly(self) -> int:
        """Faults of which a cause is asserted that is not theirs."""
        return sum(score.named_wrongly for score in self.faults)

    @property
    def false_alarms(self) -> int:
        """Benign runs with an alarm."""
        return sum(score.is_alarm for score in self.variants)


def keep_score(
    faults: Sequence[Fault],
    variants: Iterable[Variant] = (),
    *,
    seeds: int = 1,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Score:
    """Try every fault once, and every variant with each of `seeds` sets of prompts, with the engine on a device."""
    report = progress or (lambda _label, _done, _total: None)
    begin = time.perf_counter()
    counted = [fault for fault in faults if not fault.equivalent]
    benign = [(variant, seed) for variant in variants for seed in range(seeds)]
    total = len(counted) + len(benign)
    fault_scores, variant_scores = [], []
    for index, fault in enumerate(counted):
        report(f"faults: {fault.id}", index, total)
        fault_scores.append(score_fault(fault, try_fault(fault, device=device)))
    for index, (variant, seed) in enumerate(benign):
        report(f"faults: variant {variant.id}", len(counted) + index, total)
        variant_scores.append(_score_variant(variant, seed, device))
    report("done", total, total)
    return Score(
        faults=fault_scores,
        variants=variant_scores,
        seconds=time.perf_counter() - begin,
        equivalent=[fault for fault in faults if fault.equivalent],
    )


def score_fault(fault: Fault, trial: FaultTrial) -> FaultScore:
    """Hold what was said of a fault against the truth.

    Raises:
        HarnessError: INTERNAL: the planted code never ran, so that nothing was tried.
    """
    if trial.num_calls == 0:
        what = f"the fault {fault.id} was never reached: it proves nothing"
        raise HarnessError(Code.INTERNAL, what, where="harness.extensions.faults", hint="correct its setting")
    if trial.error is not None:
        message = str(trial.error)
        return FaultScore(
            fault=fault,
            detected=fault.tap is None,  # where an operation is expected, an exception is the planted code's own
            localised=fault.tap is None,
            named=fault.tap is None and _says(fault.cause, message),
            named_wrongly=False,
            first=None,
            error=message.splitlines()[0],
            explanation=None,
            peers=dict.fromkeys((*RULES, TOKENS), (fault.suite is None,) * 2),
        )
    if trial.result is None:
        nothing = dict.fromkeys((*RULES, TOKENS), (False, False))
        return FaultScore(
            fault=fault, detected=False, localised=False, named=False, named_wrongly=False, first=None, error=None,
            explanation=None, peers=nothing,
        )  # fmt: skip
    (run,) = trial.result.runs
    first = _first(run)
    explanation = first.explanation if first else None
    asserts = explanation is not None and explanation.is_cause
    named = explanation is not None and asserts and _says(fault.cause, _text(explanation))
    return FaultScore(
        fault=fault,
        detected=trial.is_alarm,
        localised=first is not None and first.tap == fault.tap and (first.request, first.position) == fault.row,
        named=named,
        named_wrongly=asserts and not named,
        first=first,
        error=None,
        explanation=explanation,
        peers={name: (peer.is_alarm, _same_layer(peer.tap, fault.tap)) for name, peer in trial.peers.items()},
    )


def _first(run: RunResult) -> Divergence | Finding | None:
    """The first operation that is wrong; where none is, the first finding that is about one."""
    if run.first_divergence is not None:
        return run.first_divergence
    return next((finding for finding in run.findings if finding.tap is not None), None)


def _text(explanation: Explanation) -> str:
    """The statement of a cause, without the rows."""
    return f"{explanation.cause}; {explanation.detail}"


def _says(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _same_layer(found: str | None, truth: str | None) -> bool:
    """Whether a tap is of the layer of the truth; what comes after the layers is one by itself."""

    def layer(tap: str) -> str:
        return ".".join(tap.split(".")[:3]) if tap.startswith("model.layers.") else tap

    if found is None or truth is None:
        return False
    return layer(found) == layer("model.layers.0" if truth == "model.embed_tokens" else truth)


def _score_variant(variant: Variant, seed: int, device: str) -> VariantScore:
    trial = try_variant(variant, seed=seed, device=device)
    findings = trial.result.runs[0].findings if trial.result else ()
    message = str(trial.error) if trial.error else findings[0].message if findings else ""
    return VariantScore(
        variant=variant,
        seed=seed,
        is_alarm=trial.is_alarm,
        message=message.splitlines()[0] if message else "",
        peers={name: peer.is_alarm for name, peer in trial.peers.items()},
    )
