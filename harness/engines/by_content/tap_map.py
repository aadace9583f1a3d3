"""The map of an engine: which places of its run show which taps, and how to read them in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from harness.engines.by_content.columns import Columns, RowLayout, RowOrder
from harness.engines.by_content.steps import Site


class TapEvidence(StrEnum):
    """Why a tensor is taken for a tap."""

    CONTENT = "content", "it holds what HF computes from the engine's own values"
    CONSUMERS = "consumers", "HF computes what the engine computes next only from it"
    NAME = "name", "its name is that of the tap, or of the tap in other layers"
    DEFINITION = "definition", "it is what the step returns"

    help: str

    def __new__(cls, word: str, text: str) -> "TapEvidence":
        """Make a member whose value is its name."""
        member = str.__new__(cls, word)
        member._value_, member.help = word, text
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSite:
    """A site that shows a tap."""

    site: Site
    layout: RowLayout
    columns: Columns
    is_of_context: bool = False
    """Whether it has rows of all earlier tokens of its requests too, before those of the step."""

    def num_rows(self, spans: Sequence[range]) -> int:
        """Return how many rows it has in a step of these positions of requests."""
        return sum(span.stop if self.is_of_context else len(span) for span in spans)

    def read(self, tensor: torch.Tensor, span: range) -> torch.Tensor | None:
        """Return the tap's rows of one request, [len(span), W]; None if the tensor has less rows or columns."""
        return self.read_all(tensor, [span], RowOrder.PACKED)

    def read_all(self, tensor: torch.Tensor, spans: Sequence[range], order: RowOrder) -> torch.Tensor | None:
        """Return the tap's rows of several requests, [all of them, W]; None if the tensor has less rows or columns."""
        lengths = [span.stop if self.is_of_context else len(span) for span in spans]
        rows = self.layout.rows_of(tensor, lengths, order)
        if rows is None or rows.shape[1] < self.columns.stop:
            return None
        if self.is_of_context:
            rows = torch.cat(
                [request_rows[span.start :] for request_rows, span in zip(rows.split(lengths), spans, strict=True)]
            )
        return self.columns.of(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTap:
    """A tap that an engine shows."""

    tap: str
    evidence: TapEvidence
    sources: tuple[ShownSite, ...]
    """Where it is, the one to prefer first."""
    is_sampled_only: bool = False
    """Whether it is computed only for the last row of each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapMap:
    """The taps that an engine shows."""

    taps: Mapping[str, MappedTap]
    uncertain: Mapping[str, str]
    """Taps that are not taken from any tensor, and why."""
    row_order: RowOrder | None
    """How the rows of several requests lie, in the order of the step's work; None: a step is of one request."""
    num_tensors: int
    """Tensors that were looked at."""
    refusal: str | None = None
    """What the engine raised in a step of several requests."""

    @property
    def sites(self) -> frozenset[Site]:
        """All sites to watch."""
        return frozenset(source.site for tap in self.taps.values() for source in tap.sources)

    def read(
        self, shown: Mapping[Site, torch.Tensor], *, spans: Sequence[range], num_sampled: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """Return the rows of each tap in a step: [rows, W], or [num_sampled, W] where only those are computed.

        Args:
            shown: the tensors of the step.
            spans: positions of each request.
            num_sampled: rows of what is computed only for those that choose a token: one of these numbers.
        """
        few = [([range(num)], RowOrder.PACKED) for num in num_sampled]
        whole = [(spans, self.row_order or RowOrder.PACKED)]
        taps = {}
        for tap, mapped in self.taps.items():
            ways = few if mapped.is_sampled_only else whole
            there = [source for source in mapped.sources if source.site in shown]
            reads = (source.read_all(shown[source.site], *way) for way in ways for source in there)
            rows = next((item for item in reads if item is not None), None)
            if rows is not None:
                taps[tap] = rows
        return taps
