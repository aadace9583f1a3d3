"""The reference engine's errors in the harness's own codes, and its options, which may be wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.errors import Code, HarnessError
from reference_engine.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineError,
    RequestError,
    UnsupportedModelError,
)
from reference_engine.launch import parse_options

_CODES: dict[type[EngineError], Code] = {
    CheckpointError: Code.TENSORS_CONTRADICT_CONFIG,
    UnsupportedModelError: Code.UNSUPPORTED_ARCHITECTURE,
    ConfigError: Code.BAD_OPTION,
    DeviceError: Code.NO_DEVICE,
    RequestError: Code.ENGINE_CANNOT_SERVE,
    CapacityError: Code.ENGINE_CANNOT_SERVE,
}


@contextmanager
def reference_errors(where: object) -> Iterator[None]:
    """Turn what the engine raises on purpose into a `HarnessError`; anything else passes."""
    try:
        yield
    except EngineError as error:
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), Code.ENGINE_FAILED)
        raise HarnessError(code, f"the reference engine: {error}", where=where) from error


def parse_reference_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return options of the engine with values of the types that the fields of `EngineConfig` have.

    Raises:
        HarnessError: BAD_OPTION: there is no such field, or its value has another type.
    """
    try:
        return parse_options(options)
    except ConfigError as error:
        raise HarnessError(
            Code.BAD_OPTION, error.what, where=error.where, expected=error.expected, actual=error.actual
        ) from error
