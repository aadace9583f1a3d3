"""What the KV cache of an engine costs: its format, and the engine's arithmetic besides, in prompts and in decode."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.extensions.quant.caches import format_cost
from harness.extensions.quant.forward import log_probabilities
from harness.extensions.quant.text import Sequences
from harness.extensions.quant.type_run import TypeRun
from harness.formats.recording import Recording, RequestInfo
from harness.formats.taps import LOGITS, Operation
from harness.judge.jobs.opened import match_taps, open_planned, record_run
from harness.oracle.model import HFModel
from harness.plan import Plan


def run_engine_cache(plan: Plan, hf: HFModel, sequences: Sequences, scratch: Path) -> TypeRun:
    """Let an engine compute each sequence, the first half as a prompt and the rest token by token.

    Its distributions are HuggingFace's head of what it has recorded before its own: engines compute the head only for
    rows that a token is chosen from.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: it has not recorded what the head is computed from, at every row; BAD_OPTION,
            as `format_cost`; as `open_planned` and `record_run`.
    """
    before_head = hf.graph[hf.graph[LOGITS].inputs[0]]
    prompts = [max(1, len(ids) // 2) for ids in sequences]
    engine: list[torch.Tensor] = []
    with open_planned(plan) as subject:
        match_taps(plan, subject, hf.graph)
        for ids, length in zip(sequences, prompts, strict=True):
            folder = scratch / "engine"
            record_run(
                plan, subject, plan.schedules[0], [RequestInfo(id=0, token_ids=ids, prompt_length=length)], folder
            )
            rows = _rows(folder, before_head.tap, len(ids), plan.case.engine)
            shutil.rmtree(folder)
            with _given(hf, before_head, rows):
                engine.append(log_probabilities(hf, ids))
        numerics = subject.capabilities.numerics or Numerics()
    cost = format_cost(numerics, hf, sequences, f"--engine {plan.case.engine}")
    return TypeRun(
        name=f"cache {numerics.cache or plan.case.dtype} of {plan.case.engine}",
        size_bytes=cost.size_bytes,
        bits_per_weight=cost.bits,
        tensor_types={},
        note=f"{plan.case.engine} in {plan.case.dtype}: half of each sequence as a prompt, the rest token by token; "
        "size of keys and values of the text, bits of one number of them",
        exact=hf,
        dequantised=cost.distributions,
        engine=engine,
        prompt_lengths=prompts,
    )


def _rows(folder: Path, tap: str, num_tokens: int, engine: str) -> torch.Tensor:
    """Return a tap at every position of the one request, [T, ...] float32."""
    found: dict[int, torch.Tensor] = {}
    with Recording.open(folder, verify=False) as recording:
        for step in recording.steps:
            if step.phase == "readback" or not step.has(tap):
                continue
            rows, at = step.tap(tap).to(torch.float32), step.rows_of(tap)
            positions = step.position if at is None else step.position[at]
            found.update(zip(positions.tolist(), rows, strict=True))
    if len(found) != num_tokens:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"engine {engine!r} has not recorded {tap} at every row",
            where="--engine",
            expected=f"{num_tokens} rows",
            actual=len(found),
            hint="leave --engine out: --caches gives the cost of a format without an engine",
        )
    return torch.stack([found[position] for position in range(num_tokens)])


@contextmanager
def _given(hf: HFModel, operation: Operation, rows: torch.Tensor) -> Iterator[None]:
    """Let HuggingFace's model go on with an engine's rows of an operation."""

    def exchanged(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        return rows.to(output.dtype).view_as(output)

    handle = hf.module(operation.module).register_forward_hook(exchanged)
    try:
        yield
    finally:
        handle.remove()
