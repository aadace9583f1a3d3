"""The evidence for the causes: wrong rows of an operation, kept while the oracle has them at hand.

Of attention the evidence is an `AttentionContext`: some rows of one request, with every part of attention open to
change. `T` query rows, `S` history rows in the order of their positions, `N` query heads, `K` KV heads, `H` head size.

Causes and conventions are tried. `guarded` drops one that raises, and notes it.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from harness.errors import HarnessError
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import PaddedBatch, spread
from harness.oracle.attention import scaling, visible_keys
from harness.oracle.paired import PartCall
from harness.oracle.watch import AttentionCall, window_of

_PACKAGE = Path(__file__).parents[2]
_MAX_MESSAGE = 120
"""Characters of a message that a note keeps."""
Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """Rows of one request, and the history that each of them has to read."""

    rows: Rows
    """T of them."""
    query: torch.Tensor
    """[T, N, H] float64."""
    key: torch.Tensor
    """[S, K, H] float64, row s at position s."""
    value: torch.Tensor
    """[S, K, H] float64."""
    key_step: torch.Tensor
    """[S] int64: step in which the request computed the key; -1 for a key that was in the cache before."""
    scale: float
    window: int | None
    softcap: float | None = None
    seen: torch.Tensor | None = None
    """[T, S] bool: keys that HF's mask shows each query; None for all keys up to the query, within the window."""
    sinks: torch.Tensor | None = None
    """[N] float64: logits that take part in the softmax without a value."""
    bias: torch.Tensor | None = None
    """[N or 1, T, S] float64: what is added to the scores, as ALiBi does, by the place of a key and not by the key."""

    @property
    def num_groups(self) -> int:
        """Query heads of one KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def distance(self) -> torch.Tensor:
        """[T, S]: positions from the key to the query; negative for later keys."""
        return self.rows.position[:, None] - torch.arange(len(self.key))

    @property
    def is_computed(self) -> torch.Tensor:
        """[T, S] bool: keys that existed in the query's step."""
        return self.key_step <= self.rows.step[:, None]

    @property
    def first_of_step(self) -> torch.Tensor:
        """[T] int64: the first position that each query's own step computed."""
        return (self.key_step >= self.rows.step[:, None]).int().argmax(dim=1)

    def visible(self) -> torch.Tensor:
        """[T, S] bool: what each query may see."""
        if self.seen is not None:
            return self.seen
        distance = self.distance
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)

    def scores(
        self, *, key: torch.Tensor | None = None, scale: float | None = None, heads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the scores [N, T, S], unmasked, with the bias of each place.

        Args:
            key: [S, K, H] in the place of the recorded keys.
            scale: in the place of the model's.
            heads: [N], the KV head that each query head reads.
        """
        scores = self.products(key=key, scale=scale, heads=heads)
        return scores if self.bias is None else scores + self.bias

    def products(
        self, *, key: torch.Tensor | None = None, scale: float | None = None, heads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the scores [N, T, M] of any keys, without a bias; for the arguments see `scores`."""
        k_NSH = self.spread(self.key if key is None else key, heads)
        scores = self.query.transpose(0, 1) @ k_NSH.transpose(1, 2) * (self.scale if scale is None else scale)
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def spread(self, x_SKH: torch.Tensor, heads: torch.Tensor | None = None) -> torch.Tensor:
        """Return [N, S, H]: the KV head that each query head reads."""
        default_heads = torch.arange(self.query.shape[1]) // self.num_groups
        return x_SKH.transpose(0, 1)[default_heads if heads is None else heads]

    def attend(
        self,
        *,
        visible: torch.Tensor | None = None,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        scale: float | None = None,
        heads: torch.Tensor | None = None,
        value_heads: torch.Tensor | None = None,
        softmax: Elementwise | None = None,
    ) -> torch.Tensor:
        """Return the context [T, N*H] of attention, with parts replaced.

        Args:
            visible: [T, S] bool.
            key: [S, K, H].
            value: [S, K, H].
            scale: factor of the scores.
            heads: [N], the KV head that each query head reads.
            value_heads: [N], the KV head whose values it reads; None for that of the keys.
            softmax: from masked scores to probabilities.
        """
        scores = self.scores(key=key, scale=scale, heads=heads)
        mask = self.visible() if visible is None else visible
        masked = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            column = self.sinks[:, None, None].expand(*masked.shape[:2], 1)
            masked = torch.cat((masked, column), dim=-1)
        p_NTS = (softmax or _softmax)(masked)[..., : scores.shape[-1]]
        v_NSH = self.spread(self.value if value is None else value, heads if value_heads is None else value_heads)
        return (p_NTS.nan_to_num(0.0) @ v_NSH).transpose(0, 1).flatten(1)

    def select(self, keep: torch.Tensor) -> "AttentionContext":
        """Return the context of some of the rows."""
        return replace(
            self,
            rows=self.rows.select(keep),
            query=self.query[keep],
            seen=None if self.seen is None else self.seen[keep],
            bias=None if self.bias is None else self.bias[:, keep],
        )


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(dim=-1)


MAX_ROWS = 192
"""Largest number of wrong rows of an operation that are kept."""
MAX_LAYERS = 3
"""Layers of which the same operation is kept: one fault repeats itself in every layer."""
_MAX_HISTORIES = 6
_MAX_ROWS_OF_HISTORY = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PartInputs:
    """The batch and the call with which the part of the model with an operation can be run again."""

    batch: PaddedBatch
    call: PartCall


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Wrong rows of one operation, `R` of them, with the inputs that they were computed from."""

    operation: Operation
    rows: Rows
    expected: torch.Tensor
    """[R, W] float64: what the rows should be."""
    inputs: Sequence[torch.Tensor]
    """[R, ...] float64 each, in the order of the operation's inputs; token ids of an embedding; empty for attention."""
    roundings: torch.Tensor
    """[R] how far the rows are off, in roundings to `dtype`."""
    bound: torch.Tensor
    """[R] how far rounding explains that they are off."""
    dtype: torch.dtype
    """The dtype that the operation's tensors are rounded to: its rounding is the unit of the errors."""
    views: tuple[AttentionContext, ...] = ()
    """Attention only: the rows of each request with the history they read, in the order of `rows`."""
    unrecorded: tuple[str, ...] = ()
    """Taps before the operation that were not recorded: the inputs are what HF computes from those that were."""
    part_inputs: PartInputs | None = None
    """Of the first batch with wrong rows; None outside of the parts of the model."""

    def take(self, order: torch.Tensor) -> Self:
        """Return the rows with these numbers [n], in their order, or of a mask [R]; without views."""
        return replace(
            self,
            rows=self.rows.select(order),
            expected=self.expected[order],
            inputs=[x[order] for x in self.inputs],
            roundings=self.roundings[order],
            bound=self.bound[order],
            views=(),
        )


def histories(
    batch: PaddedBatch, call: AttentionCall, places: torch.Tensor
) -> tuple[tuple[AttentionContext, ...], torch.Tensor]:
    """Return the histories of a choice of wrong rows of attention, and the places of these rows."""
    contexts, kept = [], []
    lines = places // batch.num_tokens
    for line in spread(lines.unique().tolist(), _MAX_HISTORIES):
        chosen = torch.tensor(spread(sorted(places[lines == line].tolist()), _MAX_ROWS_OF_HISTORY))
        contexts.append(_history(batch, call, line, chosen))
        kept.append(chosen)
    return tuple(contexts), torch.cat(kept)


def _history(batch: PaddedBatch, call: AttentionCall, line: int, places: torch.Tensor) -> AttentionContext:
    sequence = batch.sequences[line]
    positions, length = places % batch.num_tokens, len(sequence)
    sinks, visible = call.options.get("s_aux"), visible_keys(call, positions.to(call.query.device))
    visible = visible[line if len(visible) > 1 else 0][..., :length].cpu()
    return AttentionContext(
        rows=batch.rows(places),
        query=_heads(call.query[line][:, positions]),
        key=_heads(call.key[line][:, :length]),
        value=_heads(call.value[line][:, :length]),
        key_step=torch.where(sequence.is_own, sequence.step, -1),
        scale=scaling(call),
        window=window_of(call),
        seen=None if call.mask is None or not bool(visible[0].any(dim=1).all()) else visible[0],
        softcap=call.options.get("softcap"),
        sinks=None if sinks is None else sinks.detach().to("cpu", torch.float64).flatten(),
        bias=_bias(call, line, positions, visible),
    )


def _bias(call: AttentionCall, line: int, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor | None:
    """Return what a mask adds where a key is `visible` [N or 1, T, S], zero at most; None for zero everywhere."""
    if call.mask is None or call.mask.dtype == torch.bool:
        return None
    mask = call.mask[line if len(call.mask) > 1 else 0]
    mask = mask[:, positions, : visible.shape[2]].to("cpu", torch.float64)
    seen = mask.masked_fill(~visible, -torch.inf)
    bias = (seen - seen.amax(dim=-1, keepdim=True)).masked_fill(~visible, 0.0)  # of a row, all may be higher
    return bias if bool(bias.any()) else None


def _heads(x_NTH: torch.Tensor) -> torch.Tensor:
    return x_NTH.detach().transpose(0, 1).to("cpu", torch.float64)


def merged(parts: Sequence[Evidence]) -> Evidence:
    """Join the evidence of several batches, and keep no more rows than of one batch."""
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
            views=tuple(view for part in parts for view in part.views)[:_MAX_HISTORIES],
        )
    if first.operation.kind is Kind.ATTENTION:
        return joined
    order = torch.argsort(joined.rows.keys, stable=True).tolist()
    return joined.take(torch.tensor(spread(order, MAX_ROWS)))


@contextmanager
def guarded(name: str, failures: list[str]) -> Iterator[None]:
    """Stop every exception of the block and note it, except a HarnessError, whose reader has to act.

    Args:
        name: what is tried, for the note.
        failures: gets the note: what was raised, and the file and line of this package that raised it.

    Raises:
        HarnessError: the block raised it: a checkpoint changed, or a recording is damaged.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        note = f"{name}: {_described(error)}"
        if note not in failures:
            failures.append(note)


def _described(error: Exception) -> str:
    message = str(error).partition("\n")[0][:_MAX_MESSAGE]
    return f"{type(error).__name__}{f': {message}' if message else ''} ({_place(error)})"


def _place(error: Exception) -> str:
    """Return file and line of the last call in this package, or of the raise where there is none."""
    _guard, *frames = traceback.extract_tb(error.__traceback__)
    in_package = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents]
    frame = (in_package or frames)[-1]
    path = Path(frame.filename)
    return f"{path.relative_to(_PACKAGE.parent) if in_package else path.name}:{frame.lineno}"
