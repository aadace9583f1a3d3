"""One tap with every judgement there is on it: whether it is bad, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.errors import Code
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.local_judge import LocalErrors
from harness.judge.compare.propagated import PropagatedErrors, Propagation
from harness.results.check import Effect, Verdict


@dataclass(frozen=True, kw_only=True)
class TapJudgement:
    """All that is known of one tap."""

    operation: Operation
    errors: LocalErrors | None
    """Replayed on the engine's own inputs, or read back from its cache: the sharpest judgement where there is one."""
    propagated: PropagatedErrors | None
    """Against the golden."""
    is_in_graph: bool
    """Whether propagation may judge it; a tap the graph does not know is measured only."""

    @property
    def rows(self) -> Rows:
        """Identity of the rows judged."""
        source = self.errors or self.propagated
        assert source is not None
        return source.rows

    @cached_property
    def bad(self) -> torch.Tensor:
        """[rows] bool: out of bounds by the sharpest judgement there is."""
        if self.errors is not None:
            return self.errors.bad
        assert self.propagated is not None
        if not self.is_in_graph:
            return torch.zeros(len(self.rows), dtype=torch.bool)
        # Where the expected side is not finite there is nothing to hold finite rows to; that is a finding of its own.
        return self.propagated.is_far | ~self.propagated.metrics.is_finite

    @property
    def is_bad(self) -> bool:
        """Whether any row is out of bounds."""
        return bool(self.bad.any())

    @cached_property
    def effect(self) -> Effect | None:
        """The direction that the errors of all rows have together, if no row is out of bounds by itself."""
        return None if self.is_bad or self.errors is None else self.errors.effect

    @property
    def is_wrong(self) -> bool:
        """Whether a row is out of bounds, or all of them together are."""
        return self.is_bad or self.effect is not None

    @cached_property
    def first_bad(self) -> int:
        """Index of the first bad row by (request, position)."""
        return self.rows.first(self.bad)

    @property
    def code(self) -> Code:
        """The code of the first bad row, or of all rows together."""
        if self.effect is not None:
            return Code.SYSTEMATIC_ERROR
        at, errors = self.first_bad, self.errors
        if errors is None:
            assert self.propagated is not None
            return Code.PROPAGATED_ERROR if self.propagated.metrics.is_finite[at] else Code.NOT_FINITE
        if self.operation.is_kept:
            return Code.STATE_DIFFERS if self.operation.kind is Kind.STATE else Code.CACHE_DIFFERS
        is_finite = self.operation.kind is Kind.CHOICE or bool(torch.isfinite(errors.roundings[at]))
        return Code.LOCAL_ERROR if is_finite else Code.NOT_FINITE

    @property
    def verdict(self) -> Verdict:
        """The verdict on the operation."""
        if self.is_bad:
            return Verdict.BUG
        if self.errors is None:
            assert self.propagated is not None
            if float(self.propagated.ratio.max()) == 0:
                return Verdict.EXACT
            return Verdict.NOISE if self.is_in_graph else Verdict.UNJUDGED
        if self.errors.exact:
            return Verdict.EXACT
        if self.effect is not None:
            return Verdict.SYSTEMATIC
        return Verdict.CONVENTION if self.errors.convention else Verdict.NOISE

    def ratio_at(self, at: int) -> float | None:
        """Return the propagated error of a judged row over HF's own, where the row was compared with the golden."""
        if self.propagated is None:
            return None
        request, position = self.rows.request[at], self.rows.position[at]
        here = (self.propagated.rows.request == request) & (self.propagated.rows.position == position)
        return float(self.propagated.ratio[here].max()) if bool(here.any()) else None


def judge(graph: Graph, errors: Mapping[str, LocalErrors], propagation: Propagation) -> list[TapJudgement]:
    """Put the judgements of each tap together, in graph order; taps outside of the graph come last, unjudged."""
    known = graph.by_tap
    others = [Operation(tap=tap, kind=Kind.OTHER) for tap in propagation.errors if tap not in known]
    return [
        TapJudgement(
            operation=operation,
            errors=errors.get(operation.tap),
            propagated=propagation.errors.get(operation.tap),
            is_in_graph=operation.tap in known,
        )
        for operation in (*graph, *others)
        if operation.tap in errors or operation.tap in propagation.errors
    ]
