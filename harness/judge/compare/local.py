"""Local judgement: every operation by itself, in one forward of HF's with the engine's own rows put back.

At every tap the engine's row is compared with what HF's code gives from the engine's rows before it, and HF goes on
with the engine's row. So a wrong operation is wrong once, and what follows is judged on what it was given. What was not
recorded flows through HF's code, in the truth and in the control alike.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from harness.base.progress import Progress
from harness.base.threads import Workers, num_spare_threads
from harness.formats.recording import Recording
from harness.judge.compare.batch import PaddedBatch, make_batches
from harness.judge.compare.local_judge import LocalJudge, LocalJudgement, Measured
from harness.judge.compare.replay import DecidedError, Replay
from harness.judge.compare.row_sample import RowSample, SampledRows
from harness.judge.compare.sequences import sequences
from harness.judge.compare.shapes import engine_dtype
from harness.oracle.batching import batch_tokens
from harness.oracle.images import inputs_of
from harness.oracle.model import HFModel
from harness.oracle.paired import run_pair
from harness.oracle.precision import truth_dtype
from harness.oracle.softplus import SoftplusByLog


def local_errors(
    recording: Recording,
    hf: HFModel,
    usable: set[str],
    *,
    truth: str = "auto",
    stops_early: bool = False,
    sample: RowSample | None = None,
    progress: Progress | None = None,
) -> LocalJudgement:
    """Run the model once over all that the engine computed, every recorded value put back, and judge each operation.

    Args:
        recording: the engine's, its taps named as in the graph.
        hf: the model in the engine's dtype.
        usable: recorded taps whose shape and dtype fit.
        truth: `float64`, `float32` or `auto`.
        stops_early: go no further than the first part of the model with an operation that is out of bounds.
        sample: of the positions at which products and attention are judged; None for all.
        progress: told what is being done.
    """
    ahead, sampled = max(hf.graph.drafted_from, default=0), SampledRows()
    batches = make_batches(recording, sequences(recording), batch_tokens(hf), sample, ahead=ahead)
    precision, declared = replay_dtype(truth, recording, hf), recording.manifest.numerics
    with Workers[Measured](min(1, num_spare_threads(hf.device))) as workers:  # more only wait for the interpreter
        judge = LocalJudge(
            hf,
            engine_dtype(recording),
            usable,
            is_alone=len(batches) == 1,
            declared=declared,
            may_truncate=recording.manifest.device.startswith("cuda"),
            stops_early=stops_early,
            workers=workers,
        )
        with suppress(DecidedError):
            for index, batch in enumerate(batches):
                watcher = Replay(judge, batch)
                sampled = _with_batch(sampled, batch, sample if watcher.is_sampled else None)
                report = None if progress is None else partial(progress, f"replay {index + 1}/{len(batches)}")
                run_pair(
                    hf,
                    batch.token_ids,
                    watcher,
                    truth_dtype=precision,
                    logit_positions=watcher.logit_positions,
                    progress=report,
                    inputs=inputs_of(hf, batch.sequences[0].request, batch.num_tokens),
                    sample=watcher.sample,
                    control_arithmetic=control_arithmetic(recording),
                )
    return replace(judge.judgement(), sampled=sampled)


def control_arithmetic(recording: Recording) -> Callable[[], AbstractContextManager[Any]]:
    """Return what the control computes in another way than HF, since the engine declares it."""
    numerics = recording.manifest.numerics
    return SoftplusByLog if numerics is not None and numerics.softplus_by_log else nullcontext


def _with_batch(sampled: SampledRows, batch: PaddedBatch, sample: RowSample | None) -> SampledRows:
    """Add the rows of a batch, of which a sample is judged, or all."""
    num_rows = int(batch.is_own.sum())
    if sample is None:
        return replace(sampled, judged=sampled.judged + num_rows)
    found = sample.least_found(max(map(len, batch.sequences)))
    return SampledRows(
        judged=sampled.judged + batch.num_sampled,
        left_out=sampled.left_out + num_rows - batch.num_sampled,
        least_found=max(found, sampled.least_found or 0),
    )


def replay_dtype(choice: str, recording: Recording, hf: HFModel) -> torch.dtype:
    """Return the dtype of the truth: for `auto` float64 where the engine's activations are float32.

    Logits alone do not count: many engines give those of 16 bits in float32.
    """
    finer = {tap.name for tap in recording.taps if tap.dtype == "F32"} - {hf.graph.logits, *hf.graph.head}
    return torch.float64 if choice == "auto" and finer else truth_dtype(choice, hf.dtype)
