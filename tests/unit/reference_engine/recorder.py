"""An observer that keeps everything, by request and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference_engine import StepInfo


class Recorder:
    """Copies each tap of each step."""

    def __init__(self) -> None:
        self.steps: list[StepInfo] = []
        self.taps: list[dict[str, torch.Tensor]] = []
        self.sampled: list[list[int]] = []

    def begin_step(self, step: StepInfo) -> None:
        self.steps.append(step)
        self.taps.append({})

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        assert name not in self.taps[-1]
        self.taps[-1][name] = tensor.clone()

    def end_step(self, sampled: Sequence[int]) -> None:
        self.sampled.append(list(sampled))

    def rows(self, name: str, request_id: int) -> torch.Tensor:
        """All rows of a tap of one request, by position; a row computed again replaces the former one."""
        by_position: dict[int, torch.Tensor] = {}
        for step, taps in zip(self.steps, self.taps, strict=True):
            if name in taps:
                rows = step.sampled_rows if name == "lm_head" else range(len(step.positions))
                for index, row in enumerate(rows):
                    if step.request_ids[row] == request_id:
                        by_position[step.positions[row]] = taps[name][index]
        return torch.stack([by_position[position] for position in sorted(by_position)])

    def logits(self, request_id: int) -> torch.Tensor:
        return self.rows("lm_head", request_id)


def assert_same_rows(request_id: int, actual: Recorder, expected: Recorder) -> None:
    """Compare logits and cached keys of a request under two backends in float32."""
    for tap in ("lm_head", "model.layers.1.k_cache"):
        rows = (recorder.rows(tap, request_id) for recorder in (actual, expected))
        torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
