"""Engines that run a graph, exported from a checkpoint: where it is, and the outputs of its nodes after a step."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Self

import numpy as np
import torch

from harness.engines.adapter import refuse_unknown_options
from harness.engines.by_content.steps import RETURNED, See, Site
from harness.errors import Code, HarnessError
from harness.extensions.exports.checkpoint import exported_folder
from harness.formats.checkpoint.quantised import served_folder


def export_folder(engine: str, folder: Path, options: Mapping[str, str], *, graph: str, command: str) -> Path:
    """Return the folder of an export, in which there is a file `graph`: `export=DIR`, or the checkpoint's own.

    Raises:
        HarnessError: BAD_OPTION: an option is unknown, or there is no such folder.
    """
    refuse_unknown_options(engine, options, ("export",))
    export = Path(options.get("export", exported_folder(served_folder(folder)) or ""))
    if not (export / graph).is_file():
        raise HarnessError(
            Code.BAD_OPTION,
            f"the engine {engine} runs an export of the checkpoint, which is not there",
            where="--engine-option export=",
            expected=f"a folder with {graph}",
            actual=options.get("export", "none"),
            hint=command,
        )
    return export


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
