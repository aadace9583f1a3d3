"""Models of OpenVINO as an engine; which node's output is which tap is found by what it holds."""

import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch

from harness.engines.adapter import engine_refusals
from harness.engines.by_content import StepEngine
from harness.engines.by_content.node_outputs import NodeOutputs
from harness.engines.by_content.sites import See, Site
from harness.engines.by_content.steps import Work
from harness.engines.export import export_folder
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.exports import exported_folder
from harness.formats.checkpoint.exports.openvino_graph import GRAPH_NAME
from harness.formats.checkpoint.quantised import served_folder

_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Without the second, 2026.4 keeps the cache in float16, but not in a graph that is watched: a pass would not speak of
what is run."""
_NO_VALUES = ("Parameter", "Result", "Constant", "ReadValue", "Assign")
"""Nodes that compute nothing."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> StepEngine:
    """Open an export of a checkpoint, as `optimum-cli export openvino` writes it.

    It is the model itself, or `export=DIR`.

    Raises:
        HarnessError: BAD_OPTION: no export is named; ENGINE_CANNOT_SERVE: it cannot be opened, or not on that device.
    """
    command = f"optimum-cli export openvino --model {folder} --task text-generation-with-past --weight-format fp32 DIR"
    own = exported_folder(served_folder(folder))
    export = export_folder("openvino", options, graph=GRAPH_NAME, command=command, served=own)
    for option, given, served in (("--device", device, "cpu"), ("--dtype", dtype, "float32")):
        if given != served:
            what = "OpenVINO is run on the CPU here, in float32: in others it rounds at places of its own choice"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=option, expected=served, actual=given)
    with engine_refusals("openvino", export):
        stepper = OpenVINOStepper(export / GRAPH_NAME)
    return StepEngine(lambda: stepper, name="openvino", folder=folder, dtype=dtype)


class OpenVINOStepper:
    """A model whose KV cache is the state of a request for inference, one request a step."""

    def __init__(self, graph: Path) -> None:
        """Open a graph, with the outputs of its nodes as outputs of its own."""
        core = openvino.Core()
        model = core.read_model(graph)
        self.notes = ("set in the engine: " + ", ".join(f"{name}={value}" for name, value in _SETTINGS.items()),)
        self._outputs = {site: partial(self._read, place) for site, place in with_all_outputs(model)}
        self._inputs = {each.get_any_name() for each in model.inputs}
        self._model = core.compile_model(model, "CPU", _SETTINGS)
        self._running: dict[int, Any] = {}
        self._latest: Any = None

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`.

        Raises:
            ValueError: the work is of several requests.
        """
        ((request, tokens, first),) = work
        if request not in self._running:
            self._running[request] = self._model.create_infer_request()
        self._latest = self._running[request]
        end = first + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(first, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self._latest.infer({name: array for name, array in inputs.items() if name in self._inputs})
        return torch.from_numpy(self._read(0))[0, -1:]

    def cached(self, request: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values that each layer keeps, [positions, KV heads, head size]: see `Cached`."""
        states = {
            _place_in_cache(state.name): np.array(state.state.data) for state in self._running[request].query_state()
        }
        kept = {
            place: torch.from_numpy(array)[0].transpose(0, 1) for place, array in states.items() if place is not None
        }
        layers = {layer for layer, _part in kept}
        return {layer: (kept[layer, "key"], kept[layer, "value"]) for layer in layers}

    def finish(self, request: int) -> None:
        """Forget a request."""
        self._running.pop(request, None)

    def watching(self, see: See, only: Collection[Site] | None) -> NodeOutputs:
        """Watch the outputs of the nodes."""
        return NodeOutputs(self._outputs, see, only)

    def _read(self, place: int) -> np.ndarray:
        """Return a copy of an output of the latest step: the next one writes into the same memory."""
        return np.array(self._latest.get_output_tensor(place).data)


def _place_in_cache(state: str) -> tuple[int, str] | None:
    """Return the layer of a state, and which part of the cache it is; None for any other state."""
    found = re.search(r"\.(\d+)\.(key|value)$", state)
    return None if found is None else (int(found[1]), found[2])


def with_all_outputs(model: Any) -> Iterator[tuple[Site, int]]:
    """Make the outputs of a graph's nodes that are numbers outputs of the graph; yield their sites and places."""
    for node in model.get_ordered_ops():
        kind, path = node.get_type_name(), node.get_friendly_name()
        if kind in _NO_VALUES:
            continue
        for place, output in enumerate(node.outputs()):
            rank = output.get_partial_shape().rank
            if output.get_element_type().is_real() and (rank.is_dynamic or rank.get_length() > 1):
                model.add_outputs([output])
                yield Site(path.removeprefix("__module."), 0, kind, place=place), len(model.outputs) - 1
