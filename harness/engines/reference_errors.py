"""The reference engine's errors in the harness's own codes."""

from collections.abc import Iterator
from contextlib import contextmanager

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
