"""One forward of HF's model in which the engine's values may replace HF's."""

from collections.abc import Callable

import torch

from harness.formats.taps import Operation
from harness.oracle.model import HFModel
from harness.oracle.watch import AttentionCall, as_rows, from_rows, run_attention, watching

Choose = Callable[[Operation, torch.Tensor], torch.Tensor | None]
"""Takes an operation and its value [rows, W]; returns a replacement [rows, W], or None to keep the value."""


class EndOfRun(Exception):  # noqa: N818 -- no error: it only ends the run
    """Raised by `Choose` to end the forward."""


def run_hf(hf: HFModel, ids: torch.Tensor, choose: Choose) -> None:
    """Run HF's model over tokens [requests, tokens], and call `choose` for the value of each tap."""
    with torch.no_grad(), watching(hf) as watch, watch.showing(_Choosing(hf, tuple(ids.shape), choose)):
        try:
            hf.run(input_ids=ids.to(hf.device), use_cache=False)
        except EndOfRun:
            return


class _Choosing:
    def __init__(self, hf: HFModel, shape: tuple[int, ...], choose: Choose) -> None:
        self._operations, self._shape, self._choose = hf.graph.by_source, shape, choose

    def see(self, source: str, value: torch.Tensor) -> torch.Tensor | None:
        operation = self._operations.get(source)
        if operation is None:
            return None
        rows = as_rows(value.detach(), operation.token_dim, *self._shape)
        # copies: HF may write into what a module returns (`clamp_` of queries)
        replacement = self._choose(operation, rows.reshape(len(rows), -1).to("cpu", copy=True))
        if replacement is None:
            return None
        replaced = replacement.to(value.device, value.dtype, copy=True).reshape(rows.shape)
        return from_rows(replaced, value, operation.token_dim)

    def attend(self, call: AttentionCall, function: Callable[..., object]) -> object:
        return run_attention(call, function)

    def choose(self, _source: str, _scores: torch.Tensor, _chosen: torch.Tensor) -> None:
        return None
