"""The map of an engine: which places of its run show which taps, and how to read them in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

import torch

from harness.engines.by_content.columns import Columns
from harness.engines.by_content.forwards import RowTeller, SiteRows
from harness.engines.by_content.steps import Site


class TapEvidence(StrEnum):
    """Why a tensor is taken for a tap."""

    CONTENT = "content", "it holds what HF computes from the engine's own values"
    CONSUMERS = "consumers", "HF computes what the engine computes next only from it"
    NAME = "name", "its name is that of the tap, or follows from those of other layers"
    NEAREST = "nearest", "it is by far the nearest to what HF computes"
    LOOKED_UP = "looked up", "it is HF's, since no tensor holds the embedding of the tokens"
    NOT_FINITE = "not finite", "it is the first tensor without a finite row after those that HF computes it from"
    NAMED = "named", "you named it"
    DEFINITION = "definition", "it is what the step returns"

    help: str

    def __new__(cls, word: str, text: str) -> "TapEvidence":
        """Make a member whose value is its name."""
        member = str.__new__(cls, word)
        member._value_, member.help = word, text
        return member


class StepBatch(Enum):
    """What a step of an engine may hold."""

    ONE_REQUEST = auto()
    PADDED = auto()
    """Several requests, all in prefill or all in decode."""
    MIXED = auto()
    """Several requests, in prefill beside decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSite:
    """A site that shows a tap."""

    site: Site
    columns: Columns


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
    teller: RowTeller
    """Tells which token each row belongs to."""
    batch: StepBatch
    """What a step may hold."""
    num_tensors: int
    """Tensors that were looked at."""
    num_forwards: tuple[int, int] | None = None
    """Fewest and most forwards in the steps that were learned from; None if the engine shows no look-up."""
    refusal: str | None = None
    """What the engine raised in a step of several requests."""
    num_columns: int = 0
    """Of what a step returns."""

    @property
    def sites(self) -> frozenset[Site]:
        """All sites to watch."""
        return frozenset(source.site for tap in self.taps.values() for source in tap.sources)

    def read(self, shown: Mapping[Site, SiteRows], last: Sequence[int]) -> dict[str, tuple[torch.Tensor, list[int]]]:
        """Return the values of each tap in a step, [some rows, W], and the indices of these rows in the work.

        Rows that one source does not have are those of the next one.

        Args:
            shown: rows of the sites in the order of the work.
            last: row of each request's last token.
        """
        taps = {}
        for tap, mapped in self.taps.items():
            values, rows = list[torch.Tensor](), torch.empty(0, dtype=torch.int64)
            for source in mapped.sources:
                item = shown.get(source.site)
                if item is None or item.values.shape[1] < source.columns.stop:
                    continue
                places = torch.tensor(last) if item.is_by_request else torch.arange(len(item.values))
                new = (item.is_known & ~torch.isin(places, rows)).nonzero()[:, 0]
                if len(new):
                    values.append(source.columns.of(item.values)[new])
                    rows = torch.cat([rows, places[new]])
            if values:
                order = rows.argsort()
                taps[tap] = torch.cat(values)[order], rows[order].tolist()
        return taps
