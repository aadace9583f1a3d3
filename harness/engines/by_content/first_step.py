"""The taps in a step of many requests of one token each.

At position 0 rotary turns nothing and attention is its only value, so that what is wrong in rotary, mask or cache does
not hide the map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.engines.by_content.columns import Columns
from harness.engines.by_content.finder import TapFinder
from harness.engines.by_content.names import TapNames
from harness.engines.by_content.sites import MODULE, Site
from harness.engines.by_content.tables import tables_of
from harness.engines.by_content.tap_map import TapEvidence
from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True)
class FirstTap:
    """A tap of the first step."""

    places: Sequence[tuple[Site, Columns]]
    """Where it is; several places may hold the same value at position 0, and others later."""
    evidence: TapEvidence


def find_first(
    hf: HFModel, ids: Sequence[int], seen: Mapping[Site, torch.Tensor], *, rounding: float
) -> dict[str, FirstTap]:
    """Return the taps among the tensors of a step of many requests of one token; `hf` is in float32."""
    sites = {site.name: site for site in seen}
    tables = tables_of({site.name: tensor for site, tensor in seen.items()}, len(ids))
    names = TapNames(hf.graph, [site.name for site in seen if site.what == MODULE])
    finder = TapFinder(hf, torch.tensor(ids)[:, None], tables, names, rounding=rounding)
    finder.find()
    return {
        tap: FirstTap([(sites[tables[fit.index].name], fit.columns) for fit in finder.holding(tap)], found.evidence)
        for tap, found in finder.found.items()
    }
