"""Steps of an engine with all that it computes, and the tensors that may be a tap."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from harness.engines.by_content.rows import RowLayout, layouts
from harness.engines.by_content.sites import Site, SiteWatcher

Work = Sequence[tuple[int, list[int], int]]
"""What a step computes: of each request its number, token ids, and the position of the first of them."""


class Stepper(Protocol):
    """A live engine: any object that computes steps."""

    # An object whose steps compute all earlier tokens of a request again has an attribute `recomputes`, which is true.

    def step(self, work: Work) -> torch.Tensor:
        """Compute the tokens, and return the logits of each request's last one, [requests, vocabulary]."""


def watched_step(stepper: Stepper, names: Mapping[nn.Module, str], work: Work) -> dict[Site, torch.Tensor]:
    """Run a step and return copies of all tensors that it computes, in the order of the run."""
    seen: dict[Site, torch.Tensor] = {}

    def see(site: Site, tensor: torch.Tensor) -> None:
        seen[site] = tensor.to("cpu", copy=True)

    with torch.no_grad(), SiteWatcher(names, see) as watcher:
        watcher.returned(stepper.step(work))
    return seen


def recomputes(stepper: Stepper) -> bool:
    """Whether each step of an engine computes all earlier tokens of its request again."""
    return bool(getattr(stepper, "recomputes", False))


def one_token_steps(
    stepper: Stepper, names: Mapping[nn.Module, str], ids: Sequence[int], numbers: Iterator[int]
) -> dict[Site, torch.Tensor]:
    """Return the tensors of many requests of one token: of one step, or side by side of a step for each."""
    works: list[tuple[int, list[int], int]] = [(next(numbers), [token], 0) for token in ids]
    try:
        return watched_step(stepper, names, works)
    except ValueError:  # an engine of one request a step
        single = [watched_step(stepper, names, [work]) for work in works]
    common = [site for site in single[0] if all(site in step for step in single)]
    same = [site for site in common if len({step[site].shape for step in single}) == 1]
    return {site: torch.stack([step[site] for step in single]) for site in same}


@dataclass(frozen=True, slots=True)
class Table:
    """A tensor of the first step, as rows."""

    site: Site
    layout: RowLayout
    rows: torch.Tensor
    """[T, any]."""


def tables_of(seen: Mapping[Site, torch.Tensor], num_rows: int) -> list[Table]:
    """Return the tensors of a step that may have a row for each token."""
    return [
        Table(site, layout, rows)
        for site, tensor in seen.items()
        for layout in layouts(tensor.shape, num_rows)
        if tensor.dim() and (rows := layout.rows(tensor, num_rows)) is not None and rows.shape[1]
    ]


def sites_elsewhere(site: Site, layer: int, other: int) -> Iterator[Site]:
    """Yield the sites that may be to another layer what a site is to its own: another module, or another call of it."""
    parts = site.path.split(".")
    shifted = [str(other) if part == str(layer) else part for part in parts]
    if shifted != parts:
        yield replace(site, path=".".join(shifted))
    if site.path:
        yield replace(site, call=site.call + other - layer)
