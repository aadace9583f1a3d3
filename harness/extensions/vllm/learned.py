"""The taps of vLLM's model, learned from small steps of its model runner, and where each rank has its part of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import ceil
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from harness.engines.by_content.columns import Columns
from harness.engines.by_content.forwards import run_step
from harness.engines.by_content.rows import RequestWork
from harness.engines.by_content.scheduled import learn_taps
from harness.engines.by_content.steps import MODULE, RETURNED, See, Site, Work
from harness.engines.by_content.tap_map import ShownSite, TapMap
from harness.formats.taps import Graph

_NUM_TOKENS = 3
"""Tokens of the step that shows how wide tensors are."""


class RunnerStepper:
    """A model runner; requests are put together here and not by its scheduler.

    A step ends the requests that it does not have: the cache may have room for few.
    """

    attached = "vLLM's model runner"

    def __init__(self, runner: Any) -> None:
        """Take the runner of an engine that serves nothing else."""
        self._runner, self.model = runner, runner.get_model()
        self._tokens: dict[int, list[int]] = {}
        self._blocks: dict[int, list[list[int]]] = {}
        self._sizes = [int(group.kv_cache_spec.block_size) for group in runner.kv_cache_config.kv_cache_groups]
        self._free = list(range(1, runner.kv_cache_config.num_blocks))  # block 0 is the null block
        self._ran = set[str]()
        if not runner.model_config.enforce_eager:
            self.watching: Callable[..., _LogitsAlone] = _LogitsAlone

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`.

        Raises:
            ValueError: there are more requests or tokens than vLLM takes in a step.
        """
        for number in self._tokens.keys() - {number for number, _, _ in work}:
            self._end(number)
        lengths = {number: first + len(tokens) for number, tokens, first in work}
        missing = [ceil(length / size) for length in lengths.values() for size in self._sizes]
        if len(work) > self._runner.max_num_reqs or sum(missing) > self._num_blocks:
            raise ValueError(f"{len(work)} requests do not fit into a step, or into the cache")
        for number, tokens, first in work:
            self._tokens.setdefault(number, [])[first:] = tokens
            for blocks, size in zip(
                self._blocks.setdefault(number, [[] for _ in self._sizes]), self._sizes, strict=True
            ):
                while len(blocks) * size < lengths[number]:
                    blocks.append(self._free.pop())
        batch = SchedulerOutput.make_empty()
        batch.finished_req_ids = self._ran  # each step's requests are new ones, whose first tokens are in the cache
        batch.scheduled_new_reqs = [self._request(number, first) for number, _, first in work]
        batch.num_scheduled_tokens = {str(number): len(tokens) for number, tokens, _ in work}
        batch.total_num_scheduled_tokens = sum(batch.num_scheduled_tokens.values())
        self._ran = set(batch.num_scheduled_tokens)
        self._runner.execute_model(batch)
        logits: torch.Tensor = self._runner.execute_model_state.logits
        self._runner.sample_tokens(None)
        at = {name: place for place, name in enumerate(self._runner.input_batch.req_ids)}
        return logits[[at[str(number)] for number, _, _ in work]]

    @property
    def _num_blocks(self) -> int:
        return len(self._free) + sum(map(len, chain(*self._blocks.values())))

    def _end(self, number: int) -> None:
        self._free += chain(*self._blocks.pop(number))
        del self._tokens[number]

    def _request(self, number: int, first: int) -> NewRequestData:
        params, blocks = SamplingParams(temperature=0.0), tuple(map(list, self._blocks[number]))
        return NewRequestData(str(number), list(self._tokens[number]), [], params, None, blocks, first, None)


class _LogitsAlone:
    """Shows what a step returns: a compiled model has no tensors that can be told."""

    def __init__(self, see: See, _only: object) -> None:
        self._see = see

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def returned(self, value: torch.Tensor) -> None:
        """See `Watching`."""
        self._see(Site("", 0, RETURNED), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTaps:
    """The taps of a model on one rank, and what tells their places on several."""

    tap_map: TapMap
    widths: Mapping[Site, int]
    """Columns of each site."""
    parts: Mapping[str, Sequence[int]]
    """By path, the sizes of the parts of fused products."""

    @classmethod
    def of(cls, runner: Any, folder: Path, graph: Graph, dtype: str) -> Self:
        """Learn the taps of a runner's model."""
        stepper = RunnerStepper(runner)
        with set_current_vllm_config(runner.vllm_config):  # vLLM may have changed HF's classes, which ask for it then
            tap_map = learn_taps(stepper, folder, graph, dtype)
        tokens = list(range(_NUM_TOKENS))
        forwards, _ = run_step(
            stepper, [(-1, tokens, 0)], tap_map.teller, keep=lambda *item: item[2].clone(), only=tap_map.sites
        )
        shown = tap_map.teller.in_order(forwards, [RequestWork(tokens, 0)])
        widths = {site: rows.values.shape[1] for site, rows in shown.items()}
        return cls(tap_map=tap_map, widths=widths, parts=_parts(runner.get_model()))

    def on_rank(self, model: nn.Module) -> TapMap:
        """Return where a rank's model has its part of each tap: all of a tensor, or the same parts of a product."""
        parts = _parts(model)
        taps = {
            tap: replace(mapped, sources=sources)
            for tap, mapped in self.tap_map.taps.items()
            if (sources := tuple(self._sources(mapped.sources, parts)))
        }
        return replace(self.tap_map, taps=taps)

    def _sources(self, sources: Sequence[ShownSite], parts: Mapping[str, Sequence[int]]) -> Iterator[ShownSite]:
        for source in sources:
            columns, site = source.columns, source.site
            ends = [0, *accumulate(self.parts.get(site.path, ()))] if site.what == MODULE else []
            if site.what == RETURNED:
                yield source
            elif columns.order is None and (columns.start, columns.stop) == (0, self.widths.get(site)):
                yield replace(source, columns=_AllColumns(start=0, stop=1))
            elif columns.order is None and columns.start in ends and columns.stop in ends:
                here = [0, *accumulate(parts[site.path])]
                start, stop = (here[ends.index(end)] for end in (columns.start, columns.stop))
                yield replace(source, columns=Columns(start=start, stop=stop))


class _AllColumns(Columns):
    """All columns of a tensor, however many a rank has."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(len(rows), -1)


def _parts(model: nn.Module) -> dict[str, list[int]]:
    """Return the sizes of the parts of fused products; wrappers (for LoRA) are around them."""
    linears = ((path, getattr(module, "base_layer", module)) for path, module in model.named_modules())
    return {
        path: list(item.output_partition_sizes) for path, item in linears if hasattr(item, "output_partition_sizes")
    }
