"""Two recordings on disk against each other, with or without the model that would judge single operations."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from harness.check import check_device
from harness.checkpoint import resolve
from harness.compare import compare_run
from harness.oracle.decoder import load_decoder
from harness.oracle.golden import Golden
from harness.oracle.replay import Replayer
from harness.recording import Recording
from harness.results import CheckResult


def run_diff(
    expected: Path,
    actual: Path,
    *,
    model: str | None = None,
    taps: Sequence[str] = ("*",),
    require: Sequence[str] = ("decode",),
    device: str = "cpu",
    local_files_only: bool = True,
) -> CheckResult:
    """Compare two recordings.

    Args:
        expected: a golden, or any recording of the same requests.
        actual: the recording under test.
        model: folder or hub id of the checkpoint; with it every operation is replayed on the actual's own inputs.
        taps: globs; the taps of `expected` that match must be in `actual`.
        require: triggers that `actual` must have reached.
        device: where to replay.
        local_files_only: never ask the hub.

    Raises:
        HarnessError: a recording is missing or damaged, or they hold different prompts.
    """
    with Recording.open(expected) as theirs, Recording.open(actual) as ours:
        manifest = ours.manifest
        replayer = None
        if model is not None:
            check_device(device)
            folder = resolve(model, local_files_only=local_files_only)
            replayer = Replayer(load_decoder(folder, dtype=getattr(torch, manifest.dtype), device=device))
        wanted = [entry.name for entry in theirs.manifest.taps if any(fnmatchcase(entry.name, glob) for glob in taps)]
        run = compare_run(ours, theirs, noise=Golden(theirs).noise, replayer=replayer, wanted=wanted, require=require)
        return CheckResult(
            engine=manifest.producer.name,
            model=manifest.model.id,
            dtype=manifest.dtype,
            device=manifest.device,
            num_requests=len(manifest.requests),
            runs=(run,),
        )
