"""The experts of one layer computed apart from each other, so that any mixture of them can be held against the rows.

`R` rows, `E` experts, `C` chosen ones of a row, `D` elements of a row.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import is_readback
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.oracle.experts import arguments_of, num_experts, one_expert, reads_slots, run_experts

_MAX_ELEMENTS = 1 << 26
"""Of what all experts give for all rows that are looked at: 512 MiB in float64."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """The arguments of HF's module of experts."""

    module: nn.Module
    """HF's, that holds the experts."""
    x: torch.Tensor
    """[R, D] float64, what the experts read."""
    chosen: torch.Tensor
    """[R, C] int64."""
    weights: torch.Tensor
    """[R, C] float64."""
    base: torch.Tensor
    """[R, D] float64, what the experts' outputs are added to: zero, or what the same operation computes besides."""
    scores: torch.Tensor | None = None
    """[R, 1] float64, what the experts' input was multiplied by; None if the weights are those of the outputs."""


@dataclass(frozen=True, kw_only=True)
class Mixture(_Call):
    """Each expert's output for each row, and the weights by which the rows are mixed."""

    wrong: WrongOperation
    outputs: torch.Tensor
    """[E, R, D] float64, without weights."""

    @property
    def num_experts(self) -> int:
        """E."""
        return len(self.outputs)

    @property
    def table(self) -> torch.Tensor:
        """[R, E]: the weight of every expert in every row, 0 if it is not chosen."""
        return self.spread(self.weights)

    def spread(self, weights: torch.Tensor) -> torch.Tensor:
        """Return [R, E] of weights [R, C] of the chosen experts."""
        empty = torch.zeros(len(weights), self.num_experts, dtype=weights.dtype)
        return empty.scatter_add(1, self.chosen, weights)

    def mixed(self, table: torch.Tensor) -> torch.Tensor:
        """Return [R, D] under weights [R, E]."""
        return self.base + torch.einsum("re,erd->rd", table, self.outputs)

    def with_part_of(self, expert: int, output: torch.Tensor) -> torch.Tensor:
        """Return [R, D] where one expert gives `output` [R, D]."""
        return self.wrong.expected + self.table[:, expert, None] * (output - self.outputs[expert])

    def run(self, module: nn.Module | None = None) -> torch.Tensor:
        """Return what the module, or another of its shape, gives now: [R, D]."""
        return self.base + run_experts(module or self.module, self.x, self.chosen, self.weights)

    def weights_used(self) -> torch.Tensor | None:
        """Return the weights [R, E] under which the experts give the recorded rows best; None if that is not known.

        More experts than elements of a row would give anything.
        """
        if self.num_experts * 2 > self.x.shape[1]:
            return None
        columns = self.outputs.permute(1, 2, 0)  # [R, D, E]
        actual = (self.wrong.actual - self.base)[..., None]
        solution: torch.Tensor = torch.linalg.lstsq(columns, actual).solution
        return solution[..., 0]

    def rows_of(self, expert: int) -> torch.Tensor:
        """[R] bool: rows that chose an expert."""
        return (self.chosen == expert).any(dim=1)


def mixture_of(wrong: WrongOperation) -> Mixture | None:
    """Return the experts behind the rows; None if the operation is no mixture that HF's module gives apart."""
    if len(wrong.operation.inputs) != len(wrong.inputs):
        return None
    with wrong.hf.exactly():
        call = _of_three(wrong) or _of_two(wrong) or _of_slots(wrong)
        if call is None:
            return None
        count = num_experts(call.module)
        if count is None or call.weights.shape != call.chosen.shape or count * call.x.numel() > _MAX_ELEMENTS:
            return None
        if not wrong.is_expected(call.base + run_experts(call.module, call.x, call.chosen, call.weights)):
            return None
        outputs = torch.stack([one_expert(call.module, call.x, expert) for expert in range(count)])
    return Mixture(wrong=wrong, outputs=outputs, **vars(call))


def _of_three(wrong: WrongOperation) -> _Call | None:
    """Experts that read rows, the experts chosen for them, and the weights of these."""
    arguments = arguments_of(wrong.graph, wrong.operation, wrong.inputs)
    if arguments is None:
        return None
    x, chosen, weights = arguments
    return _Call(module=wrong.module, x=x, chosen=chosen, weights=weights, base=torch.zeros_like(x))


def _of_two(wrong: WrongOperation) -> _Call | None:
    """Experts whose choice no operation shows: HF's router is run again on what the experts read."""
    if len(wrong.inputs) != 2 or choice_of(wrong) is not None or num_experts(wrong.module) is None:
        return None
    x, weights = sorted((item.flatten(1) for item in wrong.inputs), key=lambda tensor: -tensor.shape[1])
    chosen = routed(wrong, x)
    if chosen is None:
        return None
    return _Call(module=wrong.module, x=x, chosen=chosen, weights=weights, base=torch.zeros_like(x))


def routed(wrong: WrongOperation, x: torch.Tensor) -> torch.Tensor | None:
    """Return the experts [rows, C] that HF's router chooses for rows [rows, D]; None if it does not say them."""
    for tap in wrong.operation.inputs:
        router: Any = wrong.hf.module(wrong.graph[tap].module)
        if ":" in wrong.graph[tap].source and isinstance(getattr(router, "weight", None), torch.Tensor):
            with wrong.hf.weights.held(wrong.hf.part_of(wrong.graph[tap].module)):
                outputs = router(x.to(router.weight))
            indices = [item for item in outputs if not item.is_floating_point()] if isinstance(outputs, tuple) else []
            return indices[0].to("cpu", torch.int64) if len(indices) == 1 else None
    return None


def _of_slots(wrong: WrongOperation) -> _Call | None:
    """Call experts that each read all rows, multiplied by the expert's score: 0 for all experts but one."""
    module = next((child for child in wrong.module.children() if reads_slots(child)), None)
    count = None if module is None else num_experts(module)
    flat = [item.flatten(1) for item in wrong.inputs]
    tables = [item for item in flat if item.shape[1] == count]
    if module is None or count is None or len(tables) != 1 or len(flat) != 3:
        return None
    if bool(((tables[0] != 0).sum(dim=1) != 1).any()):
        return None
    scores, chosen = tables[0].max(dim=1, keepdim=True)
    for x, base in (wide := [item for item in flat if item.shape[1] != count], wide[::-1]):
        call = _Call(
            module=module, x=x * scores, chosen=chosen, weights=torch.ones_like(scores), base=base, scores=scores
        )
        if wrong.is_expected(base + run_experts(module, call.x, chosen, call.weights)):
            return call
    return None


def choice_of(wrong: WrongOperation) -> str | None:
    """Return the tap of the choice that an operation reads."""
    choices = [tap for tap in wrong.operation.inputs if wrong.graph[tap].kind is Kind.CHOICE]
    return choices[0] if len(choices) == 1 else None


@contextmanager
def changed(module: nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Put other values into the parameters of a module, by name, and put their own back."""
    with ExitStack() as stack:
        for name, parameter in module.named_parameters(recurse=False):
            stack.enter_context(replaced(parameter, "data", change(name, parameter.data)))
        yield


def others_like(wrong: WrongOperation) -> list[Operation]:
    """Return the operations of the same site in the other layers."""
    operation = wrong.operation
    return [
        op for op in wrong.graph if op.site == operation.site and op.kind is operation.kind and op.tap != operation.tap
    ]


def recorded_choices(mixture: Mixture) -> torch.Tensor | None:
    """Return the experts of every row that was recorded, right or wrong: [rows, C] int64; None if they are not."""
    wrong = mixture.wrong
    tap = choice_of(wrong)
    if tap is not None:
        was_recorded = any(step.has(tap) for step in wrong.recording.steps)
        return _recorded(wrong, tap).to(torch.int64) if was_recorded else None
    for tap, x in zip(wrong.operation.inputs, wrong.inputs, strict=True):
        width = x.flatten(1).shape[1]
        if mixture.scores is not None and width == mixture.num_experts:
            return _recorded(wrong, tap).argmax(dim=1, keepdim=True)
        if mixture.scores is None and width == mixture.x.shape[1]:
            with wrong.hf.exactly():
                return routed(wrong, _recorded(wrong, tap).to(torch.float64))
    return None


def _recorded(wrong: WrongOperation, tap: str) -> torch.Tensor:
    """Return a tap of every step, [rows, W]."""
    steps = [step for step in wrong.recording.steps if not is_readback(step) and step.has(tap)]
    return torch.cat([step.tap(tap).flatten(1) for step in steps])


def experts_of(wrong: WrongOperation, operation: Operation) -> nn.Module:
    """Return HF's module of experts behind an operation of the same site."""
    module = wrong.hf.module(operation.module)
    if num_experts(module) is not None:
        return module
    return next(child for child in module.children() if reads_slots(child))
