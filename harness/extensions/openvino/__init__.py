"""Models of OpenVINO as an engine; which node's output is which tap is found by what it holds."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch

from harness.engines.adapter import engine_refusals
from harness.engines.by_content import StepEngine
from harness.engines.by_content.steps import See, Site, Work
from harness.errors import Code, HarnessError
from harness.extensions.exports.engine import NodeOutputs, export_folder
from harness.extensions.exports.openvino_graph import GRAPH_NAME

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
    export = export_folder("openvino", folder, options, graph=GRAPH_NAME, command=command)
    for option, value, served in (("--device", device, "cpu"), ("--dtype", dtype, "float32")):
        if value != served:
            what = "OpenVINO is run on the CPU here, in float32: in others it rounds at places of its own choice"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=option, expected=served, actual=value)
    with engine_refusals("openvino", export):
        stepper = OpenVINOStepper(export / GRAPH_NAME)
    return StepEngine(lambda: stepper, name="openvino", folder=folder, dtype=dtype)


@dataclass(slots=True)
class _Batch:
    """Requests that run side by side, padded on the left; their cache is the state of a request for inference."""

    requests: list[int]
    running: Any
    mask: np.ndarray
    """[requests, tokens of the cache] int64, 0 for padding."""


class OpenVINOStepper:
    """A model whose KV cache is the state of a request for inference: of one request, or of a batch."""

    rewinds = True

    def __init__(self, graph: Path) -> None:
        """Open a graph, with the outputs of its nodes as outputs of its own."""
        core = openvino.Core()
        model = core.read_model(graph)
        self.notes = ("set in the engine: " + ", ".join(f"{name}={value}" for name, value in _SETTINGS.items()),)
        self._outputs = {site: partial(self._read, place) for site, place in with_all_outputs(model)}
        self._inputs = {item.get_any_name() for item in model.inputs}
        self._model = core.compile_model(model, "CPU", _SETTINGS)
        self._batches: dict[int, _Batch] = {}
        self._ended: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        """The caches of requests that have left their batch."""
        self._latest: Any = None

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`; goes back as openvino-genai does, which cuts the state off."""
        batch = self._batch_of([request for request, _, _ in work])
        kept = [batch.requests.index(request) for request, _, _ in work]
        left = {item: at for at, item in enumerate(batch.requests) if at not in kept and item in self._batches}
        self._ended |= {item: _rows_of(batch, at) for item, at in left.items()}
        too_many = int(batch.mask[kept[0]].sum()) - work[0][2]  # padding is on the left
        if len(work) == 1 and too_many > 0:
            _cut_off(batch, batch.mask.shape[1] - too_many)
        lengths = [len(tokens) for _, tokens, _ in work]
        width = max(lengths)
        padding = [width - length for length in lengths]
        mask = np.array(
            [[0] * pad + [1] * length for pad, length in zip(padding, lengths, strict=True)], dtype=np.int64
        )
        batch.requests = [request for request, _, _ in work]
        batch.mask = np.concatenate((batch.mask[kept], mask), axis=1)
        ids = [[0] * pad + tokens for pad, (_, tokens, _) in zip(padding, work, strict=True)]
        inputs = {
            "input_ids": np.array(ids, dtype=np.int64),
            "attention_mask": batch.mask,
            "position_ids": np.maximum(batch.mask.cumsum(axis=1) - 1, 0)[:, -width:],
            "beam_idx": np.array(kept, dtype=np.int32),
        }
        self._latest = batch.running
        self._latest.infer({name: array for name, array in inputs.items() if name in self._inputs})
        logits = torch.from_numpy(self._read(0))
        return logits[0] if len(work) == 1 else logits[:, -1]

    def _batch_of(self, requests: list[int]) -> _Batch:
        """Return the batch of requests; of those that are not in one yet, a new one.

        Raises:
            ValueError: they are in several: a batch only becomes smaller.
        """
        batch = self._batches.get(requests[0])
        if batch is None:
            batch = _Batch(list(requests), self._model.create_infer_request(), np.zeros((len(requests), 0), np.int64))
            self._batches |= dict.fromkeys(requests, batch)
        if any(self._batches.get(request) is not batch for request in requests):
            raise ValueError("a batch of OpenVINO takes no more requests when it runs")
        return batch

    def cached(self, request: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values that each layer keeps, [positions, KV heads, head size]: see `Cached`."""
        batch = self._batches[request]
        return self._ended[request] if request in self._ended else _rows_of(batch, batch.requests.index(request))

    def finish(self, request: int) -> None:
        """Forget a request."""
        self._batches.pop(request, None)
        self._ended.pop(request, None)

    def watching(self, see: See, only: Collection[Site] | None) -> NodeOutputs:
        """Watch the outputs of the nodes."""
        return NodeOutputs(self._outputs, see, only)

    def _read(self, place: int) -> np.ndarray:
        """Return a copy of an output of the latest step: the next one writes into the same memory."""
        return np.array(self._latest.get_output_tensor(place).data)


def _states(batch: _Batch) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yield the states that are keys or values, [requests, KV heads, tokens, head size], by layer and part."""
    for state in batch.running.query_state():
        place = _place_in_cache(state.name)
        if place is not None:
            yield place, state


def _cut_off(batch: _Batch, num_tokens: int) -> None:
    """Keep the first tokens of a cache, padding among them."""
    for _place, state in _states(batch):
        state.state = openvino.Tensor(np.ascontiguousarray(state.state.data[:, :, :num_tokens]))
    batch.mask = batch.mask[:, :num_tokens]


def _rows_of(batch: _Batch, at: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return what the cache holds of a request by layer, [positions, KV heads, head size] twice, without padding."""
    is_real = batch.mask[at].astype(bool)
    kept = {place: torch.from_numpy(state.state.data[at][:, is_real].copy()) for place, state in _states(batch)}
    return {
        layer: (kept[layer, "key"].transpose(0, 1), kept[layer, "value"].transpose(0, 1))
        for layer in {layer for layer, _part in kept}
    }


def _place_in_cache(state: str) -> tuple[int, str] | None:
    """Return the layer of a state, and which part of the cache it is; None for any other state."""
    match = re.search(r"\.(\d+)\.(key|value)$", state)
    return None if match is None else (int(match[1]), match[2])


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
