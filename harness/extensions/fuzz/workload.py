"""A workload as it is searched and shrunk: requests by their sequence in the pool, and the engine's limits.

All workloads of a search draw their tokens from one pool: one golden over it judges every workload. A request is the
beginning of one of the pool's sequences, cut into prompt and continuation anywhere. The sequences give shared caches
something to share, and something to confuse: common beginnings that part at the boundary of a segment or inside of one,
and the same segments after different beginnings.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice

from harness.engines import LIMITS, Control, Timeline, Workload
from harness.errors import Code, HarnessError
from harness.extensions.fuzz.result import SentRequest, SentWorkload
from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule, parse_schedule
from harness.oracle.requests import Prompt, duplicate_requests

SEGMENT = 8
"""Tokens of a segment: a block of many engines, or a whole number of blocks, or half of one."""
NUM_TOKENS = 48
"""Of a sequence, unless a sliding window needs more: six segments."""
MOST_TOKENS = 512
PATTERNS = (
    "ABCDEF",
    "ABCDGH",  # parts from the first after four segments
    "ABIJCD",  # after two, and goes on with segments that the first has elsewhere
    "aBCDEF",  # inside the first segment: the same segments after another beginning
    "KLCDEF",  # the same, two segments later
    "KLCDMN",
    "ABcDEF",  # inside the third
    "ABCDeF",
    "AAAAAA",  # the same segment at every depth
    "QRSTUV",  # nothing in common with any
    "WXYZOP",
)
"""Each letter is a segment of random tokens. A small letter is the segment of the large one with its end replaced."""
_REPLACED = 3
_FIRST_TOKEN = 3
"""Those below are often special."""


@dataclass(frozen=True, slots=True)
class SequencePool:
    """Sequences of tokens, each a tuple of token ids."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest."""
        return max(map(len, self.sequences))

    def shared(self, first: int, second: int) -> int:
        """Return how many tokens two sequences have in common at their beginning."""
        pairs = zip(self.sequences[first], self.sequences[second], strict=False)
        same = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
        return min(len(self.sequences[first]), len(self.sequences[second])) if same is None else same

    def prompts(self) -> list[Prompt]:
        """Return what the golden is made for: every token but the first is forced, and every one chooses."""
        return [Prompt(token_ids=tokens, max_new_tokens=1, prompt_length=1) for tokens in self.sequences]

    @classmethod
    def of(cls, workload: SentWorkload) -> "SequencePool":
        """Return the pool of one workload: its own requests."""
        return cls(tuple(request.token_ids for request in workload.requests))


def make_pool(seed: int, *, vocab_size: int, max_positions: int | None, window: int | None) -> SequencePool:
    """Draw a pool.

    Of `max_positions` (None: no limit) one is left for a token that is made and never fed. Beyond the smallest sliding
    `window` of the model sequences go as far as that is affordable.

    Raises:
        HarnessError: PROMPT_TOO_LONG: the model has too few positions for any workload.
    """
    wanted = NUM_TOKENS if window is None else max(NUM_TOKENS, min(window + 2 * SEGMENT, MOST_TOKENS))
    length = wanted if max_positions is None else min(wanted, max_positions - 2)
    if length < 2:
        raise HarnessError(
            Code.PROMPT_TOO_LONG, "the model has too few positions for a workload", where="max_position_embeddings",
            expected="at least 4", actual=max_positions,
        )  # fmt: skip
    generator = random.Random(seed)
    tokens = range(min(_FIRST_TOKEN, vocab_size - 1), vocab_size)
    segments: dict[str, list[int]] = {}
    for letter in dict.fromkeys("".join(PATTERNS).upper()):
        segments[letter] = generator.choices(tokens, k=SEGMENT)
        segments[letter.lower()] = segments[letter][:-_REPLACED] + generator.choices(tokens, k=_REPLACED)
    return SequencePool(
        tuple(
            tuple(islice((token for letter in cycle(pattern) for token in segments[letter]), length))
            for pattern in PATTERNS
        )
    )


DEFAULT_BLOCK_SIZE = 16
"""Tokens of a block where neither workload nor option says: what most engines have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedRequest:
    """The beginning of a sequence of the pool, as a prompt and a continuation that is forced."""

    sequence: int
    prompt_length: int
    num_new: int = 1
    """Tokens that it makes, at least one."""
    arrival: int = 0
    is_aborted: bool = False
    fork_of: int | None = None

    @property
    def num_fed(self) -> int:
        """Rows of the request."""
        return self.prompt_length + self.num_new - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """One workload of a search."""

    requests: tuple[SearchedRequest, ...]
    limits: tuple[tuple[str, int | bool], ...] = ()
    """Names of `LIMITS` with values, in their order."""
    schedule: str | None = None
    """For an engine without `Control`, and then there is nothing of limits, arrivals, aborts and forks."""

    def limit(self, name: str) -> int | None:
        """Return a limit, None if the workload does not set it."""
        return dict(self.limits).get(name)

    def with_limit(self, name: str, value: int | bool | None) -> "Searched":
        """Return the workload with another value of a limit; None takes the limit away."""
        limits: dict[str, int | bool | None] = {**dict(self.limits), name: value}
        ordered = ((key, limits.get(key)) for key in LIMITS)
        return replace(self, limits=tuple((key, limit) for key, limit in ordered if limit is not None))

    @property
    def cost(self) -> tuple[int, ...]:
        """The size that shrinking makes small: requests, then their events, rows, steps of arrival, and limits."""
        events = sum(request.is_aborted + 2 * (request.fork_of is not None) for request in self.requests)
        events += sum(request.arrival > 0 for request in self.requests)
        return (
            len(self.requests),
            events,
            len(self.limits),
            sum(request.num_fed for request in self.requests),
            sum(request.arrival for request in self.requests),
            sum(request.sequence for request in self.requests),
            sum(value for _, value in self.limits),
            len(self.schedule or ""),
        )


@dataclass(frozen=True)
class Translator:
    """The limits of a workload: the pool, and the engine's control over its scheduling."""

    pool: SequencePool
    control: Control | None
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the engine: they may decide what workloads then do not."""

    @cached_property
    def block_size(self) -> int:
        """Tokens of a block where a workload does not say."""
        option = self.options.get("block_size", "")
        return int(option) if option.isdecimal() and int(option) else DEFAULT_BLOCK_SIZE

    def fitted(self, workload: Searched) -> Searched:
        """Return the workload with what is impossible made possible: lengths, forks, and blocks for the longest."""
        requests = [self.cut(request) for request in workload.requests]
        requests = [self._forked(number, request, requests) for number, request in enumerate(requests)]
        fitted = replace(workload, requests=tuple(requests))
        num_blocks = fitted.limit("num_blocks")
        return fitted if num_blocks is None else fitted.with_limit("num_blocks", max(num_blocks, self.fewest(fitted)))

    def fewest(self, workload: Searched) -> int:
        """Return the fewest blocks that the longest request fits into, and one that no request can have."""
        size = workload.limit("block_size") or self.block_size
        longest = max(request.num_fed + request.is_aborted for request in workload.requests)
        return 1 + -(-longest // size)

    def of_prompts(self, workload: Searched, number: int) -> int:
        """Return the blocks that the longest so many prompts fit into side by side, but not what follows them."""
        size = workload.limit("block_size") or self.block_size
        needed = sorted((-(-request.prompt_length // size) for request in workload.requests), reverse=True)
        return 1 + sum(needed[:number])

    def cut(self, request: SearchedRequest) -> SearchedRequest:
        """Return the request with lengths that its sequence has."""
        longest = len(self.pool.sequences[request.sequence])
        num_new = max(1, min(request.num_new, longest))
        prompt_length = max(1, min(request.prompt_length, longest - num_new + 1))
        return replace(request, num_new=num_new, prompt_length=prompt_length)

    def _forked(self, number: int, request: SearchedRequest, requests: list[SearchedRequest]) -> SearchedRequest:
        """Keep a fork that shares its original's prompt and first token; the original is no fork, and goes on."""
        if request.fork_of is None:
            return request
        none = replace(request, fork_of=None)
        if not 0 <= request.fork_of < len(requests) or request.fork_of == number:
            return none
        original = requests[request.fork_of]
        shares = self.pool.shared(request.sequence, original.sequence) > original.prompt_length
        if original.fork_of is not None or original.num_new < 2 or not shares:
            return none
        num_new = max(2, min(request.num_new, len(self.pool.sequences[request.sequence]) - original.prompt_length + 1))
        return replace(request, prompt_length=original.prompt_length, num_new=num_new, arrival=0)

    def sent(self, workload: Searched) -> SentWorkload:
        """Return the workload with its tokens."""
        return SentWorkload(
            requests=tuple(
                SentRequest(
                    token_ids=self.pool.sequences[request.sequence][: request.num_fed],
                    prompt_length=request.prompt_length,
                    arrival=request.arrival,
                    is_aborted=request.is_aborted,
                    fork_of=request.fork_of,
                )
                for request in workload.requests
            ),
            limits=dict(workload.limits),
            schedule=workload.schedule,
        )


def engine_workload(sent: SentWorkload) -> Workload:
    """Return what an engine is asked to do; the numbers of the requests are their ids."""
    infos = [
        # A fork computes the row after the prompt itself: it is the first at which it chooses.
        RequestInfo(
            id=number,
            token_ids=list(request.token_ids),
            prompt_length=request.prompt_length + (request.fork_of is not None),
        )
        for number, request in enumerate(sent.requests)
    ]
    if sent.schedule is not None:
        schedule = parse_schedule(sent.schedule)
        return Workload(
            requests=infos, schedule=schedule, copies=duplicate_requests(infos) if schedule.is_repeated else ()
        )
    pairs = list(enumerate(sent.requests))
    timeline = Timeline(
        limits=sent.limits,
        arrivals={number: request.arrival for number, request in pairs if request.arrival},
        aborted=frozenset(number for number, request in pairs if request.is_aborted),
        forks={number: request.fork_of for number, request in pairs if request.fork_of is not None},
    )
    return Workload(requests=infos, schedule=Schedule.of("batched"), timeline=timeline)
