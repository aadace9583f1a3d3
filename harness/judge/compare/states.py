"""Compare states that were read back from a cache with those that HF's own forward leaves after the same rows.

The truth after a position is the state that one forward over exactly the rows up to it leaves, with every recorded
value put back: HF itself is wrong where it continues from a state with several rows (docs/models.md). Forwards of one
length run together, in high precision and as the control.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from harness.base.metrics import rounding_unit, row_errors
from harness.formats.recording import Recording, RequestInfo
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Prefixes, Rows, all_rows, is_readback, step_rows
from harness.judge.compare.batch import make_batches
from harness.judge.compare.bounds import CONTROL_FACTOR, UNRECORDED_FACTOR, control_bound
from harness.judge.compare.evidence import Evidence
from harness.judge.compare.local import LocalJudgement, OrderOfSums, control_arithmetic, with_fewer_bad
from harness.judge.compare.replay import Judge, Replay
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.sequences import NOWHERE, RowSequence
from harness.judge.compare.shapes import engine_dtype, keeps_one_less
from harness.oracle.caches import held_states
from harness.oracle.model import HFModel
from harness.oracle.paired import run_pair
from harness.oracle.requests import batch_tokens
from harness.oracle.scan_order import ScanInAnyChunks

_MOST_PASSES, _LEAST_TOKENS = 4, 2048
"""The truth may run this many times the tokens of the recording for states, and at least this many tokens."""
_MOST_FORWARDS = 12
"""Number of different lengths of the forwards that the truth may run for states."""
_MAX_ROWS, _MAX_ROWS_OF_REQUEST = 6, 2
"""Wrong rows of a state for which a cause is looked for, in all and of one request: each costs further runs."""


@dataclass(frozen=True, slots=True, order=True)
class ReadState:
    """A place where a cache was read."""

    request: int
    position: int
    """The last row that the state has to contain."""
    step: int
    """The step that read it."""


class StateRuns:
    """Runs HF's forward over recorded rows, and returns the states that it leaves."""

    def __init__(self, recording: Recording, hf: HFModel, usable: Collection[str], truth_dtype: torch.dtype) -> None:
        self.recording, self._hf, self._truth_dtype = recording, hf, truth_dtype
        self._judge = Judge(hf.graph, {tap for tap in usable if tap in hf.graph and not hf.graph[tap].is_kept})
        self._steps = [step for step in recording.steps if not is_readback(step)]
        self._known: dict[tuple[object, ...], dict[str, torch.Tensor]] = {}

    @cached_property
    def _with_one_less(self) -> set[str]:
        """Taps of convolutions' states whose engine keeps one column less than HF."""
        return {entry.name for entry in self.recording.taps if keeps_one_less(self._hf.graph, entry)}

    @cached_property
    def prefixes(self) -> Prefixes:
        """The numbers of the tokens up to each row."""
        return Prefixes(self.recording.manifest.requests)

    @cached_property
    def _computed(self) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """All rows in the order in which they were computed, their indices within their steps, and their prefixes."""
        rows = Rows.concat([all_rows(step) for step in self._steps])
        numbers = torch.cat([torch.arange(step.entry.num_rows) for step in self._steps])
        return rows, numbers, self.prefixes.of(rows)

    def rows_of(self, read: ReadState) -> RowSequence:
        """Return the rows that a state has to contain: the request's latest, or rows of others with the same tokens."""
        rows, numbers, prefixes = self._computed
        request = next(item for item in self.recording.manifest.requests if item.id == read.request)
        length = read.position + 1
        step = torch.full((length,), NOWHERE, dtype=torch.int64)
        row = step.clone()
        for is_own in (False, True):
            wanted = (rows.step < read.step) & ((rows.request == read.request) if is_own else True)
            number = torch.full((self.prefixes.count,), NOWHERE, dtype=torch.int64)
            at = wanted.nonzero()[:, 0]
            number[prefixes[at]] = at
            latest = number[self.prefixes.up_to(read.request, length)]
            there = latest >= 0
            step[there], row[there] = rows.step[latest[there]], numbers[latest[there]]
        return RowSequence(request=request, step=step, row=row, is_own=torch.zeros(length, dtype=torch.bool))

    def num_taken_over(self, request: int) -> int:
        """Return the number of rows before the first one that a request computed itself."""
        rows, _, _ = self._computed
        positions = rows.position[rows.request == request]
        return int(positions[0]) if len(positions) else 0

    def last_computed(self, request: int, step: int) -> tuple[int, int]:
        """Return the last position of a request that was computed before a step, and its step; -1 for none."""
        rows, _, _ = self._computed
        computed = rows.select((rows.request == request) & (rows.step < step))
        return (int(computed.position.max()), int(computed.step.max())) if len(computed) else (-1, -1)

    def after(self, sequences: Sequence[RowSequence]) -> list[dict[str, torch.Tensor]]:
        """Return the truth's states after each sequence, flat in float64, by tap."""
        keys = [(*item.token_ids, *item.step.tolist(), *item.row.tolist()) for item in sequences]
        new = {key: sequence for key, sequence in zip(keys, sequences, strict=True) if key not in self._known}
        new_pairs = self.pairs(list(new.values()))
        self._known |= {key: truth for key, (_, truth) in zip(new, new_pairs, strict=True)}
        return [self._known[key] for key in keys]

    def pairs(
        self, sequences: Sequence[RowSequence], order_of_sums: OrderOfSums = nullcontext
    ) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        """Return the control's states after each sequence, and the truth's; see `after` and `control_arithmetic`."""
        by_sequence = list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]()
        place = {id(sequence): at for at, sequence in enumerate(sequences)}
        order = list[int]()
        for length in sorted({len(sequence) for sequence in sequences}):
            same_length = [sequence for sequence in sequences if len(sequence) == length]
            for batch in make_batches(self.recording, same_length, batch_tokens(self._hf)):
                watcher = Replay(self._judge, batch)
                control, truth = run_pair(
                    self._hf,
                    batch.token_ids,
                    watcher,
                    truth_dtype=self._truth_dtype,
                    logit_positions=[0],
                    use_cache=True,
                    control_arithmetic=control_arithmetic(self.recording, order_of_sums),
                )
                by_sequence += zip(
                    *(self._by_tap(cache, len(batch.sequences)) for cache in (control, truth)), strict=True
                )
                order += [place[id(sequence)] for sequence in batch.sequences]
        return [pair for _, pair in sorted(zip(order, by_sequence, strict=True), key=lambda item: item[0])]

    def _by_tap(self, cache: object, num_requests: int) -> list[dict[str, torch.Tensor]]:
        named = self._hf.graph.states
        states = {named[key]: state for key, state in held_states(cache).items() if key in named}
        states |= {tap: state[..., 1:] for tap, state in states.items() if tap in self._with_one_less}
        flat = {tap: state.flatten(1).to("cpu", torch.float64) for tap, state in states.items()}
        return [{tap: state[at] for tap, state in flat.items()} for at in range(num_requests)]


def line_of(runs: StateRuns, read: ReadState) -> list[tuple[int, int, int]]:
    """Return token, step and row of each row that a state has to contain; none for a position before the first."""
    if read.position < 0:
        return []
    sequence = runs.rows_of(read)
    return list(zip(sequence.token_ids, sequence.step.tolist(), sequence.row.tolist(), strict=True))


def sequence_of(line: Sequence[tuple[int, int, int]]) -> RowSequence:
    """Return the sequence of some rows by token, step and row; -1 for rows that were not recorded."""
    tokens, steps, rows = zip(*line, strict=True)
    return RowSequence(
        request=RequestInfo(id=0, token_ids=list(tokens), prompt_length=1),
        step=torch.tensor(steps),
        row=torch.tensor(rows),
        is_own=torch.zeros(len(line), dtype=torch.bool),
    )


def judge_states(runs: StateRuns, graph: Graph, usable: Collection[str]) -> LocalJudgement:
    """Judge the states that were read back, within the budget of the truth."""
    operations = [op for op in graph if op.kind is Kind.STATE and op.tap in usable]
    reads = sorted({item for op in operations for item, _ in states_read(runs.recording, op.tap)})
    if not reads:
        return LocalJudgement()
    chosen = _affordable(reads, runs.recording)
    judged = partial(_judged, runs, graph, usable, operations)
    judgement = judged(chosen)
    if before := _before_the_first(reads, chosen, judgement):
        chosen += before
        judgement = judged(chosen)
    return replace(judgement, left_out=_in_words(set(reads) - set(chosen)))


def _judged(
    runs: StateRuns,
    graph: Graph,
    usable: Collection[str],
    operations: Sequence[Operation],
    reads: Sequence[ReadState],
) -> LocalJudgement:
    """Judge some of the states that were read; those out of bounds also by a control that sums in another order."""
    judgements = list[LocalJudgement]()
    for order_of_sums in (nullcontext, ScanInAnyChunks):
        pairs = dict(zip(reads, runs.pairs([runs.rows_of(read) for read in reads], order_of_sums), strict=True))
        judgements.append(_compared(runs, graph, usable, operations, pairs))
        if not any(errors.num_bad for errors in judgements[-1].errors.values()):
            break
    return with_fewer_bad(judgements)


def _compared(
    runs: StateRuns, graph: Graph, usable: Collection[str], operations: Sequence[Operation], pairs: "_Pairs"
) -> LocalJudgement:
    """Compare the states that were read with those of a truth and its control."""
    errors, evidence, sound = dict[str, LocalErrors](), dict[str, Evidence](), dict[str, Evidence]()
    for operation in operations:
        factor = UNRECORDED_FACTOR if _lacks_inputs(graph, operation, usable) else CONTROL_FACTOR
        known_reads = [(read, value) for read, value in states_read(runs.recording, operation.tap) if read in pairs]
        if known_reads:
            tap_errors = _errors(operation, known_reads, pairs, factor, engine_dtype(runs.recording))
            errors[operation.tap] = tap_errors
            if bool(tap_errors.bad.any()):
                evidence[operation.tap] = _evidence(operation, known_reads, pairs, tap_errors, tap_errors.bad)
            elif operation.site not in {graph[tap].site for tap in sound}:
                latest = torch.zeros_like(tap_errors.bad)
                latest[max(range(len(known_reads)), key=lambda at: known_reads[at][0].step)] = True
                sound[operation.tap] = _evidence(operation, known_reads, pairs, tap_errors, latest)
    return LocalJudgement(errors=errors, evidence=evidence, sound=sound)


def _before_the_first(
    reads: Sequence[ReadState], judged: Collection[ReadState], judgement: LocalJudgement
) -> list[ReadState]:
    """Return the reads between the last right state and the first wrong one that were left out."""
    steps = [int(error.rows.step[error.bad].min()) for error in judgement.errors.values() if bool(error.bad.any())]
    if not steps:
        return []
    right = [read.step for read in judged if read.step < min(steps)]
    left_out = [read for read in reads if read not in judged and max(right, default=-1) < read.step < min(steps)]
    return left_out[:_MOST_FORWARDS]


def states_read(recording: Recording, tap: str) -> Iterator[tuple[ReadState, torch.Tensor]]:
    """Yield each place where a state was read, and what was read, flat."""
    for step in recording.steps:
        if is_readback(step) and step.has(tap):
            rows = step_rows(step, tap)
            for (request, position), value in zip(rows.places(), step.tap(tap).flatten(1), strict=True):
                yield ReadState(request, position, step.index), value


def _affordable(reads: Sequence[ReadState], recording: Recording) -> list[ReadState]:
    """Choose reads within the budget: ends of requests, then of chunks of prompts, then decode steps, spread."""
    requests = {request.id: request for request in recording.manifest.requests}
    budget = max(_LEAST_TOKENS, _MOST_PASSES * sum(len(request.token_ids) for request in requests.values()))
    ends = [item for item in reads if item.position == len(requests[item.request].token_ids) - 1]
    chunks = [item for item in reads if item.position < requests[item.request].prompt_length]
    others = [reads[at] for at in sorted(range(len(reads)), key=_spread_key)]
    order = dict.fromkeys([*ends, *chunks, *others])
    chosen, lengths = list[ReadState](), set[int]()
    for read in order:
        is_new = read.position not in lengths
        if not chosen or (budget >= read.position + 1 and len(lengths) + is_new <= _MOST_FORWARDS):
            chosen.append(read)
            lengths.add(read.position)
            budget -= read.position + 1
    return sorted(chosen)


def _spread_key(at: int) -> int:
    """Return a key that sorts numbers so that the first ones are far apart: their bits in reverse order."""
    return int(f"{at:032b}"[::-1], 2)


def _in_words(left_out: Collection[ReadState]) -> tuple[str, ...]:
    """Return the positions of each request as text: `request 0: 41, 43 to 47`."""
    words = []
    for request in sorted({read.request for read in left_out}):
        positions = sorted({read.position for read in left_out if read.request == request})
        firsts = [at for at in positions if at - 1 not in positions]
        lasts = [at for at in positions if at + 1 not in positions]
        runs = (f"{a}" if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True))
        words.append(f"request {request}: {', '.join(runs)}")
    return tuple(words)


def _lacks_inputs(graph: Graph, operation: Operation, usable: Collection[str]) -> bool:
    """Whether HF computes a state through operations before its mixer that the engine did not record."""
    first = next(op for op in graph if f"{op.module}.".startswith(f"{operation.module}."))
    return first.tap not in usable and not set(operation.inputs) <= set(usable)


_Pairs = Mapping[ReadState, tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]]


def _errors(
    operation: Operation,
    reads: Sequence[tuple[ReadState, torch.Tensor]],
    pairs: _Pairs,
    factor: float,
    dtype: torch.dtype,
) -> LocalErrors:
    actual = torch.stack([value for _, value in reads])
    control, truth = (torch.stack([pairs[read][side][operation.tap] for read, _ in reads]) for side in (0, 1))
    unit = rounding_unit(dtype)
    errors = row_errors(actual, truth) / unit
    # Where the rows before it are not finite, the truth is not either: such a state cannot be judged.
    roundings = torch.where(errors.isnan() & truth.isfinite().all(dim=1), torch.inf, errors)
    noise = row_errors(control, truth) / unit
    bound = control_bound(noise, dtype, truth, factor=factor)
    return LocalErrors(
        rows=Rows(
            request=torch.tensor([read.request for read, _ in reads]),
            position=torch.tensor([read.position for read, _ in reads]),
            step=torch.tensor([read.step for read, _ in reads]),
        ),
        roundings=roundings,
        bound=bound,
        dtype=dtype,
        control=noise,
        is_bounded_by_control=True,
    )


def _evidence(
    operation: Operation,
    reads: Sequence[tuple[ReadState, torch.Tensor]],
    pairs: _Pairs,
    errors: LocalErrors,
    mask: torch.Tensor,
) -> Evidence:
    """Keep the first rows of a mask of some requests, in the order in which they were read."""
    wrong = mask.nonzero()[:, 0]
    kept = list[int]()
    for at in wrong[errors.rows.step[wrong].argsort(stable=True)].tolist():
        of_request = sum(reads[item][0].request == reads[at][0].request for item in kept)
        if of_request < _MAX_ROWS_OF_REQUEST and len(kept) < _MAX_ROWS:
            kept.append(at)
    chosen = torch.tensor(kept)
    expected = torch.stack([pairs[reads[at][0]][1][operation.tap] for at in chosen.tolist()])
    assert errors.dtype is not None
    return Evidence(
        operation=operation,
        rows=errors.rows.select(chosen),
        expected=expected,
        inputs=[expected],
        roundings=errors.roundings[chosen],
        bound=errors.bound[chosen],
        dtype=errors.dtype,
    )
