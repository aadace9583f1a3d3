"""Relations between tensors: HF computes what one of them holds from another, anywhere in the model.

One forward over the first rows tries many tensors side by side: each request goes on with other tensors in the place of
the taps that were not found, so nothing has to be known of what comes before. Where a tensor holds the result, too,
the two are tied to two taps. Of several tensors for a tap, or taps for a tensor, the one with the most ties is taken.

`B` trials side by side, `R` rows, `W` columns of a tap.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product, zip_longest

import torch

from harness.base.metrics import rounding_unit
from harness.engines.by_content.columns import Columns, Fit, Table, TableIndex, relative_error
from harness.engines.by_content.hf_run import run_hf
from harness.formats.taps import Kind, Operation
from harness.oracle.model import HFModel

_NUM_ROWS = 8
"""First rows of the step; those of a causal model do not depend on later ones."""
_AT_ONCE = 32
_MOST_TRIALS = 512
"""Of a tap or of a pair of taps."""
_MOST_MULTIPLY_ADDS = 2e13
"""Of all forwards: some minutes of a CPU. A model of 0.6 billion weights has 130 forwards of 32 trials."""
_WEIGHT_OF_KNOWN = 10
"""Ties with other unknown taps that a tie with a known one counts for."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Columns of a table that may be a tap's value."""

    table: int
    columns: Columns
    content: int
    """Equal ones hold the same, in the engine's dtype."""


_NOISE, _KNOWN = (Candidate(-1, Columns(start=0, stop=0), content) for content in (-1, -2))
"""Noise on trial, since what HF computes from it as well is from something else; and the tensor of a known tap."""
_ZEROS = -3
"""Content of any tensor of zeros, which may be of several taps."""

Node = tuple[str, int]
"""A tap with the content of a candidate."""
MayBe = Callable[[Operation, Fit], bool]
"""Whether a tensor may be the value of an operation."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Trials of candidates in one forward."""

    trials: Mapping[str, Sequence[Candidate]]
    """By tap, its candidate in each trial."""
    pairs: frozenset[frozenset[str]] = frozenset()
    """Taps of which each candidate is tried with each of the other."""


@dataclass(frozen=True, slots=True)
class Tie:
    """HF computes the value of a tap from candidates of others."""

    origin: tuple[Node, ...]
    result: Node

    @property
    def is_with_known(self) -> bool:
        """Whether the result is a known tap's."""
        return self.result[1] == _KNOWN.content


class Relations:
    """The relations between the tables of a step."""

    def __init__(
        self, hf: HFModel, ids: torch.Tensor, tables: Sequence[Table], *, rounding: float, limit: float
    ) -> None:
        """Take the first rows of tables.

        Args:
            hf: the model that the engine should be, in float32.
            ids: the tokens of one request, or one token of each of many, [requests, tokens].
            tables: tensors with a row for each token.
            rounding: RMS relative error of one rounding in the engine.
            limit: relative error up to which a tensor is what HF computes.
        """
        self._hf, self._limit = hf, limit
        self._ids = ids[:_NUM_ROWS, :_NUM_ROWS]
        self._rounding = rounding
        self._tables = [Table(table.name, table.rows[:_NUM_ROWS].float()) for table in tables]
        halves = (dtype for dtype in (torch.float16, torch.bfloat16) if rounding_unit(dtype) <= 1.5 * rounding)
        self._dtype = [torch.float32, *halves][-1]  # a value that is rounded to it later is the same
        self._contents: dict[bytes, int] = {}
        self._num_weights = sum(weight.numel() for weight in hf.model.parameters())
        self._num_multiply_adds = 0

    @cached_property
    def _index(self) -> TableIndex:
        """Of the tables; none is needed where every tap is found without relations."""
        return TableIndex(self._tables, rounding=self._rounding)

    def candidate(self, table: int, columns: Columns) -> Candidate | None:
        """Return columns of a table as a candidate; None if they are not finite."""
        rows = columns.of(self._tables[table].rows)
        if not bool(rows.isfinite().all()):
            return None
        if not bool(rows.any()):
            return Candidate(table, columns, _ZEROS)
        held = rows.to(self._dtype).contiguous().view(torch.uint8).numpy().tobytes()
        return Candidate(table, columns, self._contents.setdefault(held, len(self._contents)))

    def distance(self, candidate: Candidate, value: torch.Tensor) -> float:
        """Return the norm of the difference between a candidate and a value [T, W], relative to the value's."""
        expected = value[:_NUM_ROWS]
        actual = candidate.columns.of(self._tables[candidate.table].rows)
        return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))

    def assignments(
        self, known: Mapping[str, torch.Tensor], candidates: Mapping[str, Sequence[Candidate]], may_be: MayBe
    ) -> Iterator[dict[str, Candidate]]:
        """Yield what relations tell: of all taps together, then of each site alone and of each pair of sites.

        A site alone reaches tensors behind taps that were not recorded.

        Args:
            known: rows of the taps that were found.
            candidates: what may be each tap that was not.
            may_be: says whether a tensor may be a result.
        """
        known = {tap: rows[:_NUM_ROWS].float() for tap, rows in known.items()}
        for plan in self._plans(candidates):
            nodes: dict[Node, Candidate] = {}
            ties = set[Tie]()
            for begin in range(0, max(map(len, plan.trials.values())), _AT_ONCE):
                if self._num_multiply_adds > _MOST_MULTIPLY_ADDS:
                    return
                part = {tap: tried[begin : begin + _AT_ONCE] for tap, tried in plan.trials.items()}
                ties |= self._run(
                    _Plan({tap: tried for tap, tried in part.items() if tried}, plan.pairs), known, may_be, nodes
                )
            yield best_assignment([tie for tie in ties if not _is_of_noise(tie, ties)], nodes)

    def _plans(self, candidates: Mapping[str, Sequence[Candidate]]) -> Iterator[_Plan]:
        graph = self._hf.graph
        tried = {tap: [*some[: _MOST_TRIALS - 1], _NOISE] for tap, some in candidates.items()}
        yield _Plan(tried)
        for _site, taps in groupby(sorted(tried, key=lambda tap: graph[tap].site), key=lambda tap: graph[tap].site):
            yield _Plan({tap: tried[tap] for tap in taps})
        by_sites = defaultdict[tuple[str, ...], list[tuple[str, str]]](list)
        for op in graph:
            if not op.is_kept and len(lost := [tap for tap in dict.fromkeys(op.inputs) if tap in tried]) == 2:
                by_sites[graph[lost[0]].site, graph[lost[1]].site].append((lost[0], lost[1]))
        for pairs in by_sites.values():
            trials: dict[str, Sequence[Candidate]] = {}
            for one, two in pairs:
                places = product(range(len(tried[one])), range(len(tried[two])))
                nearest = sorted(places, key=lambda at: abs(at[0] - at[1]))[:_MOST_TRIALS]  # often dumped in one order
                trials |= {one: [tried[one][at] for at, _ in nearest], two: [tried[two][at] for _, at in nearest]}
            yield _Plan(trials, frozenset(map(frozenset, pairs)))

    def _run(
        self, plan: _Plan, known: Mapping[str, torch.Tensor], may_be: MayBe, nodes: dict[Node, Candidate]
    ) -> set[Tie]:
        """Run one forward with a request for each trial; add the candidates that are tied to `nodes`."""
        ties = set[Tie]()
        behind: dict[str, frozenset[str]] = {}  # by tap, those on trial that it follows from
        num_trials = max(map(len, plan.trials.values()))
        generator = torch.Generator().manual_seed(0)

        def look(op: Operation, value: torch.Tensor) -> torch.Tensor | None:
            origin = behind[op.tap] = frozenset[str]().union(*(behind.get(tap, frozenset()) for tap in op.inputs))
            if op.kind is Kind.CHOICE:
                return None
            values = value.reshape(num_trials, -1, value.shape[-1])  # [B, R, W]
            if len(origin) == 1 or origin in plan.pairs:
                for at, tried in enumerate(zip(*(plan.trials[tap] for tap in sorted(origin)), strict=False)):
                    first = dict(zip(sorted(origin), tried, strict=True))
                    for result in self._results(op, values[at], first, known.get(op.tap), may_be):
                        reached = {**first, op.tap: result}
                        nodes.update({(tap, item.content): item for tap, item in reached.items()})
                        start = tuple((tap, item.content) for tap, item in first.items())
                        ties.add(Tie(start, (op.tap, result.content)))
            if op.tap in known:
                behind[op.tap] = frozenset()
                return known[op.tap].expand(values.shape).reshape(value.shape)
            if op.tap not in plan.trials:
                return None
            behind[op.tap] = frozenset([op.tap])
            return self._tried(plan.trials[op.tap], values, generator).reshape(value.shape)

        self._num_multiply_adds += self._num_weights * self._ids.numel() * num_trials
        following = [] if self._hf.mtp is None else self._hf.mtp.following[: len(self._ids)]
        with self._hf.followed_by([*following] * num_trials):
            run_hf(self._hf, self._ids.repeat(num_trials, 1), look)
        return ties

    def _tried(self, tried: Sequence[Candidate], values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the rows of candidates [B, R, W], and noise of their size for what is none."""
        rows = [None if item is _NOISE else item.columns.of(self._tables[item.table].rows) for item in tried]
        sizes = [float(item.square().mean().sqrt()) for item in (*rows, values) if item is not None]
        noise = torch.randn(values.shape[1:], generator=generator) * next(filter(None, sizes), 1.0)
        pairs = zip_longest(rows, values)
        return torch.stack([noise if item is None else item for item, _ in pairs])

    def _results(
        self,
        op: Operation,
        value: torch.Tensor,
        tried: Mapping[str, Candidate],
        known: torch.Tensor | None,
        may_be: MayBe,
    ) -> Iterator[Candidate]:
        """Yield what holds a value [R, W] that HF computes from candidates: the known tensor alone, if there is one."""
        limit = self._index.fine if _NOISE in tried.values() else self._limit
        if known is not None:
            if relative_error(known, value) <= limit:
                yield _KNOWN
            return
        for fit in self._index.find(value, exactly=True):
            result = self.candidate(fit.index, fit.columns)
            if result is None or fit.error > limit or not may_be(op, fit):
                continue
            is_new = all(
                item.content != result.content and not (item.table == fit.index and item.columns.shared(fit.columns)[0])
                for item in tried.values()
            )
            if is_new:
                yield result


def _is_of_noise(tie: Tie, ties: set[Tie]) -> bool:
    """Whether noise in the place of one of the candidates gives the same."""
    for at, (tap, _) in enumerate(tie.origin):
        noisy = (*tie.origin[:at], (tap, _NOISE.content), *tie.origin[at + 1 :])
        if Tie(noisy, tie.result) in ties:
            return True
    return False


def best_assignment(ties: Sequence[Tie], nodes: Mapping[Node, Candidate]) -> dict[str, Candidate]:
    """Return the candidates that are tied with more others than any rival for the tap, or for the content."""
    groups: dict[Node, frozenset[Node]] = {}
    for tie in ties:
        joined = frozenset(tie.origin) | (frozenset() if tie.is_with_known else {tie.result})
        joined = joined.union(*(groups.get(node, frozenset()) for node in joined))
        groups |= dict.fromkeys(joined, joined)
    told = defaultdict[frozenset[Node], set[tuple[tuple[int, ...], Node | int]]](set)
    for tie in ties:  # two taps for one result are one piece of evidence
        result = tie.result if tie.is_with_known else tie.result[1]
        told[groups[tie.origin[0]]].add((tuple(content for _, content in tie.origin), result))
    weights = {
        group: sum(_WEIGHT_OF_KNOWN if isinstance(result, tuple) else 1 for _, result in items)
        for group, items in told.items()
    }
    scores = {node: weights[group] for node, group in groups.items()}
    best: dict[str, Candidate] = {}
    for (tap, content), score in scores.items():
        rivals = [rival for rival in scores if rival[0] == tap or rival[1] == content != _ZEROS]
        rivals.remove((tap, content))
        if all(scores[rival] < score for rival in rivals):
            best[tap] = nodes[tap, content]
    return best
