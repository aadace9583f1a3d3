"""An engine of now against the same engine at a stored revision: two warm processes, timed in turn."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.checkpoint import resolve
from harness.errors import Code, HarnessError
from harness.gate_results import PairedRatio
from harness.profiling.gate import step_worker
from harness.profiling.gate.paired_timing import paired_ratio

_WORKER = Path(step_worker.__file__)


def time_against(
    revision: str, profile: Mapping[str, Any], *, num_blocks: int, tolerance: float
) -> dict[str, PairedRatio]:
    """Time the engine and the work of a profile against a revision of the checkout that this package runs from.

    Args:
        revision: commit, tag or branch.
        profile: a `profile.json`.
        num_blocks: blocks A B B A, at least 5.
        tolerance: slowdown that is worth an alarm.

    Returns:
        The ratio of each phase.

    Raises:
        HarnessError: BAD_OPTION: no such revision; ENGINE_FAILED: one of the two engines does not run.
    """
    here = _WORKER.parents[3]
    spec = _spec(profile)
    with (
        _checked_out(here, revision) as stored,
        _Worker(stored, spec, revision) as before,
        _Worker(here, spec, "now") as after,
    ):
        before.run(), after.run()
        blocks = [(before.run(), after.run(), after.run(), before.run()) for _ in range(num_blocks)]
    return {
        phase: paired_ratio([tuple(run[phase] for run in block) for block in blocks], tolerance=tolerance)  # type: ignore[misc]
        for phase in blocks[0][0]
        if all(phase in run for block in blocks for run in block)
    }


def _spec(profile: Mapping[str, Any]) -> dict[str, Any]:
    options = str(profile["environment"].get("options", "")).split()
    return {
        "folder": str(resolve(profile["model"])),
        "engine": profile["engine"],
        "dtype": profile["dtype"],
        "device": profile["device"],
        "options": dict(option.split("=", 1) for option in options),
        "workload": {
            "batch_size": profile["batch_size"],
            "num_prompt_tokens": profile["prompt_tokens"],
            "max_new_tokens": profile["max_new_tokens"],
        },
    }


@contextmanager
def _checked_out(checkout: Path, revision: str) -> Iterator[Path]:
    """Yield a folder with the packages of a revision; the checkout itself is only read."""
    command = ["git", "-C", str(checkout), "archive", "--format=tar", revision, "harness", "reference_engine"]
    try:
        packed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else _last_line(error.stderr.decode(errors="replace"))
        raise HarnessError(
            Code.BAD_OPTION,
            f"the revision cannot be read from git: {reason}",
            where="--against",
            actual=revision,
            hint="a commit, tag or branch of the checkout that harness is installed from",
        ) from error
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def _last_line(messages: str) -> str:
    """Return what a command said last: its error, as a rule."""
    return (messages.strip().splitlines() or ["it says nothing"])[-1]


class _Worker:
    """One revision in a process of its own."""

    def __init__(self, root: Path, spec: Mapping[str, Any], label: str) -> None:
        self._label = label
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in __exit__
        # -P: or the worker's own folder would stand ahead of the standard library, and it has a `profile` too
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), json.dumps(spec)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def run(self) -> dict[str, float]:
        """Run the load once and return the seconds of each phase."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        answer = self._process.stdout.readline()
        if not answer:
            raise self._failure()
        times: dict[str, float] = json.loads(answer)
        return times

    def _failure(self) -> HarnessError:
        self._process.wait()
        self._errors.seek(0)
        what = f"the engine does not run at this revision: {_last_line(self._errors.read())}"
        return HarnessError(Code.ENGINE_FAILED, what, where=self._label, hint="a revision that can profile, too")
