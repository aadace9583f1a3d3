"""Local judgement: every operation by itself, replayed by the oracle on the engine's own recorded inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.compare.align import Rows, chunks, is_readback, joined, step_rows, take
from harness.compare.bounds import EAGER_MODEL, ERROR_MODELS, ErrorModel, local_bound
from harness.compare.history import attention_inputs
from harness.compare.prefixes import Prefixes
from harness.compare.shapes import engine_dtype
from harness.compare.systematic import Effects
from harness.metrics import rounding_unit, row_metrics
from harness.oracle.replay import AttentionInputs, Replayed, Replayer
from harness.recording import Recording, Step
from harness.results import Effect
from harness.taps import DecoderGraph, Kind, Operation

EAGER = "scores rounded to the engine's dtype"
IN_PARTS = "added up from {} parts, each rounded"
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
"""Sites that tensor-parallel engines add up over their ranks."""
NUM_RANKS = (2, 4, 8)


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
    effect: Effect | None = None
    """A direction that the errors have over all rows."""
    through: tuple[str, ...] = ()
    """Taps that were not recorded and were computed on the way; empty where the operation was judged by itself."""


@dataclass(slots=True)
class _Parts:
    """Results of one operation, piece by piece."""

    rows: list[Rows] = field(default_factory=list)
    roundings: list[torch.Tensor] = field(default_factory=list)
    bound: list[torch.Tensor] = field(default_factory=list)
    effects: Effects | None = None

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
            effect=self.effects.strongest() if self.effects else None,
        )


def local_errors(
    recording: Recording, graph: DecoderGraph, replayer: Replayer
) -> Iterator[tuple[Operation, LocalErrors]]:
    """Replay every operation whose inputs and output were recorded; yield its errors in graph order.

    Args:
        recording: the engine's.
        graph: the operations to replay.
        replayer: the oracle's operations.
    """
    steps = [step for step in recording.steps if not is_readback(step)]
    prefixes = Prefixes(recording.manifest.requests)
    for layer in dict.fromkeys(operation.layer for operation in graph):
        with replayer.layer(layer):
            for operation in graph.of_layer(layer):
                errors = None
                if operation.kind is Kind.ATTENTION:
                    errors = _judge_attention(recording, operation, replayer, steps, prefixes)
                elif operation.kind is not Kind.CACHE:
                    errors = _judge(recording, operation, replayer, steps)
                if errors is not None:
                    yield operation, errors


def _judge(recording: Recording, operation: Operation, replayer: Replayer, steps: Sequence[Step]) -> LocalErrors | None:
    dtype = engine_dtype(recording)
    effects = Effects(operation.kind, dtype, replayer.decoder.head_dim())
    parts = _Parts(effects=effects)
    needed = {operation.tap, *operation.inputs}
    for chunk in chunks([step for step in steps if all(step.has(tap) for tap in needed)]):
        rows, actual, inputs = _gather(chunk, operation, recording)
        if len(rows):
            replayed = replayer.replay(operation, inputs, rows.position)
            is_given = _finite_rows(inputs, len(rows))
            parts.add(rows, *_errors(ERROR_MODELS[operation.kind], actual, replayed, is_given, dtype))
            effects.add(rows.position, actual, replayed.expected.cpu(), is_given)
    default = parts.joined()
    if default is None or operation.site not in ROW_PARALLEL or not bool(default.bad.any()):
        return default
    return min([default, *_judge_in_parts(recording, operation, replayer, steps)], key=lambda each: int(each.bad.sum()))


def _judge_in_parts(
    recording: Recording, operation: Operation, replayer: Replayer, steps: Sequence[Step]
) -> Iterator[LocalErrors]:
    """Judge a product as the ranks of a tensor-parallel engine compute it, under every number of them."""
    dtype, needed = engine_dtype(recording), {operation.tap, *operation.inputs}
    for num_ranks in NUM_RANKS:
        parts = _Parts()
        for chunk in chunks([step for step in steps if all(step.has(tap) for tap in needed)]):
            rows, actual, (x,) = _gather(chunk, operation, recording)
            if not len(rows) or x.flatten(1).shape[1] % num_ranks:
                continue
            amplification = replayer.replay(operation, [x], rows.position).amplification
            replayed = Replayed(expected=replayer.in_parts(operation, x, num_ranks, dtype), amplification=amplification)
            is_given = _finite_rows([x], len(rows))
            parts.add(rows, *_errors(ERROR_MODELS[operation.kind], actual, replayed, is_given, dtype))
        errors = parts.joined(IN_PARTS.format(num_ranks))
        if errors is not None:
            yield errors


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
    recording: Recording, operation: Operation, replayer: Replayer, steps: Sequence[Step], prefixes: Prefixes
) -> LocalErrors | None:
    """Judge attention against its definition; if that fails, against HF's eager convention, and keep the better fit."""
    assert operation.layer is not None
    dtype = engine_dtype(recording)
    effects = Effects(operation.kind, dtype, replayer.decoder.head_dim())
    defined = _Parts(effects=effects)
    eager = _Parts()
    for rows, actual, recorded in attention_inputs(operation, steps, prefixes):
        inputs, is_given = _without_holes(recorded)
        replayed = replayer.attention(operation.layer, inputs)
        defined.add(rows, *_errors(ERROR_MODELS[operation.kind], actual, replayed, is_given, dtype))
        effects.add(rows.position, actual, replayed.expected.cpu(), is_given)
    default = defined.joined()
    if default is None or not bool(default.bad.any()):
        return default
    for rows, actual, recorded in attention_inputs(operation, steps, prefixes):
        inputs, is_given = _without_holes(recorded)
        amplification = replayer.attention(operation.layer, inputs).amplification
        candidate = replayer.eager_attention(operation.layer, inputs).to(torch.float64)
        as_eager = Replayed(expected=candidate, amplification=amplification)
        eager.add(rows, *_errors(EAGER_MODEL, actual, as_eager, is_given, dtype))
    other = eager.joined(EAGER)
    assert other is not None
    return other if int(other.bad.sum()) < int(default.bad.sum()) else default


def _without_holes(inputs: AttentionInputs) -> tuple[AttentionInputs, torch.Tensor]:
    """Replace what is not finite in the history, and say which queries do not see it: [T] bool.

    A row of NaN that is masked for a query would still poison it in the product with the values.
    """
    sound = _finite_rows([inputs.key, inputs.value], len(inputs.key_position))
    is_given = _finite_rows([inputs.query], len(inputs.query_position))
    if bool(sound.all()):
        return inputs, is_given
    first_hole = int(inputs.key_position[~sound].min())
    cleaned = replace(inputs, key=torch.nan_to_num(inputs.key, 0, 0, 0), value=torch.nan_to_num(inputs.value, 0, 0, 0))
    return cleaned, is_given & (inputs.query_position < first_hole)


def _errors(
    model: ErrorModel, actual: torch.Tensor, replayed: Replayed, is_given: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error and the bound of each row in roundings.

    A row that is not finite though its inputs are (`is_given`) is infinitely wrong; one whose inputs are not finite
    cannot be judged.
    """
    metrics = row_metrics(actual, replayed.expected.cpu().view_as(actual))
    roundings = metrics.relative_l2 / rounding_unit(dtype)
    roundings = torch.where(metrics.is_finite, roundings, torch.inf)
    bound = local_bound(model, dtype, replayed, metrics)
    return torch.where(is_given, roundings, torch.nan), torch.nan_to_num(bound, nan=0.0)


def _finite_rows(inputs: Sequence[torch.Tensor], num_rows: int) -> torch.Tensor:
    """[rows] bool: every input of the row is finite."""
    finite = torch.ones(num_rows, dtype=torch.bool)
    for x in inputs:
        if x.is_floating_point():
            finite &= torch.isfinite(x.flatten(1)).all(dim=1).cpu()
    return finite
