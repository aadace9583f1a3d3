"""The experts of one layer computed apart from each other, so that any mixture of them can be held against the rows.

`R` rows, `E` experts, `C` chosen ones of a row, `D` elements of a row.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.compare.align import is_readback
from harness.explain.failure import Failure
from harness.oracle.precision import eager_experts, preserve_precision, upcast
from harness.taps import Kind, Operation

_MAX_ELEMENTS = 1 << 26
"""Of what all experts give for all rows that are looked at: 512 MiB in float64."""
_SAME = 1e-5
"""Relative distance within which a mixture of the experts is what HF's module gives."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What each expert gives for each row, and how the rows are to be mixed from that."""

    failure: Failure
    module: nn.Module
    x: torch.Tensor
    """[R, D] float64."""
    chosen: torch.Tensor
    """[R, C] int64."""
    weights: torch.Tensor
    """[R, C] float64."""
    outputs: torch.Tensor
    """[E, R, D] float64, without weights."""

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.outputs)

    @property
    def table(self) -> torch.Tensor:
        """[R, E]: the weight of every expert in every row, 0 where it is not chosen."""
        return self.spread(self.weights)

    def spread(self, weights: torch.Tensor) -> torch.Tensor:
        """Return [R, E] of weights [R, C] of the chosen experts."""
        empty = torch.zeros(len(weights), self.num_experts, dtype=weights.dtype)
        return empty.scatter_add(1, self.chosen, weights)

    def mixed(self, table: torch.Tensor) -> torch.Tensor:
        """Return [R, D] under weights [R, E]."""
        return torch.einsum("re,erd->rd", table, self.outputs)

    def with_part_of(self, expert: int, other: torch.Tensor) -> torch.Tensor:
        """Return [R, D] where one expert gives `other` [R, D]."""
        return self.failure.expected + self.table[:, expert, None] * (other - self.outputs[expert])

    def part_of(self, expert: int, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the module gives now if a row of `x` [R, D] goes to one expert, with weight 1: [R, D]."""
        return one_expert(self.module, self.x if x is None else x, expert)

    def run(self, module: nn.Module | None = None) -> torch.Tensor:
        """Return what the module, or another of its shape, gives now: [R, D]."""
        return run_experts(module or self.module, self.x, self.chosen, self.weights)

    def weights_used(self) -> torch.Tensor | None:
        """Return the weights [R, E] under which the experts give the recorded rows best; None where that is not known.

        More experts than elements of a row would give anything.
        """
        if self.num_experts * 2 > self.x.shape[1]:
            return None
        columns = self.outputs.permute(1, 2, 0)  # [R, D, E]
        solution: torch.Tensor = torch.linalg.lstsq(columns, self.failure.actual[..., None]).solution
        return solution[..., 0]

    def rows_of(self, expert: int) -> torch.Tensor:
        """[R] bool: rows that chose an expert."""
        return (self.chosen == expert).any(dim=1)


def mixture_of(failure: Failure) -> Mixture | None:
    """Return the experts behind the rows; None where the operation is no mixture that HF's module gives apart."""
    tap = choice_of(failure)
    if tap is None or len(failure.operation.inputs) != len(failure.inputs) or len(failure.inputs) != 3:
        return None
    named = dict(zip(failure.operation.inputs, failure.inputs, strict=True))
    chosen = named.pop(tap).to(torch.int64).flatten(1)
    x, weights = sorted((each.flatten(1) for each in named.values()), key=lambda each: -each.shape[1])
    module, count = failure.module, num_experts(failure.module)
    if count is None or weights.shape != chosen.shape or count * x.numel() > _MAX_ELEMENTS:
        return None
    with exactly(failure):
        expected = run_experts(module, x, chosen, weights)
        if bool(((expected - failure.expected).norm(dim=1) > _SAME * failure.expected.norm(dim=1)).any()):
            return None
        outputs = torch.stack([one_expert(module, x, expert) for expert in range(count)])
    return Mixture(failure=failure, module=module, x=x, chosen=chosen, weights=weights, outputs=outputs)


def choice_of(failure: Failure) -> str | None:
    """Return the tap of the choice that an operation reads."""
    found = [tap for tap in failure.operation.inputs if failure.graph[tap].kind is Kind.CHOICE]
    return found[0] if len(found) == 1 else None


def num_experts(module: nn.Module) -> int | None:
    """Return how many experts a module holds as one tensor each of [E, ...]; None for one that holds none."""
    counts = {len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3}
    return counts.pop() if len(counts) == 1 else None


def run_experts(module: nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return HF's experts of rows x [R, D]: [R, D] float64."""
    device = next(module.parameters()).device
    output: Any = module(x.to(device), chosen.to(device), weights.to(device))
    added: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return added.to("cpu", torch.float64).reshape(x.shape)


def one_expert(module: nn.Module, x: torch.Tensor, expert: int) -> torch.Tensor:
    """Return one expert of rows x [R, D], with the weight 1."""
    chosen = torch.full((len(x), 1), expert)
    return run_experts(module, x, chosen, torch.ones(len(x), 1, dtype=torch.float64))


@contextmanager
def exactly(failure: Failure, path: str | None = None) -> Iterator[None]:
    """Run experts in float64: those of the failure, which are held in it, or those at another path."""
    with ExitStack() as stack:
        stack.enter_context(eager_experts(failure.hf.config))
        if path is not None:
            stack.enter_context(failure.hf.weights.held(failure.hf.part_of(path)))
            stack.enter_context(upcast(torch.float64, failure.hf.module(path)))
        stack.enter_context(preserve_precision(torch.float64))
        yield


@contextmanager
def changed(module: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Put other values into the parameters of a module, by name, and put their own back."""
    own = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
    try:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = change(name, parameter.data)
        yield
    finally:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = own[name]


def others_like(failure: Failure) -> list[Operation]:
    """Return the operations of the same site in the other layers."""
    own = failure.operation
    return [op for op in failure.graph if op.site == own.site and op.kind is own.kind and op.tap != own.tap]


def recorded_choices(failure: Failure, tap: str) -> torch.Tensor:
    """Return the experts of every row that was recorded, right or wrong: [rows, C] int64."""
    steps = [step for step in failure.recording.steps if not is_readback(step) and step.has(tap)]
    return torch.cat([step.tap(tap).to(torch.int64).flatten(1) for step in steps])
