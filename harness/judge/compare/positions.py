"""The growth of the error in the hidden state from token to token."""

from collections.abc import Iterator

from harness.formats.taps import Graph
from harness.judge.compare.propagated import Propagation
from harness.results.check import PositionError

MAX_POSITIONS = 256
"""Of longer requests neighbouring positions share an entry."""


def position_errors(propagation: Propagation, graph: Graph) -> tuple[PositionError, ...]:
    """Return median and largest ratio by position, at the deepest tap that was compared at every row.

    The head is left out: an engine may compute it only where it samples.
    """
    compared = [op.tap for op in graph if op.tap in propagation.errors and not op.sampled_only and not op.is_kept]
    return tuple(_by_position(propagation, compared[-1])) if compared else ()


def _by_position(propagation: Propagation, tap: str) -> Iterator[PositionError]:
    errors = propagation.errors[tap]
    positions = errors.rows.position
    if not len(positions):
        return
    width = -(-(int(positions.max()) + 1) // MAX_POSITIONS)
    bins = positions // width
    for place in bins.unique().tolist():
        ratio = errors.ratio[bins == place]
        yield PositionError(
            tap=tap, position=place * width, ratio_median=float(ratio.median()), ratio_max=float(ratio.max())
        )
