"""States of recurrences and convolutions, sound and with faults in the cache, over tiny models of many families.

python -m tests.families.states [--dtypes float32,bfloat16] [--no-faults | --no-sound] [--only FAULT] [FAMILY ...]

The engine is HF through its own cache. A fault changes what the cache holds after a piece of tokens, or what is
restored from a snapshot, and nothing of the model.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate

from harness.engines.hf import HFEngine
from harness.errors import HarnessError
from harness.extensions.faults.zoo.models import save, tokens
from harness.extensions.faults.zoo.quiet import quiet
from harness.formats.case import RequestSpec
from harness.formats.recording import Recording
from harness.formats.schedule import Schedule
from harness.judge.compare import compare_run
from harness.judge.compare.coverage import Requirements
from harness.judge.compare.run import Comparison
from harness.judge.explain import explain_run
from harness.judge.jobs.opened import record_run, with_duplicate_requests
from harness.oracle.decode import HFDecoder
from harness.oracle.make_golden import make_golden
from harness.oracle.model import HFModel, load_model
from harness.plan import plan_request
from harness.results.check import Outcome, RunResult

FAMILIES = (
    "mamba", "mamba2", "falcon_mamba", "falcon_h1", "qwen3_next", "jamba", "bamba", "lfm2", "granitemoehybrid",
    "zamba2", "olmo_hybrid", "qwen3_5", "kimi_linear",
)  # fmt: skip
SCHEDULES = ("plain", "chunked", "batched", "prefix-hit", "forked", "preempted", "rewound", "speculative")
PROMPT_LENGTHS, NUM_NEW = (40, 17), 12
_Held = list[torch.Tensor]


def held(decoder: HFDecoder, *names: str) -> _Held:
    """Return the states of the cache, of all layers: of `conv`, `recurrent`, or both."""
    layers = [layer for cache in decoder.cache.values() for layer in cache.layers]
    states = [item for layer in layers for name in names or ("conv", "recurrent") for item in _of(layer, name)]
    return [item for item in states if isinstance(item, torch.Tensor)]


def _of(layer: Any, name: str) -> list[Any]:
    return list(getattr(layer, f"{name}_states", {}).values())


class Faulty(HFDecoder):
    """A decoder whose cache is changed after pieces of tokens; `log` lists what each request has fed."""

    num_opened = 0
    left: "Faulty | None" = None
    """The decoder of the request before."""

    def __enter__(self) -> "Faulty":
        self.pieces, self.numbers = list[int](), Faulty.num_opened
        Faulty.num_opened += 1
        self.verified: _Held | None = None
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Faulty.left = self
        super().__exit__(*error)

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        before = [item.clone() for item in held(self)]
        logits = super().feed(ids, **options)
        self.pieces.append(len(ids[0]))
        self.after_piece(before)
        return logits

    def after_piece(self, before: _Held) -> None:
        """Change the cache; `before` is what it held before the piece."""


def zero_after_restore(*names: str) -> type[Faulty]:
    class Zero(Faulty):
        def restore(self, snapshot: Any) -> None:
            super().restore(snapshot)
            for item in held(self, *names):
                item.zero_()

    return Zero


class OthersSnapshot(Faulty):
    """What is restored is what another prompt left."""

    first: Any = None

    def restore(self, snapshot: Any) -> None:
        super().restore(snapshot)
        if type(self).first is None:
            type(self).first = [item.clone() for item in held(self)]
        else:
            _put(held(self), type(self).first)


def _put(states: _Held, values: Sequence[torch.Tensor]) -> None:
    for state, value in zip(states, values, strict=True):
        state.copy_(value)


class EarlierSnapshot(Faulty):
    """The states of a snapshot are those of one position before; keys and values are right."""

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        self.begin = [list(row) for row in ids] if not self.pieces else self.begin
        return super().feed(ids, **options)

    def snapshot(self) -> Any:
        kept = super().snapshot()
        with HFDecoder(self._hf) as shorter:
            shorter.feed([row[:-1] for row in self.begin])
        layers = [layer for cache in kept.cache.values() for layer in cache.layers]
        states = [item for layer in layers for name in ("conv", "recurrent") for item in _of(layer, name)]
        _put([state for state in states if isinstance(state, torch.Tensor)], held(shorter))
        return kept


def at_piece(number: int, change: Callable[[_Held, _Held], None], *names: str, from_on: bool = False) -> type[Faulty]:
    """Change the states after one piece, or after all from it on."""

    class Changed(Faulty):
        def after_piece(self, before: _Held) -> None:
            is_due = len(self.pieces) - 1 >= number if from_on else len(self.pieces) - 1 == number
            if is_due and before:
                wanted = {id(item) for item in held(self, *names)}
                pairs = [(s, b) for s, b in zip(held(self), before, strict=True) if id(s) in wanted]
                change([s for s, _ in pairs], [b for _, b in pairs])

    return Changed


def zero(states: _Held, _before: _Held) -> None:
    for state in states:
        state.zero_()


class ZeroAfterFirst(Faulty):
    """The states after the first piece are lost."""

    names: tuple[str, ...] = ()

    def after_piece(self, before: _Held) -> None:
        if len(self.pieces) == 1:
            zero(held(self, *self.names), before)


def zero_after_first(*names: str) -> type[Faulty]:
    return type("ZeroAfterFirst", (ZeroAfterFirst,), {"names": names})


class Late(Faulty):
    """After each step of decode the states are those of before it."""

    def after_piece(self, before: _Held) -> None:
        shown = [item.clone() for item in held(self)]
        if len(self.pieces) > 1 and hasattr(self, "shown"):
            _put(held(self), self.shown)
        self.shown = shown


class Twice(Faulty):
    """One step of decode is computed twice, as far as the states go."""

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        logits = super().feed(ids, **options)
        if len(self.pieces) == 4:
            kept = deepcopy(self.cache)
            HFDecoder.feed(self, ids, **options)
            twice = [item.clone() for item in held(self)]
            self.cache = kept
            _put(held(self), twice)
        return logits


class KeepsDrafts(Faulty):
    """After going back, the states are those with the drafts."""

    def restore(self, snapshot: Any) -> None:
        self.verified = [item.clone() for item in held(self)]
        super().restore(snapshot)

    def after_piece(self, before: _Held) -> None:
        if self.verified is not None:
            _put(held(self), self.verified)
            self.verified = None


class SeesPadding(Faulty):
    """No mask reaches the model: rows of padding enter the states."""

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        if len(ids) > 1:  # of one alone the engine asks whether a mask has an effect
            options.pop("attention_mask", None)
        return super().feed(ids, **options)


class SwapsRequests(Faulty):
    """After the prompts the states of two requests are exchanged."""

    def after_piece(self, before: _Held) -> None:
        if len(self.pieces) == 1:
            for item in held(self):
                item.copy_(item.flip(0).clone())


class NotCleared(Faulty):
    """A request begins with the states that the one before left."""

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        if not self.pieces and Faulty.left is not None and self.cache:
            for cache, left_cache in zip(self.cache.values(), Faulty.left.cache.values(), strict=True):
                for layer, theirs in zip(cache.layers, left_cache.layers, strict=True):
                    for name, value in vars(theirs).items():
                        if "conv" in name or "recurrent" in name or name in ("has_previous_state", "dtype", "device"):
                            setattr(layer, name, deepcopy(value))
        return super().feed(ids, **options)


class NotClearedAgain(Faulty):
    """A request that is computed again begins with the states that it had when it was preempted."""

    lane = 1

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        left = Faulty.left
        if not self.pieces and left is not None and self.cache and all(len(item) > 1 for item in held(left)):
            for cache, left_cache in zip(self.cache.values(), left.cache.values(), strict=True):
                for layer, theirs in zip(cache.layers, left_cache.layers, strict=True):
                    for name, value in vars(theirs).items():
                        if name in ("conv_states", "recurrent_states"):
                            left_states = {
                                at: item[self.lane :][:1].clone() for at, item in value.items() if item is not None
                            }
                            setattr(layer, name, {**value, **left_states})
                        elif "conv" in name or "recurrent" in name or name in ("has_previous_state", "dtype", "device"):
                            setattr(layer, name, deepcopy(value))
        return super().feed(ids, **options)

    def after_piece(self, before: _Held) -> None:
        if len(self.pieces) == self.num_before:
            self.cache_when_lost = deepcopy(self.cache)

    def __exit__(self, *error: Any) -> None:
        self.cache = getattr(self, "cache_when_lost", self.cache)
        super().__exit__(*error)

    num_before: int | None = 1 + (NUM_NEW - 1) // 2
    """Pieces before a request is preempted: its prompt, and half of its decode; None for all of the batch."""


def forked_with(change: Callable[[_Held, int], None], *names: str) -> type[Faulty]:
    """Change the states of the forks, which come after their originals."""

    class Forked(Faulty):
        def take_lanes(self, lanes: Sequence[int]) -> None:
            super().take_lanes(lanes)
            change(held(self, *names), len(lanes) // 2)

    return Forked


def forks_zero(states: _Held, num: int) -> None:
    for state in states:
        state[num:] = 0


def forks_exchanged(states: _Held, num: int) -> None:
    for state in states:
        state[num:] = state[:num].flip(0).clone()


class SharedWithFork(Faulty):
    """An original and its fork have one place for their states: what the fork writes is what both go on from."""

    num = 0

    def take_lanes(self, lanes: Sequence[int]) -> None:
        super().take_lanes(lanes)
        self.num = len(lanes) // 2

    def after_piece(self, before: _Held) -> None:
        for item in held(self) if self.num else ():
            item[: self.num] = item[self.num :].clone()


class ForkedLate(Faulty):
    """A fork begins with the states of its original one token later than with its keys and values."""

    num = 0

    def take_lanes(self, lanes: Sequence[int]) -> None:
        super().take_lanes(lanes)
        self.num, self.at = len(lanes) // 2, len(self.pieces)

    def after_piece(self, before: _Held) -> None:
        if self.num and len(self.pieces) == self.at + 1:
            early = [item.clone() for item in held(self)]
            again = deepcopy(self.cache)
            HFDecoder.feed(self, self.fed, **self.feed_options)
            late = [item.clone() for item in held(self)]
            self.cache = again
            for state, first, second in zip(held(self), early, late, strict=True):
                state.copy_(torch.cat([first[: self.num], second[self.num :]]))

    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        self.fed, self.feed_options = [list(row) for row in ids], options
        return super().feed(ids, **options)


def scaled(states: _Held, _before: _Held, factor: float = 1.01) -> None:
    for state in states:
        state.mul_(factor)


def exchanged(states: _Held, _before: _Held) -> None:
    for state in states:
        if state.dim() > 2 and state.shape[-1] == state.shape[-2]:
            state.copy_(state.transpose(-1, -2).clone())


def rolled(states: _Held, _before: _Held) -> None:
    for state in states:
        state.copy_(state.roll(1, dims=-1))


def put_back(states: _Held, before: _Held) -> None:
    _put(states, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in what a cache holds."""

    name: str
    schedule: str
    decoder: Callable[[], type[Faulty]]
    says: tuple[str, ...]
    """Parts of causes that are right; none: no cause is known, and none may be asserted."""
    families: tuple[str, ...] = ("falcon_h1", "qwen3_next", "mamba2")


_PURE = ("mamba2", "mamba", "falcon_mamba")
FAULTS = (
    Fault(name="not restored after a hit", schedule="prefix-hit", decoder=zero_after_restore,
          says=("not restored after a hit",), families=("falcon_h1", "qwen3_next", "lfm2", "mamba", "jamba")),
    Fault(name="recurrence not restored", schedule="prefix-hit", decoder=partial(zero_after_restore, "recurrent"),
          says=("restored without the recurrent state",)),
    Fault(name="tail not restored", schedule="prefix-hit", decoder=partial(zero_after_restore, "conv"),
          says=("restored without the tail",)),
    Fault(name="another prompt's snapshot", schedule="prefix-hit", decoder=lambda: type("O", (OthersSnapshot,), {}),
          says=("is the state of request",), families=("falcon_h1", "qwen3_next", "mamba", "lfm2")),
    Fault(name="snapshot a position early", schedule="prefix-hit", decoder=lambda: EarlierSnapshot,
          says=("is the state of position 37",), families=("falcon_h1", "qwen3_next", "mamba", "bamba")),
    Fault(name="lost at the end of a chunk", schedule="chunked", decoder=zero_after_first,
          says=("is zero", "begins with zero", "from one step to the next"),
          families=("falcon_h1", "qwen3_next", "bamba", "lfm2")),
    Fault(name="tail lost at the end of a chunk", schedule="chunked", decoder=partial(zero_after_first, "conv"),
          says=("is zero", "tail"), families=("falcon_h1", "qwen3_next", "bamba", "lfm2")),
    Fault(name="recurrence lost at the end of a prompt", schedule="plain",
          decoder=partial(zero_after_first, "recurrent"), says=("is zero",)),
    Fault(name="not updated in decode", schedule="plain", decoder=lambda: at_piece(1, put_back, from_on=True),
          says=("not updated in decode",)),
    Fault(name="one update lost", schedule="plain", decoder=lambda: at_piece(4, put_back),
          says=("is not in it",)),
    Fault(name="a step late", schedule="plain", decoder=lambda: Late,
          says=("a step late",)),
    Fault(name="one row twice", schedule="plain", decoder=lambda: Twice, says=("is in it twice",)),
    Fault(name="rejected drafts stay", schedule="speculative", decoder=lambda: KeepsDrafts,
          says=("rejected drafts are in it",), families=("falcon_h1", "qwen3_next", "bamba", "mamba2", "lfm2")),
    Fault(name="taken-back tokens stay", schedule="rewound", decoder=lambda: KeepsDrafts,
          says=("taken back are in it",), families=("falcon_h1", "qwen3_next", "mamba", "lfm2")),
    Fault(name="padding enters", schedule="batched", decoder=lambda: SeesPadding, says=("padding is in it",),
          families=_PURE),
    Fault(name="requests exchanged", schedule="batched", decoder=lambda: SwapsRequests,
          says=("is the state of request",)),
    Fault(name="another's state at the start", schedule="plain", decoder=lambda: NotCleared,
          says=("begins with what request",), families=("falcon_h1", "qwen3_next", "bamba")),
    Fault(name="not copied to the fork", schedule="forked", decoder=partial(forked_with, forks_zero),
          says=("not copied to the fork",), families=("falcon_h1", "qwen3_next", "mamba2", "lfm2", "jamba")),
    Fault(name="tail not copied to the fork", schedule="forked", decoder=partial(forked_with, forks_zero, "conv"),
          says=("copied to the fork without the tail",)),
    Fault(name="recurrence not copied to the fork", schedule="forked",
          decoder=partial(forked_with, forks_zero, "recurrent"),
          says=("copied to the fork without the recurrent state",)),
    Fault(name="another's copy for the fork", schedule="forked", decoder=partial(forked_with, forks_exchanged),
          says=("is the state of request", "begins with what request"),
          families=("falcon_h1", "qwen3_next", "mamba2", "lfm2")),
    Fault(name="shared with the fork", schedule="forked", decoder=lambda: SharedWithFork,
          says=("is the state of request",), families=("falcon_h1", "qwen3_next", "mamba", "lfm2", "bamba")),
    Fault(name="forked a token late", schedule="forked", decoder=lambda: ForkedLate, says=("is in it twice",)),
    Fault(name="not cleared when computed again", schedule="preempted", decoder=lambda: NotClearedAgain,
          says=("was not cleared",), families=("falcon_h1", "qwen3_next", "bamba")),
    Fault(name="another's state when computed again", schedule="preempted",
          decoder=lambda: type("L", (NotClearedAgain,), {"lane": 0, "num_before": None}),
          says=("begins with what request",),
          families=("falcon_h1", "qwen3_next", "bamba")),
    Fault(name="scaled by 1.01", schedule="plain", decoder=lambda: at_piece(4, scaled), says=()),
    Fault(name="dimensions exchanged", schedule="plain", decoder=lambda: at_piece(4, exchanged, "recurrent"), says=(),
          families=("falcon_h1", "qwen3_next", "bamba")),
    Fault(name="columns rolled", schedule="plain", decoder=lambda: at_piece(4, rolled, "conv"), says=(),
          families=("falcon_h1", "qwen3_next", "lfm2")),
)  # fmt: skip


@contextmanager
def decoding_with(decoder: type[HFDecoder]) -> Iterator[None]:
    """Let the engine go through another decoder."""
    Faulty.left = None
    with patch("harness.engines.hf.HFDecoder", decoder), patch("harness.engines.hf_batch.HFDecoder", decoder):
        yield


class Subject:
    """A family in a dtype: its golden, and HF as the engine."""

    def __init__(
        self,
        family: str,
        dtype: str,
        folder: Path,
        *,
        lengths: Sequence[int] = PROMPT_LENGTHS,
        num_new: int = NUM_NEW,
        seeds: Sequence[int] = (0, 1),
    ) -> None:
        self.folder, self.dtype, self._num_runs = folder, getattr(torch, dtype), 0
        ids = [tokens(seed=seed, count=n)[0].tolist() for seed, n in zip(seeds, lengths, strict=True)]
        prompts = [RequestSpec(token_ids=identifier) for identifier in ids]
        self.plan = plan_request(
            model=str(folder / family), engine="hf", dtype=dtype, device="cpu", requests=prompts,
            max_new_tokens=num_new, schedules=list(SCHEDULES), local_files_only=True,
        )  # fmt: skip
        self.oracle: HFModel = load_model(self.plan.folder, dtype=self.dtype, stays=True)
        self.golden = make_golden(self.oracle, self.plan.prompts, folder / f"golden-{dtype}")

    def check(self, schedule: str, decoder: type[HFDecoder] = HFDecoder, *, explains: bool = True) -> RunResult:
        """Run the engine under a schedule and compare it with the golden."""
        (parsed,) = [item for item in self.plan.schedules if item == Schedule.of(schedule)]
        engine = HFEngine(load_model(self.plan.folder, dtype=self.dtype, stays=True), None)
        engine.match_taps(self.oracle.graph)
        self._num_runs += 1
        out = self.folder / f"run-{self.plan.case.dtype}-{self._num_runs}"
        golden, copies = with_duplicate_requests(self.plan, self.golden, parsed, self.oracle)
        with decoding_with(decoder):
            record_run(self.plan, engine, parsed, golden.requests[: len(self.plan.prompts)], out, copies=copies)
        with Recording.open(out, verify=False) as actual:
            wanted = engine.capabilities.wanted(self.oracle.graph)
            required = Requirements(wanted=wanted, require=parsed.requires)
            comparison = compare_run(actual, golden, hf=self.oracle, requirements=required)
            if not explains:
                return comparison.result
            return explain_run(_first_alone(comparison), actual, golden, self.oracle)


def _first_alone(comparison: Comparison) -> Comparison:
    """Leave out findings but the first operation's and those of states: explanations of scans take long."""
    run = comparison.result
    first = None if run.first_divergence is None else run.first_divergence.tap
    kept = [finding for finding in run.findings if finding.tap and (finding.tap == first or "_state" in finding.tap)]
    return replace(comparison, result=replace(run, findings=tuple(kept[:4])))


@contextmanager
def subject(family: str, dtype: str) -> Iterator[Subject]:
    """Build a family, write it, and open it as a subject."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        save(family, Path(folder) / family)
        yield Subject(family, dtype, Path(folder))


def states_of(run: RunResult) -> tuple[int, int, float]:
    """Return how many rows of states were judged, how many were wrong, and the largest share of a bound."""
    taps = [tap for tap in run.taps if "_state" in tap.name]
    worst = max((tap.local_bound_share_max or 0.0 for tap in taps), default=0.0)
    return sum(tap.num_rows for tap in taps), sum(tap.num_bad_rows for tap in taps), worst


def sound_rows(family: str, dtype: str, schedules: Sequence[str]) -> Iterator[list[object]]:
    """Yield a row for each schedule of a sound run."""
    with subject(family, dtype) as opened:
        for schedule in schedules:
            try:
                run = opened.check(schedule, explains=False)
            except HarnessError as error:
                yield [family, dtype, schedule, "refused", "", "", "", " ".join(error.what.split())[:90]]
                continue
            rows, wrong, worst = states_of(run)
            first = "" if run.first_divergence is None else f"first wrong: {run.first_divergence.tap}"
            word = "pass" if run.outcome is Outcome.PASS else "alarm" if wrong else "other"
            yield [family, dtype, schedule, word, rows, wrong, f"{worst:.2f}", first]


def fault_row(opened: Subject, family: str, dtype: str, fault: Fault) -> list[object]:
    """Plant a fault and say what was found of it."""
    run = opened.check(fault.schedule, fault.decoder())
    findings = [finding for finding in run.findings if finding.tap and "_state" in finding.tap]
    first = run.first_divergence
    is_local = first is not None and "_state" in first.tap
    causes = [
        finding.explanation.cause
        for finding in findings
        if finding.explanation is not None and finding.explanation.is_cause
    ]
    explanation = first.explanation if first is not None else None
    said = explanation.cause if explanation is not None and explanation.is_cause else ""
    is_right = bool(fault.says) and any(word in said for word in fault.says)
    others = [cause for cause in causes if not any(word in cause for word in fault.says)]
    word = "named" if is_right else "wrong name" if said else "not named"
    return [
        family,
        dtype,
        fault.name,
        "yes" if findings else "no",
        "yes" if is_local else "no",
        word,
        said,
        len(others),
    ]


def main(arguments: Sequence[str]) -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("families", nargs="*", default=[])
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--no-sound", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args(arguments)
    dtypes = options.dtypes.split(",")
    if not options.no_sound:
        heads = ["family", "dtype", "schedule", "result", "rows of states", "wrong", "largest share of a bound", "note"]
        rows = [
            _shown(row)
            for family in options.families or FAMILIES
            for dtype in dtypes
            for row in sound_rows(family, dtype, options.schedules.split(","))
        ]
        sys.stdout.write(tabulate(rows, heads, tablefmt="pipe", disable_numparse=True) + "\n\n")
    if not options.no_faults:
        heads = ["family", "dtype", "fault", "detected", "at a state first", "first cause", "said", "other causes"]
        wanted = [fault for fault in FAULTS if options.only in fault.name]
        families = options.families or list(dict.fromkeys(name for fault in wanted for name in fault.families))
        rows = []
        for family in families:
            for dtype in dtypes:
                with subject(family, dtype) as opened:
                    applicable = [fault for fault in wanted if family in fault.families]
                    rows += [_shown(fault_row(opened, family, dtype, fault)) for fault in applicable]
        sys.stdout.write(tabulate(rows, heads, tablefmt="pipe", disable_numparse=True) + "\n\n")


def _shown(row: list[object]) -> list[object]:
    sys.stderr.write(f"  {' | '.join(map(str, row))}\n")
    return row


if __name__ == "__main__":
    main(sys.argv[1:])
