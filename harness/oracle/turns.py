"""Two forwards of one model that take turns: the *truth* and, on a thread of its own, the *control* that follows it.

Whenever the truth shows an operation, the control first runs as far as the same operation. Before the truth leaves a
part of the model, the control runs to the end of that part, and it enters no part before the truth has: a part's
weights are there in between. They are the truth's, in high precision, but for the control's turns. What the modules of
the part keep as attributes, as some keep a state, is each forward's own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from harness.oracle.precision import Upcast


class Ahead:
    """Runs a function in a thread, from one call of `wait` in it to the next."""

    def __init__(self, function: Callable[[], None]) -> None:
        """Prepare the thread; `function` must call `wait` where it may be left."""
        self._function = function
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = self._is_cancelled = False
        self._error: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def advance(self) -> None:
        """Let the thread run until it waits again; raises what it raises."""
        if self.is_over:
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Say, from inside of the thread, that its turn is over, and wait for the next."""
        self._done.release()
        self._go.acquire()
        if self._is_cancelled:
            raise _CancelledError

    def finish(self) -> None:
        """Let the thread run to its end."""
        while not self.is_over:
            self.advance()

    def cancel(self) -> None:
        """End the thread where it stands."""
        self._is_cancelled = True
        if self._thread.is_alive():
            self._go.release()
            self._thread.join()
        self._function = _nothing  # what it ran may refer to this object, and would stay until garbage is collected

    def _run(self) -> None:
        self._go.acquire()
        torch.set_num_threads(self._num_threads)  # a thread of its own begins with the default
        try:
            if not self._is_cancelled:
                self._function()
        except _CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.is_over = True
            self._done.release()


def _nothing() -> None:
    """End at once."""


class _CancelledError(BaseException):
    """Ends the thread; no handler of the model's code is to catch it."""


class Turns:
    """Says whose turn it is. A *border* is the begin or the end of a part: both forwards come to the same ones."""

    def __init__(self, control: Ahead) -> None:
        """Prepare the turns of a control that has not begun."""
        self._control = control
        self._shown = set[str]()
        """Taps that the control has shown."""
        self._num_reached = self._num_passed = 0
        """Borders that the control has reached, and that the truth has passed."""
        self._running: list[_Part] = []
        """The parts that the truth runs."""

    def control_showed(self, tap: str) -> None:
        """On the control's thread: end its turn after an operation."""
        self._shown.add(tap)
        self._control.wait()

    def control_at_border(self) -> None:
        """On the control's thread: end its turn at a border."""
        self._num_reached += 1
        self._control.wait()

    def reach(self, tap: str) -> None:
        """On the truth's thread: let the control run until it has shown an operation, if it does in the same part."""
        while tap not in self._shown and self._num_reached <= self._num_passed and not self._control.is_over:
            self._advance()

    @contextmanager
    def part(self, module: nn.Module, upcast: AbstractContextManager[Upcast]) -> Iterator[None]:
        """On the truth's thread: pass the border where a part begins, with its weights upcast during the block."""
        self._num_passed += 1
        with upcast as weights:
            self._running.append(_Part(module, weights))
            try:
                yield
            finally:
                self._running.pop()

    def finish_part(self) -> None:
        """On the truth's thread: let the control run to the border where a part ends, and pass it."""
        while self._num_reached <= self._num_passed and not self._control.is_over:
            self._advance()
        self._num_passed += 1

    def _advance(self) -> None:
        with ExitStack() as stack:
            for part in self._running:
                stack.enter_context(part.of_control())
            self._control.advance()


class _Part:
    """A part of the model as both forwards have it."""

    def __init__(self, module: nn.Module, weights: Upcast) -> None:
        self._weights = weights
        self._attributes = {item: dict(vars(item)) for item in module.modules()}
        """The control's; parameters, buffers, modules and hooks are in dictionaries that both share."""

    @contextmanager
    def of_control(self) -> Iterator[None]:
        """Give the modules the weights and attributes of the control during the block."""
        of_truth = {item: vars(item) for item in self._attributes}
        with self._weights.undone():
            try:
                for item, attributes in self._attributes.items():
                    object.__setattr__(item, "__dict__", attributes)
                yield
            finally:
                for item, attributes in of_truth.items():
                    object.__setattr__(item, "__dict__", attributes)
