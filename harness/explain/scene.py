"""The wrong rows of one operation, with all that was recorded around them: what an explanation works on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from harness.compare.align import Locator, Rows, step_rows
from harness.explain.hypothesis import Hypothesis
from harness.explain.memory import Memory
from harness.explain.view import View
from harness.oracle.decoder import Decoder
from harness.oracle.precision import TRUTH_DTYPE
from harness.oracle.replay import Replayer
from harness.recording import Recording, Step
from harness.taps import EMBEDDING, Kind, Operation

_MAX_WEIGHT_ELEMENTS = 1 << 27


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Some rows of one operation that is wrong; explanations only read it.

    `R` rows, `W` elements of a row.
    """

    operation: Operation
    decoder: Decoder
    """With the operation's layer held in float64."""
    recording: Recording
    locator: Locator
    rows: Rows
    """The wrong rows that are looked at, R of them."""
    actual: torch.Tensor
    """[R, W] float64, as recorded; not finite where the engine's rows are not."""
    expected: torch.Tensor
    """[R, W] float64, the replay's."""
    inputs: Sequence[torch.Tensor]
    """[R, ...] float64 each, flat; token ids [R] for the embedding."""
    dtype: torch.dtype
    """What the engine computes in."""
    views: tuple[View, ...] = ()
    """Attention only: the rows of each request with the history they read, in the order of `rows`."""
    memory: Memory
    """Who wrote what into the KV cache."""

    @property
    def positions(self) -> torch.Tensor:
        """[R] int64."""
        return self.rows.position

    def select(self, keep: torch.Tensor) -> "Scene":
        """Return the scene of the rows where the mask [R] holds."""
        views, begin = [], 0
        for view in self.views:
            own = keep[begin : begin + len(view.rows)]
            begin += len(view.rows)
            if bool(own.any()):
                views.append(view.select(own))
        return replace(
            self,
            rows=self.rows.select(keep),
            actual=self.actual[keep],
            expected=self.expected[keep],
            inputs=[x[keep] for x in self.inputs],
            views=tuple(views),
        )

    def tap(self, name: str) -> torch.Tensor | None:
        """Return another tap at the same rows, [R, ...] float64 flat; None unless all of them were recorded."""
        return gathered(self.locator, name, self.rows)

    def replay(self, operation: Operation, inputs: Sequence[torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        """Return what an operation of the same layer gives on other inputs or positions: [rows, W] float64."""
        replayed = Replayer(self.decoder).replay(operation, list(inputs), positions)
        return replayed.expected.cpu().to(TRUTH_DTYPE).flatten(1)

    def weight(self, module: str, name: str = "weight") -> torch.Tensor | None:
        """Return a parameter in float64; None where there is none, or it is too large to be held in float64 beside."""
        try:
            tensor = getattr(self.decoder.module(module), name, None)
        except AttributeError:
            return None
        if not isinstance(tensor, torch.Tensor) or tensor.numel() > _MAX_WEIGHT_ELEMENTS:
            return None
        return tensor.detach().to("cpu", TRUTH_DTYPE)

    def siblings(self) -> list[Operation]:
        """Return the other operations of the same kind that read the same taps."""
        graph = self.decoder.graph
        own = self.operation
        return [op for op in graph if op.kind is own.kind and op.inputs == own.inputs and op.tap != own.tap]


def gathered(locator: Locator, tap: str, rows: Rows) -> torch.Tensor | None:
    """Return a tap at some rows, [rows, ...] float64 flat; None unless it was recorded at all of them.

    A row that was computed in several steps is taken from its own step where that has it, else from the last.
    """
    if tap not in locator.taps() or not len(rows):
        return None
    found = locator.find(tap, rows)
    if bool((found[:, 0] < 0).any()):
        return None
    taken = locator.gather(tap, found).to(TRUTH_DTYPE).flatten(1)
    elsewhere = (found[:, 0] != rows.step).nonzero()[:, 0].tolist()
    if not elsewhere:
        return taken
    taken = taken.clone()
    for at in elsewhere:
        step = locator.recording.steps[int(rows.step[at])]
        own = row_in_step(step, tap, int(rows.request[at]), int(rows.position[at]))
        if own is None:
            return None
        taken[at] = step.tap(tap)[own].to(TRUTH_DTYPE).flatten()
    return taken


def row_in_step(step: Step, tap: str, request: int, position: int) -> int | None:
    """Return the row of a tap in a step that is of this request and position."""
    if not step.has(tap):
        return None
    rows = step_rows(step, tap)
    here = ((rows.request == request) & (rows.position == position)).nonzero()[:, 0]
    return int(here[-1]) if len(here) else None


def row_inputs(locator: Locator, operation: Operation, rows: Rows) -> list[torch.Tensor] | None:
    """Return the inputs of an operation at some rows; None where one was not recorded."""
    if operation.kind is Kind.EMBEDDING or operation.tap == EMBEDDING:
        return [token_ids(locator.recording, rows)]
    inputs = [gathered(locator, tap, rows) for tap in operation.inputs]
    complete = [x for x in inputs if x is not None]
    return complete if len(complete) == len(inputs) else None


def token_ids(recording: Recording, rows: Rows) -> torch.Tensor:
    """Return the tokens that the rows were to be computed from: [rows] int64."""
    tokens = {request.id: request.token_ids for request in recording.manifest.requests}
    pairs = zip(rows.request.tolist(), rows.position.tolist(), strict=True)
    return torch.tensor([tokens[request][position] for request, position in pairs], dtype=torch.int64)


Explain = Callable[[Scene], Iterable[Hypothesis]]
"""One explanation: yields what might have been done, likelier first."""
