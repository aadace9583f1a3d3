"""Processes that an engine has started: one that ends is named in the error that follows from it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread

from harness.engines.process import how_it_ended
from harness.errors import Code, HarnessError


@contextmanager
def watched_processes(
    engine: str, processes: Mapping[str, BaseProcess], *, wake: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Name the process that ended, where the block raises because of it.

    Args:
        engine: in errors.
        processes: by what they are called in errors.
        wake: called once as soon as any of them has ended, also after the block: it lets the engine raise where it
            would wait for an answer without end.

    Raises:
        HarnessError: ENGINE_FAILED.
    """
    names = {process.sentinel: name for name, process in processes.items()}
    first_ended: list[str] = []

    def watch() -> None:
        first_ended.append(names[wait(list(names))[0]])  # type: ignore[index]  # sentinels are what it is given
        wake()

    if names:
        Thread(target=watch, daemon=True).start()
    try:
        yield
    except Exception as error:
        if not first_ended:
            raise
        process = processes[first_ended[0]]
        process.join()
        raise HarnessError(
            Code.ENGINE_FAILED,
            f"{first_ended[0]} ended {how_it_ended(process.exitcode or 0)} before it was done "
            f"({type(error).__name__}: {error})",
            where=engine,
            expected=f"{len(processes)} process(es) that live as long as the engine",
            hint="what the process said last is on standard error; SIGKILL is often the system's, for lack of memory",
        ) from error
