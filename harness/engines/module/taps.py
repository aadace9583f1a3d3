"""The values of a user's module that are taps of HF's graph, found in one run over a few tokens."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from harness.engines.module.names import ModuleNames, operation_of
from harness.engines.module.values import INPUT
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.rows import as_rows, token_dim

_LENGTHS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a tap in the module."""

    operation: Operation
    source: str
    """HF's name of the value."""
    shown: str
    """The module's own name of it."""
    index: int
    """Its index among the tensors that are shown."""
    has_batch: bool
    """Whether the first dimension counts requests, of which there is one."""
    token_dim: int
    """1 or 2, counted with the batch."""

    def rows(self, tensors: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor | None:
        """Return [tokens, ...]; None if the value has another shape than in the run it was found in."""
        if len(tensors) <= self.index:
            return None
        tensor = tensors[self.index] if self.has_batch else tensors[self.index][None]
        if tensor.numel() != num_tokens * prod(self.operation.shape) or tensor.dim() <= self.token_dim:
            return None
        return as_rows(tensor, self.token_dim, 1, num_tokens) if tensor.shape[self.token_dim] == num_tokens else None


@dataclass(slots=True)
class ModuleTaps:
    """The taps that a module shows."""

    names: ModuleNames
    graph: Graph
    num_tokens: int
    """Of the run that they are looked for in."""
    by_tap: dict[str, Place] = field(default_factory=dict)
    misshapen: dict[str, list[list[int]]] = field(default_factory=dict)
    """By the module's own name: shapes of values that are called as a tap is, of which none has its rows."""

    def see(self, shown: str, tensors: Sequence[torch.Tensor]) -> None:
        """Take in what the run shows; of several places of a tap the first one counts.

        Raises:
            HarnessError: BAD_OPTION: two modules are called the same.
        """
        for source, only in self._sources(shown, len(tensors)):
            operation = operation_of(self.graph, source)
            if operation is None or operation.tap == self.graph.logits:
                continue
            place = _place(operation, source, shown, tensors, only, self.num_tokens)
            before = self.by_tap.get(operation.tap)
            if before is not None and before.source == source and before.shown != shown:
                _refuse_twice(before, shown)
            if before is None and place is not None:
                self.by_tap[operation.tap] = place
            if place is None:
                self.misshapen[shown] = [list(tensor.shape) for tensor in tensors]

    def _sources(self, shown: str, num_tensors: int) -> Iterator[tuple[str, int | None]]:
        """Yield HF's names of the tensors, and which one alone has the name."""
        name, at, number = shown.partition("@")
        yield self.names.translate(name) + at + number, None
        if not name.endswith(f":{INPUT}"):
            for index in range(num_tensors):
                yield self.names.translate(f"{name}:{index}") + at + number, index


def unmistakable_length(module: nn.Module, graph: Graph) -> int:
    """Return a number of tokens that no dimension of the model's has."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    sizes |= {size for operation in graph for size in operation.shape}
    return next((length for length in _LENGTHS if length not in sizes), _LENGTHS[-1])


def unmatched_hint(paths: Collection[str], graph: Graph) -> str:
    """Return what to try where no module is called as HF calls it."""
    sources = {operation.module for operation in graph if operation.source}
    for path in paths:
        longer = next((source for source in sorted(sources) if source.endswith(f".{path}")), None)
        if longer is not None:
            prefix = longer.removesuffix(f".{path}")
            return f'names={{"": "{prefix}"}}, since {path!r} may be {longer!r}'
        shorter = next((source for source in sorted(sources) if path.endswith(f".{source}")), None)
        if shorter is not None:
            return f'names={{"{path.removesuffix(f".{shorter}")}": ""}}, since {path!r} may be {shorter!r}'
    return 'names={"blocks.*.attn.wq": "model.layers.*.self_attn.q_proj", ...}; names={} compares the logits alone'


def _place(
    operation: Operation,
    source: str,
    shown: str,
    tensors: Sequence[torch.Tensor],
    only: int | None,
    num_tokens: int,
) -> Place | None:
    """Return the tensor that fits a tap; None if none does, or several do.

    A norm returns the sum that it normed beside its result; of anything else two tensors of one shape may be anything.
    """
    fitting = [(index, _token_dim(tensor, num_tokens, operation)) for index, tensor in enumerate(tensors)]
    found = [(index, dim) for index, dim in fitting if dim and only in (None, index)]
    is_norm = operation.kind is Kind.NORM and not shown.partition("@")[0].endswith(f":{INPUT}")
    if not found or (len(found) > 1 and not is_norm):
        return None
    index, dim = found[0]
    has_batch = _has_batch(tensors[index])
    return Place(operation=operation, source=source, shown=shown, index=index, has_batch=has_batch, token_dim=dim)


def _token_dim(tensor: torch.Tensor, num_tokens: int, operation: Operation) -> int | None:
    """Return which dimension, counted with the batch, counts the tokens, where the rest is a row of the operation."""
    if tensor.numel() != num_tokens * prod(operation.shape):
        return None
    return token_dim(tensor if _has_batch(tensor) else tensor[None], 1, num_tokens)


def _has_batch(tensor: torch.Tensor) -> bool:
    return tensor.shape[0] == 1


def _refuse_twice(before: Place, shown: str) -> None:
    raise HarnessError(
        Code.BAD_OPTION,
        "two modules are called the same",
        where="names=",
        expected="one module for each of HF's",
        actual=f"{before.shown!r} and {shown!r} are both {before.source!r}",
        hint="give the one that is another thing a name of its own",
    )
