"""Models of ONNX Runtime GenAI as an engine; which node's output is which tap is found by what it holds."""

import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import onnx
import onnxruntime_genai as genai
import torch

from harness.engines.adapter import engine_refusals, refuse_unknown_options
from harness.engines.by_content import StepEngine
from harness.engines.by_content.sites import RETURNED, See, Site
from harness.engines.by_content.steps import Work
from harness.errors import Code, HarnessError

_GRAPH = "model.onnx"


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> StepEngine:
    """Open an export of a checkpoint, `export=DIR`, as `python -m onnxruntime_genai.models.builder` writes it.

    Raises:
        HarnessError: BAD_OPTION: no export is named; ENGINE_CANNOT_SERVE: it cannot be opened, or not on that device.
    """
    refuse_unknown_options("onnxruntime", options, ("export",))
    export = Path(options.get("export", ""))
    if not (export / _GRAPH).is_file():
        raise HarnessError(
            Code.BAD_OPTION,
            "the engine onnxruntime runs an export of the checkpoint, which is not there",
            where="--engine-option export=",
            expected=f"a folder with {_GRAPH} and genai_config.json",
            actual=options.get("export", "none"),
            hint=f"python -m onnxruntime_genai.models.builder -i {folder} -o DIR -p fp32 -e cpu",
        )
    if device != "cpu":
        what = "ONNX Runtime is run on the CPU here"
        raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="--device", expected="cpu", actual=device)
    with engine_refusals("onnxruntime-genai", export):
        stepper = GenAIStepper(export)
    return StepEngine(lambda: stepper, name="onnxruntime", folder=folder, dtype=dtype)


class GenAIStepper:
    """A model of ONNX Runtime GenAI, one request a step, with a generator for each."""

    def __init__(self, export: Path) -> None:
        """Open an export, with every node's outputs as outputs of the graph."""
        with tempfile.TemporaryDirectory() as folder:
            self._sites = with_all_outputs(export, Path(folder))
            self._model = genai.Model(folder)
        self._generators: dict[int, Any] = {}

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`.

        Raises:
            ValueError: the work is of several requests.
        """
        ((request, tokens, _first),) = work
        if request not in self._generators:
            self._generators[request] = genai.Generator(self._model, genai.GeneratorParams(self._model))
        generator = self._generators[request]
        generator.append_tokens([tokens])
        return torch.from_numpy(generator.get_logits()).float()[0, -1:]

    def finish(self, request: int) -> None:
        """Forget a request."""
        self._generators.pop(request, None)

    def watching(self, see: See, only: Collection[Site] | None) -> "NodeOutputs":
        """Watch the outputs of the nodes."""
        return NodeOutputs(self._generators, self._sites, see, only)


class NodeOutputs:
    """Shows what the nodes of the latest step have made."""

    def __init__(
        self,
        generators: Mapping[int, Any],
        sites: Sequence[tuple[Site, str]],
        see: See,
        only: Collection[Site] | None,
    ) -> None:
        """Take the generators, of which the latest one runs, and the outputs' names."""
        self._generators, self._see = generators, see
        self._sites = [each for each in sites if only is None or each[0] in only]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def returned(self, value: torch.Tensor) -> None:
        """Show all outputs, then what the step returns."""
        generator = list(self._generators.values())[-1]
        for site, name in self._sites:
            array = generator.get_output(name)
            if array.dtype.kind == "f" and array.size:
                self._see(site, torch.from_numpy(array))
        self._see(Site("", 0, RETURNED), value)


def with_all_outputs(export: Path, folder: Path) -> list[tuple[Site, str]]:
    """Copy an export with every node's outputs as outputs of its graph; return their sites and names."""
    shutil.copytree(export, folder, dirs_exist_ok=True)
    model = onnx.load(folder / _GRAPH, load_external_data=False)
    known = {output.name for output in model.graph.output}
    sites = []
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name:
                path = node.name.strip("/").replace("/", ".")
                sites.append((Site(path, 0, node.op_type, place=place), name))
                if name not in known:
                    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    onnx.save(model, folder / _GRAPH)
    return sites
