"""Failures that are made by hand: a few rows of one operation, of a graph of a few operations, in a recording or none.

An explanation is held against what such a failure makes it yield: every cause, by name, with the rows that it would
give. Whether a cause is named in a report is the business of test_run.py and of the tests that use `bench`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.formats.recording import Recording, RequestInfo
from harness.formats.taps import Graph, Operation
from harness.judge.compare.align import Locator, Rows
from harness.judge.compare.sequences import SlotHistory
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.judge.explain.trial.ranking import rank_hypotheses
from harness.oracle.model import HFModel
from harness.results.check import Explanation

from ....recording_writer import new_writer


class ToyModel:
    """What explanations ask a model for: its graph, its modules by path, its config."""

    def __init__(
        self,
        *operations: Operation,
        modules: Mapping[str, nn.Module] | None = None,
        head_dim: int = 4,
        **config: object,
    ) -> None:
        self.graph, self.modules, self.head_dim = Graph(operations), dict(modules or {}), head_dim
        self.config = SimpleNamespace(**config)
        self.configs = (self.config,)
        self.model = nn.Module()
        self.weights = SimpleNamespace(held=lambda _part: nullcontext())
        self.device = torch.device("cpu")
        self.quantised_source = None

    exactly = HFModel.exactly

    def config_of(self, _layer: int | None) -> SimpleNamespace:
        """Return the config, which is one for all layers."""
        return self.config

    def head_dim_of(self, _layer: int | None) -> int:
        """Return the head size, which is one for all layers."""
        return self.head_dim

    def module(self, path: str) -> nn.Module:
        """Return the module at a path."""
        return self.modules[path]

    def part_of(self, path: str) -> str:
        """Return what is held of the model for a module."""
        return path


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """Return a product with a weight [O, I] and a bias [O]."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    module.weight.data = weight
    if bias is not None:
        module.bias.data = bias
    return module


def recorded(
    folder: Path,
    steps: Iterable[Mapping[str, object]],
    *,
    lengths: Sequence[tuple[int, int]] = ((12, 8),),
    tokens: Sequence[Sequence[int]] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    drafts: Mapping[int, int] | None = None,
    schedule: str | None = None,
) -> Recording:
    """Return a recording of steps, each of `RecordingWriter.begin_step`'s arguments and of `taps` by their names.

    Args:
        folder: where it is written.
        steps: `phase` may be left out.
        lengths: tokens and prompt length of each request; their ids count from 0.
        tokens: of each request, where they matter.
        device: the manifest's.
        dtype: the manifest's.
        drafts: by a draft's id, the request that it is of.
        schedule: the manifest's.
    """
    requests = [
        RequestInfo(
            id=number,
            token_ids=list(range(100 * number + 3, 100 * number + 3 + count)) if tokens is None else tokens[number],
            prompt_length=prompt,
            draft_of=(drafts or {}).get(number),
        )
        for number, (count, prompt) in enumerate(lengths)
    ]
    with new_writer(folder, requests, dtype=dtype, device=device, schedule=schedule) as writer:
        for step in steps:
            options = dict(step)
            taps = options.pop("taps", {})
            writer.begin_step(**{"phase": "mixed", **options})
            for name, tensor in taps.items():
                writer.tap(name, tensor)
            writer.end_step()
    return Recording.open(folder, verify=False)


def failure_of(
    operation: Operation,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *inputs: torch.Tensor,
    model: ToyModel | None = None,
    dtype: torch.dtype = torch.float32,
    recording: Recording | None = None,
    request: Sequence[int] | None = None,
    position: Sequence[int] | None = None,
    step: Sequence[int] | None = None,
    bound: float = 3.0,
    **others: object,
) -> WrongOperation:
    """Return wrong rows that should be `expected` [R, W]: of request 0, one after the other, in step 0."""
    count = len(actual)
    roundings = torch.zeros(count, dtype=torch.float64)
    if actual.shape == expected.shape:
        norms = (x.double().norm(dim=1) for x in (actual - expected, expected))
        roundings = torch.div(*norms) / rounding_unit(dtype)
    rows = Rows(
        request=torch.tensor(request or [0] * count),
        position=torch.arange(count) if position is None else torch.tensor(position),
        step=torch.tensor(step or [0] * count),
    )
    return WrongOperation(
        operation=operation, hf=model or ToyModel(operation), recording=recording,
        locator=None if recording is None else Locator(recording), rows=rows, actual=actual, expected=expected,
        inputs=list(inputs), dtype=dtype, roundings=roundings, bound=torch.full_like(roundings, bound),
        slot_history=None if recording is None else SlotHistory(recording), **others,
    )  # fmt: skip


def named(failure: WrongOperation) -> Explanation:
    """Return what the trial of all explanations says of a failure, whose right rows are left out."""
    with torch.no_grad():  # as where explanations are run
        return rank_hypotheses(failure.select(failure.roundings > failure.bound), "every row")


def by_cause(
    explain: Callable[[WrongOperation], Iterable[Hypothesis]], failure: WrongOperation
) -> dict[str, Hypothesis]:
    """Return what an explanation yields by its cause; of one that it yields twice, the first."""
    hypotheses: dict[str, Hypothesis] = {}
    with torch.no_grad():  # as where explanations are run
        for item in explain(failure):
            assert item.output.shape == failure.actual.shape, item.cause
            hypotheses.setdefault(item.cause, item)
    return hypotheses


def outputs(
    explain: Callable[[WrongOperation], Iterable[Hypothesis]], failure: WrongOperation
) -> dict[str, torch.Tensor]:
    """Return the rows that each cause would give."""
    return {cause: hypothesis.output for cause, hypothesis in by_cause(explain, failure).items()}


def assert_outputs(
    explain: Callable[[WrongOperation], Iterable[Hypothesis]],
    failure: WrongOperation,
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Assert that an explanation yields these causes, with these rows, and no others."""
    actual = outputs(explain, failure)
    assert set(actual) == set(expected)
    for cause, rows in expected.items():
        torch.testing.assert_close(actual[cause], rows.expand_as(actual[cause]), rtol=1e-9, atol=1e-12, msg=cause)
