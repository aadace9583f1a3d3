"""The evidence for the causes: wrong rows of an operation, kept while the oracle has them at hand."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.attention_context import AttentionContext
from harness.judge.compare.batch import PaddedBatch
from harness.judge.compare.row_sample import spread
from harness.oracle.attention import scaling, visible_keys
from harness.oracle.paired import PartCall
from harness.oracle.watch import AttentionCall, window_of

MAX_ROWS = 192
"""Wrong rows of an operation that are kept."""
MAX_LAYERS = 3
"""Layers of which one and the same operation is kept: one fault repeats itself in every layer."""
_MAX_HISTORIES = 6
_MAX_ROWS_OF_HISTORY = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInputs:
    """What is needed to run the part of the model with an operation again, over all of a batch."""

    batch: PaddedBatch
    call: PartCall


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Wrong rows of one operation, `R` of them, with what they were computed from."""

    operation: Operation
    rows: Rows
    expected: torch.Tensor
    """[R, W] float64, what the rows should be."""
    inputs: Sequence[torch.Tensor]
    """[R, ...] float64 each, in the order of the operation's inputs; token ids of an embedding; empty for attention."""
    roundings: torch.Tensor
    bound: torch.Tensor
    dtype: torch.dtype
    """The unit that they are given in."""
    histories: tuple[AttentionContext, ...] = ()
    """Attention only; their rows one after the other are `rows`."""
    unrecorded: tuple[str, ...] = ()
    """Taps before the operation that were not recorded, so that HF computed them."""
    part_inputs: PartInputs | None = None
    """Of the first batch with wrong rows; None outside of the parts of the model."""

    def select(self, keep: torch.Tensor) -> "Evidence":
        """Return the evidence of some rows, given by their indices; of attention all stay."""
        if self.histories:
            return self
        return replace(
            self,
            rows=self.rows.select(keep),
            expected=self.expected[keep],
            inputs=[x[keep] for x in self.inputs],
            roundings=self.roundings[keep],
            bound=self.bound[keep],
        )


def histories(
    batch: PaddedBatch, call: AttentionCall, places: torch.Tensor
) -> tuple[tuple[AttentionContext, ...], torch.Tensor]:
    """Return the histories behind wrong rows of attention, of some rows of some requests, and their places."""
    found, kept = [], []
    lines = places // batch.num_tokens
    for line in spread(lines.unique().tolist(), _MAX_HISTORIES):
        own = torch.tensor(spread(sorted(places[lines == line].tolist()), _MAX_ROWS_OF_HISTORY))
        found.append(_history(batch, call, line, own))
        kept.append(own)
    return tuple(found), torch.cat(kept)


def _history(batch: PaddedBatch, call: AttentionCall, line: int, places: torch.Tensor) -> AttentionContext:
    sequence = batch.sequences[line]
    positions, length = places % batch.num_tokens, len(sequence)
    sinks = call.options.get("s_aux")
    return AttentionContext(
        rows=batch.rows(places),
        query=_heads(call.query[line][:, positions]),
        key=_heads(call.key[line][:, :length]),
        value=_heads(call.value[line][:, :length]),
        key_step=torch.where(sequence.is_own, sequence.step, -1),
        scale=scaling(call),
        window=window_of(call),
        seen=None if call.mask is None else _seen(call, line, positions, length),
        softcap=call.options.get("softcap"),
        sinks=None if sinks is None else sinks.detach().to("cpu", torch.float64).flatten(),
    )


def _seen(call: AttentionCall, line: int, positions: torch.Tensor, length: int) -> torch.Tensor | None:
    visible = visible_keys(call)[:, 0].cpu()
    own = visible[line if len(visible) > 1 else 0][positions, :length]
    return own if bool(own.any(dim=1).all()) else None


def _heads(x_NTH: torch.Tensor) -> torch.Tensor:
    return x_NTH.detach().transpose(0, 1).to("cpu", torch.float64)


def merged(parts: Sequence[Evidence]) -> Evidence:
    """Put the evidence of several batches together, and keep no more rows than of one."""
    first = parts[0]
    if len(parts) == 1:
        joined = first
    else:
        joined = replace(
            first,
            rows=Rows.concat([part.rows for part in parts]),
            expected=torch.cat([part.expected for part in parts]),
            inputs=[torch.cat(column) for column in zip(*(part.inputs for part in parts), strict=True)],
            roundings=torch.cat([part.roundings for part in parts]),
            bound=torch.cat([part.bound for part in parts]),
            histories=tuple(history for part in parts for history in part.histories)[:_MAX_HISTORIES],
        )
    if first.operation.kind is Kind.ATTENTION:
        return joined
    order = torch.argsort(joined.rows.request * (1 << 32) + joined.rows.position, stable=True).tolist()
    return joined.select(torch.tensor(spread(order, MAX_ROWS)))
