"""Distributions of workloads: lengths near boundaries, beginnings that are shared, limits that are tight."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from harness.engines import Capabilities
from harness.extensions.fuzz.workload import SEGMENT, Searched, SearchedRequest, Translator
from harness.formats.schedule import DEFAULT_CHUNK_SIZE, ScheduleKind

MOST_REQUESTS = 6
BLOCK_SIZES = (4, 8, 16, 5, 2)
NUMBERS_OF_NEW_TOKENS = (1, 2, 4, 7, 12)
ARRIVALS = (0, 0, 0, 0, 0, 1, 2, 4, 99)
"""Steps; the last is when there is nothing else to do."""
SLACK_BLOCKS = (0, 0, 1, 2)
"""Blocks beyond those that some of the prompts need: so few that the requests do not fit when they have grown."""
SEARCHED = tuple(kind for kind in ScheduleKind if kind not in (ScheduleKind.FORKED, ScheduleKind.TENSOR_PARALLEL))
"""Schedules by name: not those whose requests need continuations of their own, or processes that take seconds to
start."""


@dataclass(frozen=True)
class Strategies:
    """Draws workloads that fit a pool and an engine."""

    translator: Translator
    capabilities: Capabilities

    def workloads(self, corpus: Sequence[Searched]) -> st.SearchStrategy[Searched]:
        """Draw a new workload, or a change to one of those that reached something new."""
        fresh = self._fresh()
        return st.one_of(fresh, self._changed(corpus)) if corpus else fresh

    def _fresh(self) -> st.SearchStrategy[Searched]:
        @st.composite
        def draw(draw: st.DrawFn) -> Searched:
            base = self._base(draw)
            sizes = self._sizes(base)
            number = draw(st.integers(1, MOST_REQUESTS))
            requests: list[SearchedRequest] = []
            for _ in range(number):
                requests.append(self._request(draw, sizes, requests))
                if draw(st.integers(0, 3)) == 0:
                    self._fork(draw, requests)
            return self._tightened(draw, replace(base, requests=tuple(requests)))

        return draw()

    def _changed(self, corpus: Sequence[Searched]) -> st.SearchStrategy[Searched]:
        """Change one to three things about a workload of the corpus."""

        @st.composite
        def draw(draw: st.DrawFn) -> Searched:
            workload = draw(st.sampled_from(corpus))
            for _ in range(draw(st.integers(1, 3))):
                workload = self._change(draw, workload)
            return self.translator.fitted(workload)

        return draw()

    def _change(self, draw: st.DrawFn, workload: Searched) -> Searched:
        requests, sizes = list(workload.requests), self._sizes(workload)
        at = draw(st.integers(0, len(requests) - 1))
        kind = draw(st.sampled_from(("request", "again", "limits", "arrival", "without", "fork")))
        if kind == "limits":
            return self._tightened(draw, replace(self._base(draw), requests=workload.requests))
        if kind == "without" and len(requests) > 1:
            return without_request(workload, at)
        if kind == "again" and len(requests) < MOST_REQUESTS:
            requests.append(replace(requests[at], fork_of=None, arrival=self._arrival(draw)))
        elif kind == "fork":
            self._fork(draw, requests)
        elif kind == "arrival":
            requests[at] = replace(requests[at], arrival=self._arrival(draw))
        else:
            requests[at] = self._request(draw, sizes, requests[:at])
        return replace(workload, requests=tuple(requests))

    def _base(self, draw: st.DrawFn) -> Searched:
        """Draw what holds for all requests, but for the number of blocks."""
        control = self.capabilities.control
        if control is None:
            return Searched(requests=(), schedule=self._schedule(draw))
        workload, size = Searched(requests=()), self.translator.block_size
        if "block_size" in control.limits:
            size = draw(st.sampled_from(BLOCK_SIZES))
            workload = workload.with_limit("block_size", size)
        chunks = (None, None, size + 1, size, max(2, size - 1), 2 * size, DEFAULT_CHUNK_SIZE)
        choices: dict[str, Sequence[int | None]] = {
            "max_num_batched_tokens": chunks,
            "max_num_seqs": (None, None, None, 1, 2, 3),
            "enable_prefix_caching": (None, True),
        }
        for name, values in choices.items():
            if name in control.limits:
                workload = workload.with_limit(name, draw(st.sampled_from(values)))
        return workload

    def _schedule(self, draw: st.DrawFn) -> str:
        name = draw(st.sampled_from(searched_schedules(self.capabilities)))
        size = self.translator.block_size
        if ScheduleKind(name).parameter is None:
            return name
        return f"{name}:{draw(st.sampled_from((DEFAULT_CHUNK_SIZE, size, max(1, size - 1), size + 1, 3)))}"

    def _sizes(self, workload: Searched) -> tuple[int, ...]:
        """Return the sizes whose multiples are boundaries."""
        chunk = workload.limit("max_num_batched_tokens")
        size = workload.limit("block_size") or self.translator.block_size
        return tuple(dict.fromkeys((size, SEGMENT, *(() if chunk is None else (chunk,)))))

    def _request(self, draw: st.DrawFn, sizes: Sequence[int], before: Sequence[SearchedRequest]) -> SearchedRequest:
        control, pool = self.capabilities.control, self.translator.pool
        sequence = draw(st.integers(0, len(pool.sequences) - 1))
        if before and draw(st.integers(0, 2)) == 0:  # the same tokens again: a cache may have kept them, or lost them
            sequence = draw(st.sampled_from(before)).sequence
        size = draw(st.sampled_from(sizes))
        boundary = draw(st.integers(0, pool.num_tokens // size)) * size
        request = SearchedRequest(
            sequence=sequence,
            prompt_length=boundary + draw(st.sampled_from((1, 0, -1))),
            num_new=draw(st.sampled_from(NUMBERS_OF_NEW_TOKENS)),
        )
        if control is None:
            return self.translator.cut(request)
        request = replace(request, arrival=self._arrival(draw))
        if control.aborts and draw(st.integers(0, 7)) == 0:
            request = replace(request, is_aborted=True)
        return request

    def _fork(self, draw: st.DrawFn, requests: list[SearchedRequest]) -> None:
        """Make the last request a fork of one before it: one that soon goes another way."""
        control, pool = self.capabilities.control, self.translator.pool
        if control is None or not control.forks or len(requests) < 2:
            return
        at = draw(st.integers(0, len(requests) - 2))
        original = requests[at]
        shared = {candidate: pool.shared(original.sequence, candidate) for candidate in range(len(pool.sequences))}
        others = [candidate for candidate, length in shared.items() if length > 1]
        inside = [
            candidate for candidate in others if shared[candidate] % SEGMENT
        ]  # they part inside of a block that is shared
        sequence = draw(st.sampled_from([*others, *inside, *inside, *inside]))
        num_alike = draw(st.sampled_from((1, 2, 3)))  # the token that the original has made, and some after it
        prompt_length = max(1, pool.shared(original.sequence, sequence) - num_alike)
        num_new = draw(st.sampled_from((3, 5, 9)))
        if original.fork_of is None:
            requests[at] = replace(original, prompt_length=prompt_length, num_new=num_new)
            requests[-1] = replace(requests[-1], sequence=sequence, num_new=num_new, fork_of=at)

    def _arrival(self, draw: st.DrawFn) -> int:
        return 0 if self.capabilities.control is None else draw(st.sampled_from(ARRIVALS))

    def _tightened(self, draw: st.DrawFn, workload: Searched) -> Searched:
        """Draw a number of blocks for these requests: as many as the engine likes, or few."""
        control = self.capabilities.control
        workload = self.translator.fitted(workload)
        if control is None or "num_blocks" not in control.limits or draw(st.integers(0, 2)) == 0:
            return workload
        number_at_once = draw(st.sampled_from(range(2, 1 + max(2, len(workload.requests)))))
        number = self.translator.of_prompts(workload, number_at_once) + draw(st.sampled_from(SLACK_BLOCKS))
        return workload.with_limit("num_blocks", max(self.translator.fewest(workload), number))


def searched_schedules(capabilities: Capabilities) -> list[str]:
    """Return the schedules by name that are searched, of those that an engine follows."""
    return [name for name in capabilities.schedules if name in SEARCHED]


def without_request(workload: Searched, at: int) -> Searched:
    """Return the workload without one request, and without the forks of it."""

    def renumbered(request: SearchedRequest) -> SearchedRequest:
        original = request.fork_of
        if original is None or original < at:
            return request
        return replace(request, fork_of=None if original == at else original - 1)

    kept = [renumbered(request) for number, request in enumerate(workload.requests) if number != at]
    return replace(workload, requests=tuple(kept))
