"""Models of ONNX Runtime GenAI as an engine; which node's output is which tap is found by what it holds."""

import json
import shutil
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime_genai as genai
import torch

from harness.base.files import scratch_folder
from harness.engines.adapter import engine_refusals
from harness.engines.by_content import StepEngine
from harness.engines.by_content.steps import See, Site, Work
from harness.errors import Code, HarnessError
from harness.extensions.exports.engine import NodeOutputs, export_folder
from harness.extensions.exports.onnx_graph import GRAPH_NAME


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> StepEngine:
    """Open an export of a checkpoint, as `python -m onnxruntime_genai.models.builder` writes it.

    It is the model itself, or `export=DIR`.

    Raises:
        HarnessError: BAD_OPTION: no export is named; ENGINE_CANNOT_SERVE: it cannot be opened, or not on that device.
    """
    command = f"python -m onnxruntime_genai.models.builder -i {folder} -o DIR -p fp32 -e cpu"
    export = export_folder("onnxruntime", folder, options, graph=GRAPH_NAME, command=command)
    if device != "cpu":
        what = "ONNX Runtime is run on the CPU here"
        raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="--device", expected="cpu", actual=device)
    with engine_refusals("onnxruntime-genai", export):
        stepper = GenAIStepper(export)
    return StepEngine(lambda: stepper, name="onnxruntime", folder=folder, dtype=dtype)


class GenAIStepper:
    """A model of ONNX Runtime GenAI, one request a step, with a generator for each."""

    rewinds = True

    def __init__(self, export: Path) -> None:
        """Open an export, with every node's outputs as outputs of the graph."""
        with scratch_folder("harness-") as folder:
            self._outputs = {site: partial(self._read, name) for site, name in with_all_outputs(export, folder)}
            self._model = genai.Model(str(folder))
        decoder = json.loads((export / "genai_config.json").read_text())["model"]["decoder"]
        self._logits: str = decoder["outputs"]["logits"]
        self._present = _present_names(decoder)
        self._generators: dict[int, Any] = {}
        self._running: Any = None

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`; goes back by `rewind_to`, as a chat does that is edited.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the runtime does not go back with this model.
            ValueError: the work is of several requests.
        """
        ((request, tokens, first),) = work
        if request not in self._generators:
            self._generators[request] = genai.Generator(self._model, genai.GeneratorParams(self._model))
        self._running = self._generators[request]
        if first < self._running.token_count():
            with engine_refusals("onnxruntime-genai", "rewind_to"):
                self._running.rewind_to(first)
        self._running.append_tokens([tokens])
        return torch.from_numpy(self._running.get_output(self._logits)).float()[0]

    def cached(self, request: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values that each layer keeps, [positions, KV heads, head size]: see `Cached`."""
        generator = self._generators[request]
        kept = [
            torch.from_numpy(generator.get_output(name))[0, :, : generator.token_count()].transpose(0, 1)
            for name in self._present
        ]
        return dict(enumerate(zip(kept[::2], kept[1::2], strict=True)))

    def finish(self, request: int) -> None:
        """Forget a request."""
        self._generators.pop(request, None)

    def watching(self, see: See, only: Collection[Site] | None) -> NodeOutputs:
        """Watch the outputs of the nodes."""
        return NodeOutputs(self._outputs, see, only)

    def _read(self, name: str) -> Any:
        return self._running.get_output(name)


def _present_names(decoder: Mapping[str, Any]) -> list[str]:
    """Return the names of the graph's outputs that are the cache: keys and values of each layer in turn."""
    names = decoder["outputs"]["present_key_names"], decoder["outputs"]["present_value_names"]
    return [name % layer for layer in range(decoder["num_hidden_layers"]) for name in names]


def with_all_outputs(export: Path, folder: Path) -> list[tuple[Site, str]]:
    """Copy an export with every node's outputs as outputs of its graph; return their sites and names."""
    shutil.copytree(export, folder, dirs_exist_ok=True)
    model = onnx.load(folder / GRAPH_NAME, load_external_data=False)
    known = {output.name for output in model.graph.output}
    sites = []
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name:
                path = node.name.strip("/").replace("/", ".")
                sites.append((Site(path, 0, node.op_type, place=place), name))
                if name not in known:
                    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    onnx.save(model, folder / GRAPH_NAME)
    return sites
