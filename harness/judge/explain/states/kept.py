"""Ways in which a state that was read back is not the one after its position: other rows are in it than should be.

Each way names the rows that would be in the state. HF's forward over these rows, every recorded value put back, gives
what the state would then be; so what it is, is found by its content.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from harness.base.metrics import rounding_unit, row_errors
from harness.formats.schedule import ScheduleKind
from harness.formats.taps import Kind
from harness.judge.compare.states import ReadState, StateRuns, line_of, sequence_of, states_read
from harness.judge.explain.core.drafts import GivenUp, given_up
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, gathered

_MOST_SHIFT = 3
_MOST_OTHERS = 4
"""Other requests whose states are looked at."""
_KEPT = 6
"""Ways that are tried on all wrong rows: those that come nearest on the first one."""
_NEAR = 64.0
"""Roundings within which two states are one and the same."""
Line = list[tuple[int, int, int]]
"""Rows that a state goes over: token, step and row of each; of padding step and row are -1."""
Find = Callable[[ReadState], Line | None]
"""From a place where the state was read to the rows that are in it; None where it is as it should be."""
Way = tuple[str, Find]
"""A way to get a state wrong: its cause, and the rows that are in the state then."""


def other_rows(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what the state would be with other rows in it, for the ways that give the first wrong one.

    Causes: was not restored after a hit: it begins with zero at position *p*; restored without the tail (the
    convolution begins with zero, and the recurrent state was restored), or without the recurrent state; is zero: it was
    never written, or it was cleared; begins with zero at position *p*; is the state of position *q*; position *p* is in
    it twice; is the state of request *n*, position *q*; begins with what request *n* left; rejected drafts, or tokens
    that were taken back, are in it, from position *p* on (and what was computed again after it), or of every step so
    far; is not carried from one step to the next; is a step late; is not updated in decode; padding is in it: rows of
    token *t* before or after the prompt.
    """
    if wrong.states is None:
        return
    known = _Ways(wrong, wrong.states)
    ways = list(known.all())
    if not wrong.can_be_fitted:
        for cause, rows in ways:
            lines = [rows(read) for read in known.reads]
            yield Hypothesis(cause=cause, output=_after(wrong, lines, range(len(lines))))
        return
    outputs = _after(wrong, [rows(known.reads[0]) for _, rows in ways], [0] * len(ways))
    errors = row_errors(wrong.actual[:1].expand_as(outputs), outputs)
    for at in errors.argsort(stable=True)[:_KEPT].tolist():
        if float(errors[at]) <= _NEAR * rounding_unit(wrong.dtype):
            cause, rows = ways[at]
            lines = [rows(read) for read in known.reads]
            yield Hypothesis(cause=cause, output=_after(wrong, lines, range(len(lines))), decisive=known.are_first)


def _after(wrong: WrongOperation, lines: Sequence[Line | None], rows: Sequence[int]) -> torch.Tensor:
    """Return the state after each line, [lines, W] float64; if there is none, the expected state of that row."""
    assert wrong.states is not None
    asked = [at for at, line in enumerate(lines) if line]
    states_after = wrong.states.after([sequence_of(lines[at] or []) for at in asked])
    output = torch.stack([torch.zeros_like(wrong.expected[row]) for row in rows])
    for at, line in enumerate(lines):
        if line is None:
            output[at] = wrong.expected[rows[at]]
    for at, states in zip(asked, states_after, strict=True):
        output[at] = states[wrong.operation.tap]
    return output


class _Ways:
    """The ways that a workload allows: what a state was when it was first wrong, or each time."""

    def __init__(self, wrong: WrongOperation, runs: StateRuns) -> None:
        self._failure, self._runs = wrong, runs
        self._requests = {request.id: request for request in wrong.recording.manifest.requests}
        places = (wrong.rows.request, wrong.rows.position, wrong.rows.step)
        self.reads = [ReadState(*item) for item in zip(*(column.tolist() for column in places), strict=True)]
        self._lines: dict[ReadState, Line] = {}
        self._first: dict[int, ReadState] = {}
        """The first wrong one of each request."""
        for read in self.reads:
            self._first.setdefault(read.request, read)

    @property
    def are_first(self) -> torch.Tensor:
        """[R] bool: the first wrong row of each request."""
        return torch.tensor([self._first[read.request] is read for read in self.reads])

    def all(self) -> Iterator[Way]:
        """Yield every way."""
        for cause, rows in (*self._of_own_rows(), *self._of_others(), *self._with_drafts()):
            yield cause, self._once(rows)
        yield from self._each_time()
        yield from self._with_padding()

    def _once(self, rows: Find) -> Find:
        """Return the way of a state that was wrong once, and went on from there with each row that followed."""

        def going_on(read: ReadState) -> Line | None:
            first = self._first[read.request]
            begun = rows(first) if read.position >= first.position else None
            return None if begun is None else [*begun, *self._expected_rows(read)[first.position + 1 :]]

        return going_on

    def _of_own_rows(self) -> Iterator[Way]:
        first = self.reads[0]
        at, hit, begin = first.position, self._hit(first), self._begin(first)
        lost = "is zero: it was never written, or it was cleared" if hit != at + 1 else self._not_restored(hit)
        yield lost, lambda read: []
        if 0 < hit <= at:
            yield self._not_restored(hit), lambda read: self._expected_rows(read)[self._hit(read) :]
        if begin:
            yield f"begins with zero at position {begin}", lambda read: self._expected_rows(read)[self._begin(read) :]
        yield (
            f"is the state of position {at - 1}: position {at} is not in it",
            lambda read: self._expected_rows(read)[:-1],
        )
        yield f"position {at} is in it twice", lambda read: self._expected_rows(read) + self._expected_rows(read)[-1:]
        for by in range(2, min(_MOST_SHIFT, at) + 1):
            yield f"is the state of position {at - by}", partial(self._earlier, by)
        for by in range(1, _MOST_SHIFT + 1):
            yield f"is the state of position {at + by}", partial(self._later, by)
        if 0 < begin < at:
            yield f"is the state of position {begin - 1}", lambda read: self._expected_rows(read)[: self._begin(read)]
        if (left := self._left_before(first)) >= 0:
            yield (
                f"was not cleared before the request was computed again: what it left at position {left} is in it",
                lambda read: self._earlier_rows(read) + self._expected_rows(read),
            )

    def _not_restored(self, hit: int) -> str:
        """Name what begins with zero after a hit or a fork: whether the layer's other state was kept is seen beside."""
        zero, is_fork = f"it begins with zero at position {hit}", _is_under(self._failure, ScheduleKind.FORKED)
        what, when = ("copied to the fork", "") if is_fork else ("restored", " after a hit")
        if not self._is_sound_beside(self.reads[0]):
            return f"was not {what}{when}: {zero}"
        if self._failure.operation.site.startswith("conv"):
            return f"{what} without the tail: {zero}, though the recurrent state was {what}"
        return f"{what} without the recurrent state: {zero}, though the convolution's was {what}"

    def _is_sound_beside(self, read: ReadState) -> bool:
        """Whether another state of the layer is right at the place where this one is wrong."""
        wrong = self._failure
        (truth,) = self._runs.after([self._runs.rows_of(read)])
        for op in wrong.graph.of_layer(wrong.operation.layer):
            if op.kind is Kind.STATE and op.tap != wrong.operation.tap:
                recorded = gathered(wrong.locator, op.tap, wrong.rows.select(torch.tensor([0])))
                if recorded is not None and self._is_near(recorded, truth[op.tap][None]):
                    return True
        return False

    def _is_near(self, one: torch.Tensor, another: torch.Tensor) -> bool:
        return float(row_errors(one, another).min()) <= _NEAR * rounding_unit(self._failure.dtype)

    def _of_others(self) -> Iterator[Way]:
        """Yield states of other requests: one that they have or had, as its content tells, and what they left."""
        alike = {request: self._alike(at) for at, request in self._firsts()}
        if source_read := alike.get(self.reads[0].request):
            cause = f"is the state of request {source_read.request}, position {source_read.position}"
            yield cause, lambda read: line_of(self._runs, source) if (source := alike.get(read.request)) else None
        for request in self._others(self.reads[0]):
            last = self._last(request, self.reads[0])
            yield f"is the state of request {request}, position {last}", partial(self._left_by, request)
            yield f"begins with what request {request} left", partial(self._begun_with, request)

    def _firsts(self) -> Iterator[tuple[int, int]]:
        """Yield number and request of the first wrong row of each request."""
        for at, read in enumerate(self.reads):
            if self._first[read.request] is read:
                yield at, read.request

    def _alike(self, at: int) -> ReadState | None:
        """Return where the same was read back of another request, or should have been; not of one that this gave up."""
        actual, read = self._failure.actual[at : at + 1], self.reads[at]
        for source, value in states_read(self._failure.recording, self._failure.operation.tap):
            is_own = read.request in (source.request, self._requests[source.request].draft_of)
            if not is_own and self._is_near(actual, value[None].to(torch.float64)):
                return source
        others = [ReadState(request, self._last(request, read), read.step) for request in self._others(read)]
        truths = self._runs.after([sequence_of(line_of(self._runs, source)) for source in others])
        pairs = zip(others, truths, strict=True)
        tap = self._failure.operation.tap
        return next((source for source, truth in pairs if self._is_near(actual, truth[tap][None])), None)

    def _left_by(self, request: int, read: ReadState) -> Line:
        return line_of(self._runs, ReadState(request, self._last(request, read), read.step))

    def _begun_with(self, request: int, read: ReadState) -> Line:
        return self._left_by(request, read) + self._expected_rows(read)

    def _with_drafts(self) -> Iterator[Way]:
        """Yield states with what was given up: the latest that the request went back over, or all."""
        drafts = self._drafts(self.reads[0])
        if drafts and self._requests[self.reads[0].request].draft_of is None:
            is_rewound = _is_under(self._failure, ScheduleKind.REWOUND)
            what = "tokens that were taken back" if is_rewound else "rejected drafts"
            first = self._requests[drafts[-1].draft].prompt_length
            from_there = f"{what} are in it, from position {first} on"
            yield from_there, lambda read: self._among(read, self._drafts(read)[-1:])
            yield f"{from_there}, and what was computed again", lambda read: self._computed_again(read)
            if len(drafts) > 1:
                yield f"{what} are in it, of every step so far", lambda read: self._among(read, self._drafts(read))

    def _drafts(self, read: ReadState) -> list[GivenUp]:
        return [item for item in given_up(self._failure.recording, read.request) if item.step < read.step]

    def _among(self, read: ReadState, drafts: Sequence[GivenUp]) -> Line:
        """Return the request's rows with those of drafts where they were given up."""
        line, reached, rows = Line(), 0, self._expected_rows(read)
        for draft in drafts:
            begin, end = (self._requests[draft.draft].prompt_length, len(self._requests[draft.draft].token_ids) - 1)
            line += rows[reached:begin] + line_of(self._runs, ReadState(draft.draft, end, read.step))[begin:]
            reached = begin
        return line + rows[reached:]

    def _computed_again(self, read: ReadState) -> Line | None:
        """Return the latest draft's rows before all that a request computed after it went back: a prompt's last row."""
        drafts = self._drafts(read)
        if not drafts:
            return None
        draft = drafts[-1]
        rows, end = self._expected_rows(read), len(self._requests[draft.draft].token_ids) - 1
        again = [row for row in rows if row[1] > draft.step]
        return line_of(self._runs, ReadState(draft.draft, end, read.step)) + again

    def _each_time(self) -> Iterator[Way]:
        yield "is not carried from one step to the next", lambda read: self._expected_rows(read)[self._begin(read) :]
        late = "is a step late: the rows of the latest step are not in it"
        yield late, lambda read: self._expected_rows(read)[: self._begin(read)] or None
        frozen = "is not updated in decode: it is the state at the end of the prompt"
        yield frozen, lambda read: self._expected_rows(read)[: self._requests[read.request].prompt_length]

    def _with_padding(self) -> Iterator[Way]:
        longest = max(request.prompt_length for request in self._requests.values())
        tokens = {0, *(getattr(self._failure.hf.config, f"{name}_token_id", None) for name in ("pad", "eos"))}
        for token in sorted(item for item in tokens if isinstance(item, int)):
            for where in ("before", "after"):
                cause = f"padding is in it: rows of token {token} {where} the prompt"
                yield cause, partial(self._padded, token, longest, where)

    def _padded(self, token: int, longest: int, where: str, read: ReadState) -> Line | None:
        prompt_length, rows = self._requests[read.request].prompt_length, self._expected_rows(read)
        at = 0 if where == "before" else prompt_length
        padding = [(token, -1, -1)] * (longest - prompt_length)
        return [*rows[:at], *padding, *rows[at:]] if padding and len(rows) >= at else None

    def _expected_rows(self, read: ReadState) -> Line:
        """Return the rows that should be in a state; nobody changes the list."""
        if read not in self._lines:
            self._lines[read] = line_of(self._runs, read)
        return self._lines[read]

    def _earlier(self, by: int, read: ReadState) -> Line:
        return self._expected_rows(read)[:-by]

    def _left_before(self, read: ReadState) -> int:
        """Return the last position that a request had computed before it began anew; -1 if it never did."""
        began = self._expected_rows(read)[0][1]
        return self._runs.last_computed(read.request, began)[0]

    def _earlier_rows(self, read: ReadState) -> Line:
        """Return the rows that a request had computed before it began anew."""
        return line_of(self._runs, ReadState(read.request, self._left_before(read), self._expected_rows(read)[0][1]))

    def _later(self, by: int, read: ReadState) -> Line | None:
        later = ReadState(read.request, read.position + by, read.step)
        return self._expected_rows(later) if later.position <= self._last(read.request, read) else None

    def _begin(self, read: ReadState) -> int:
        """Return the first position of the step that computed the last row of a state."""
        rows = self._expected_rows(read)
        return next(at for at, row in enumerate(rows) if row[1] == rows[-1][1])

    def _hit(self, read: ReadState) -> int:
        """Return how many rows a request took over from the cache instead of computing them."""
        return self._runs.num_taken_over(read.request)

    def _last(self, request: int, read: ReadState) -> int:
        """Return the last position that a request had computed before a place where a state was read; -1 for none."""
        return self._runs.last_computed(request, read.step)[0]

    def _others(self, read: ReadState) -> list[int]:
        """Return other requests that had computed rows by then, the latest first; not what the request gave up."""
        others = [key for key, of in self._requests.items() if read.request not in (key, of.draft_of)]
        steps = {item: self._runs.last_computed(item, read.step)[1] for item in others}
        return sorted((key for key, step in steps.items() if step >= 0), key=lambda request: -steps[request])[
            :_MOST_OTHERS
        ]


def _is_under(wrong: WrongOperation, schedule: ScheduleKind) -> bool:
    return (wrong.recording.manifest.schedule or "") == schedule
