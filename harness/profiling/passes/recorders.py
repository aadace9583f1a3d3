"""The process's one profiler and one history of the CUDA allocator: a recorder that is in use already is left alone."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.profiler import ProfilerActivity, profile

from harness.errors import Code, HarnessError


def activities(device: str) -> list[ProfilerActivity]:
    """Return what torch.profiler is to record on a device."""
    cuda = [ProfilerActivity.CUDA] if torch.device(device).type == "cuda" else []
    return [ProfilerActivity.CPU, *cuda]


def refuse_running_profiler() -> None:
    """Raise HarnessError (RECORDER_RUNNING) where another profiler is on."""
    if torch._C._autograd._profiler_enabled():
        raise _running("a profiler is running already")


@contextmanager
def profiling(profiler: profile) -> Iterator[None]:
    """Stop a profiler in any case that the block may have started; what goes wrong in it or in stopping it is raised.

    Raises:
        HarnessError: RECORDER_RUNNING; PROFILER_FAILED for what the profiler raises.
    """
    refuse_running_profiler()
    # Or the profiler announces each of its starts on standard error, at a level above its errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        with _profiler_errors(), warnings.catch_warnings():
            # Each cycle is exported by itself. Torch 2.11 warns of that, even if there is one cycle.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            yield
            profiler.stop()
    except BaseException:
        if torch._C._autograd._profiler_enabled():
            with suppress(Exception):  # the first error says more
                profiler.stop()
        raise


@contextmanager
def _profiler_errors() -> Iterator[None]:
    try:
        yield
    except HarnessError:
        raise
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        raise HarnessError(
            Code.PROFILER_FAILED,
            f"profiling failed with {type(error).__name__}: {error}",
            hint="set HARNESS_TRACEBACK=1 to see where",
        ) from error


@contextmanager
def recording_cuda_memory(max_entries: int) -> Iterator[None]:
    """Record the history of the CUDA allocator, with Python stacks, and turn it off again.

    Raises:
        HarnessError: RECORDER_RUNNING: a history is recorded already, and is left alone.
    """
    if torch._C._cuda_isHistoryEnabled():
        raise _running("the history of the CUDA allocator is being recorded already")
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=max_entries)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _running(what: str) -> HarnessError:
    return HarnessError(
        Code.RECORDER_RUNNING, what, where="this process", hint="stop it first: only one can run in a process"
    )
