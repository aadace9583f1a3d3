"""The oracle checks itself: its own truth must replay to itself, or the graph does not describe the model.

A decoder may have modules of the right names and still compute something else between them (a scaled residual, a norm
after the attention, partial rotary). Then the replay of sound rows gives other numbers, here at once rather than as a
false alarm against an engine.
"""

import torch

from harness.errors import Code, HarnessError
from harness.metrics import rounding_unit, row_metrics
from harness.oracle.decoder import Decoder
from harness.oracle.replay import AttentionInputs, Replayer
from harness.recording import Recording, Step
from harness.taps import LOGITS, Kind, Operation

NUM_ROWS = 64
"""Rows of the first request that are replayed: enough for every operation, few enough to cost nothing."""
_LIMIT = 1e4
"""In roundings of the dtype the truth is kept in: 2.5e-4 in float32. A wrong graph is off by 1e-2 and more."""


def check_graph(decoder: Decoder, truth: Recording) -> None:
    """Replay every operation on the first rows of the truth.

    Raises:
        HarnessError: GRAPH_DOES_NOT_FIT: names the first operation that the graph describes wrongly.
    """
    if not truth.steps:
        return
    step, replayer = truth.steps[0], Replayer(decoder)
    for layer in dict.fromkeys(operation.layer for operation in decoder.graph):
        with replayer.layer(layer):
            for operation in decoder.graph.of_layer(layer):
                if operation.kind is not Kind.CACHE:
                    _check(operation, replayer, step, truth.manifest.requests[0].token_ids)


def _check(operation: Operation, replayer: Replayer, step: Step, token_ids: list[int]) -> None:
    actual, rows = step.tap(operation.tap)[:NUM_ROWS], slice(0, NUM_ROWS)
    if operation.tap == LOGITS:
        covered = step.rows_of(operation.tap)
        inputs = [step.tap(operation.inputs[0])[covered][:NUM_ROWS]]
    elif operation.kind is Kind.EMBEDDING:
        inputs = [torch.tensor(token_ids[:NUM_ROWS])]
    else:
        inputs = [step.tap(tap)[rows] for tap in operation.inputs]
    positions = step.position[rows].long()
    if operation.kind is Kind.ATTENTION:
        query, key, value = inputs
        history = AttentionInputs(
            query=query, key=key, value=value.view_as(key), query_position=positions, key_position=positions
        )
        expected = replayer.attention(int(operation.layer or 0), history).expected
    else:
        expected = replayer.replay(operation, inputs, positions).expected
    error = float((row_metrics(actual, expected.cpu().reshape(actual.shape)).relative_l2).max())
    if not error <= _LIMIT * rounding_unit(actual.dtype):
        raise HarnessError(
            Code.GRAPH_DOES_NOT_FIT,
            f"{type(replayer.decoder.model).__name__} computes {operation.tap} in another way than the graph says",
            where=operation.tap,
            expected=f"HF's own {operation.kind} of {', '.join(operation.inputs) or 'the token'}",
            actual=f"a row that differs by {error:.3g} relative",
            hint="this family needs a graph of its own in harness/taps.py",
        )
