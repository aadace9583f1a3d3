"""The engine's errors: one base class, and messages that all read in the same order.

A message says what is wrong, where, which value was expected and which was found, and what to do next, so that a
person can act on it without a traceback.
"""

from __future__ import annotations

__all__ = [
    "BlockError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "EngineError",
    "RankError",
    "RequestError",
    "UnsupportedModelError",
]


class EngineError(Exception):
    """Base of everything this package raises on purpose.

    The parts are kept as attributes, so that a caller can render them in its own way.
    """

    def __init__(
        self, what: str, *, where: object = None, expected: object = None, actual: object = None, hint: str = ""
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.actual = actual
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        message = self.what if self.where is None else f"{self.what}, in {self.where}"
        if self.expected is not None:
            message += f": expected {self.expected}"
        if self.actual is not None:
            message += f"{':' if self.expected is None else ','} found {self.actual}"
        return f"{message}. {self.hint}" if self.hint else f"{message}."


class CheckpointError(EngineError):
    """The weights on disk are absent, damaged, or do not match the config."""


class UnsupportedModelError(EngineError):
    """The checkpoint is sound, but asks for something that this engine does not implement."""


class ConfigError(EngineError):
    """A value in config.json or in `EngineConfig` is missing or impossible."""


class RequestError(EngineError):
    """A request is malformed or longer than the model allows."""


class DeviceError(EngineError):
    """The device asked for is not there."""


class CapacityError(EngineError):
    """The pool of KV blocks is too small for what is asked of it."""


class BlockError(EngineError):
    """A KV block was freed twice, or used without being owned."""


class RankError(EngineError):
    """Another process of a tensor-parallel engine has ended or does not answer."""
