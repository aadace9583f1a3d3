"""Watching an engine whose model is a graph: the outputs of its nodes are read when a step has ended."""

from collections.abc import Callable, Collection, Mapping
from typing import Self

import numpy as np
import torch

from harness.engines.by_content.sites import RETURNED, See, Site


class NodeOutputs:
    """Shows what the nodes have made in a step; see `Watching`."""

    def __init__(
        self,
        outputs: Mapping[Site, Callable[[], np.ndarray]],
        see: See,
        only: Collection[Site] | None,
    ) -> None:
        """Take the nodes in the order of the run, each with what reads its output of the step that has just run."""
        self._outputs = {site: read for site, read in outputs.items() if only is None or site in only}
        self._see = see

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def returned(self, value: torch.Tensor) -> None:
        """Show all outputs, then what the step returns."""
        for site, read in self._outputs.items():
            array = read()
            if array.dtype.kind == "f" and array.size:
                self._see(site, torch.from_numpy(array))
        self._see(Site("", 0, RETURNED), value)
