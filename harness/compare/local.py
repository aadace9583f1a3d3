"""Local judgement: every operation by itself, replayed by the oracle on the engine's own recorded inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from harness.compare.align import Rows, chunks, is_readback, joined, step_rows, take
from harness.compare.bounds import EAGER_MODEL, ERROR_MODELS, ErrorModel, local_bound
from harness.compare.history import attention_inputs
from harness.metrics import RowMetrics, rounding_unit, row_metrics
from harness.oracle.replay import AttentionInputs, Replayed, Replayer
from harness.recording import Recording, Step
from harness.taps import DecoderGraph, Kind, Operation

EAGER = "scores rounded to the engine's dtype"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalErrors:
    """Local errors of one operation; tensors [rows] in the order of `rows`."""

    rows: Rows
    roundings: torch.Tensor
    """float64; infinite where the engine's row is not finite though its inputs are, NaN where the inputs are not."""
    bound: torch.Tensor
    """float64: the largest error that rounding explains."""
    bad: torch.Tensor
    """bool: out of bounds."""
    exact: bool
    convention: str | None = None


@dataclass(slots=True)
class _Parts:
    """Results of one operation, piece by piece."""

    rows: list[Rows] = field(default_factory=list)
    roundings: list[torch.Tensor] = field(default_factory=list)
    bound: list[torch.Tensor] = field(default_factory=list)

    def add(self, rows: Rows, roundings: torch.Tensor, bound: torch.Tensor) -> None:
        self.rows.append(rows)
        self.roundings.append(roundings)
        self.bound.append(bound)

    def joined(self, convention: str | None = None) -> LocalErrors | None:
        if not self.rows:
            return None
        roundings, bound = torch.cat(self.roundings), torch.cat(self.bound)
        return LocalErrors(
            rows=Rows.concat(self.rows),
            roundings=roundings,
            bound=bound,
            bad=roundings > bound,
            exact=bool((roundings == 0).all()),
            convention=convention,
        )


def local_errors(
    recording: Recording, graph: DecoderGraph, replayer: Replayer, *, max_rows: int | None = None
) -> Iterator[tuple[Operation, LocalErrors]]:
    """Replay every operation whose inputs and output were recorded; yield its errors in graph order.

    Args:
        recording: the engine's.
        graph: the operations to replay.
        replayer: the oracle's operations.
        max_rows: look at the first steps only, until they hold this many rows (a self-test of the oracle).
    """
    dtype = getattr(torch, recording.manifest.dtype) if max_rows is None else None
    steps = _computing_steps(recording, max_rows)
    by_layer = {operation.layer: graph.of_layer(operation.layer) for operation in graph}
    for layer, operations in by_layer.items():
        with replayer.layer(layer):
            for operation in operations:
                errors = _judge(recording, operation, replayer, steps, dtype)
                if errors is not None:
                    yield operation, errors


def _computing_steps(recording: Recording, max_rows: int | None) -> list[Step]:
    steps, num_rows = [], 0
    for step in recording.steps:
        if is_readback(step):
            continue
        if max_rows is not None and num_rows >= max_rows:
            break
        steps.append(step)
        num_rows += step.entry.num_rows
    return steps


def _judge(
    recording: Recording, operation: Operation, replayer: Replayer, steps: Sequence[Step], dtype: torch.dtype | None
) -> LocalErrors | None:
    if operation.kind is Kind.CACHE:
        return None
    if operation.kind is Kind.ATTENTION:
        return _judge_attention(operation, replayer, steps, dtype)
    parts = _Parts()
    needed = {operation.tap, *operation.inputs}
    for chunk in chunks([step for step in steps if all(step.has(tap) for tap in needed)]):
        rows, actual, inputs = _gather(chunk, operation, recording)
        if not len(rows):
            continue
        replayed = replayer.replay(operation, inputs, rows.position)
        parts.add(*_errors(ERROR_MODELS[operation.kind], rows, actual, replayed, inputs, dtype))
    return parts.joined()


def _gather(
    chunk: Sequence[Step], operation: Operation, recording: Recording
) -> tuple[Rows, torch.Tensor, list[torch.Tensor]]:
    """Collect an operation's rows of several steps: identity, output and inputs."""
    rows, actual, inputs = [], [], []
    for step in chunk:
        own, covered = step_rows(step, operation.tap), step.rows_of(operation.tap)
        output = step.tap(operation.tap)
        taken = [take(step, tap, covered) for tap in operation.inputs]
        keep = torch.ones(len(own), dtype=torch.bool)
        for _, found in taken:
            keep &= True if found is None else found
        whole = bool(keep.all())
        rows.append(own if whole else own.select(keep))
        actual.append(output if whole else output[keep])
        inputs.append([x if whole else x[keep if found is None else keep[found]] for x, found in taken])
    identity = Rows.concat(rows)
    if operation.kind is Kind.EMBEDDING:
        return identity, joined(actual), [_tokens(recording, identity)]
    return identity, joined(actual), [joined(column) for column in zip(*inputs, strict=True)]


def _tokens(recording: Recording, rows: Rows) -> torch.Tensor:
    """Token ids of the rows, from the manifest: what the engine was asked to compute, not what it claims to have."""
    tokens = {request.id: request.token_ids for request in recording.manifest.requests}
    pairs = zip(rows.request.tolist(), rows.position.tolist(), strict=True)
    return torch.tensor([tokens[request][position] for request, position in pairs], dtype=torch.int64)


def _judge_attention(
    operation: Operation, replayer: Replayer, steps: Sequence[Step], dtype: torch.dtype | None
) -> LocalErrors | None:
    """Judge attention against its definition; if that fails, against HF's eager convention, and keep the better fit."""
    assert operation.layer is not None
    defined, eager = _Parts(), _Parts()
    for rows, actual, inputs in attention_inputs(operation, steps):
        replayed = replayer.attention(operation.layer, inputs)
        defined.add(*_errors(ERROR_MODELS[operation.kind], rows, actual, replayed, _tensors(inputs), dtype))
    default = defined.joined()
    if default is None or not bool(default.bad.any()):
        return default
    for rows, actual, inputs in attention_inputs(operation, steps):
        amplification = replayer.attention(operation.layer, inputs).amplification
        candidate = replayer.eager_attention(operation.layer, inputs).to(torch.float64)
        as_eager = Replayed(expected=candidate, amplification=amplification)
        eager.add(*_errors(EAGER_MODEL, rows, actual, as_eager, _tensors(inputs), dtype))
    other = eager.joined(EAGER)
    assert other is not None
    return other if int(other.bad.sum()) < int(default.bad.sum()) else default


def _tensors(inputs: AttentionInputs) -> list[torch.Tensor]:
    return [inputs.query, inputs.key, inputs.value]


def _errors(
    model: ErrorModel,
    rows: Rows,
    actual: torch.Tensor,
    replayed: Replayed,
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Return the rows with their errors and bounds in roundings."""
    dtype = dtype or actual.dtype
    expected = replayed.expected.cpu()
    metrics: RowMetrics = row_metrics(actual, expected.view_as(actual))
    roundings = metrics.relative_l2 / rounding_unit(dtype)
    bound = local_bound(model, dtype, replayed, metrics)
    not_finite = ~metrics.is_finite
    if bool(not_finite.any()):
        roundings = torch.where(not_finite, torch.inf, roundings)
    not_judgeable = ~torch.isfinite(metrics.expected_norm)
    if bool(not_judgeable.any()):
        caused_here = _finite_inputs(inputs, len(rows)) & not_finite
        roundings = torch.where(not_judgeable & ~caused_here, torch.nan, roundings)
    return rows, roundings, torch.nan_to_num(bound, nan=0.0)


def _finite_inputs(inputs: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """[rows] bool: the inputs of the row are finite; attention's history counts for all of its rows."""
    finite = torch.ones(num_rows, dtype=torch.bool)
    for x in inputs:
        if x.is_floating_point():
            ok = torch.isfinite(x.flatten(1)).all(dim=1).cpu()
            finite &= ok if len(ok) == num_rows else bool(ok.all())
    return finite
