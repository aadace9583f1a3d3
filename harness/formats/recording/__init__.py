"""The interchange format: a folder with the intermediate tensors of one run (docs/recording-format.md).

Its parts are imported when they are used: writing takes numpy alone, reading takes torch and pydantic too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.formats.recording.format import SCHEMA_VERSION

if TYPE_CHECKING:
    from harness.formats.recording.arguments import RankInfo, RunInfo
    from harness.formats.recording.manifest import (
        Concat,
        Manifest,
        ModelInfo,
        Producer,
        Replicated,
        RequestInfo,
        Shard,
        StepEntry,
        Sum,
        TapEntry,
    )
    from harness.formats.recording.reader import Recording, Step
    from harness.formats.recording.writer import RecordingWriter

__all__ = [
    "SCHEMA_VERSION",
    "Concat",
    "Manifest",
    "ModelInfo",
    "Producer",
    "RankInfo",
    "Recording",
    "RecordingWriter",
    "Replicated",
    "RequestInfo",
    "RunInfo",
    "Shard",
    "Step",
    "StepEntry",
    "Sum",
    "TapEntry",
]

_HOMES = {
    "Recording": "reader", "Step": "reader", "RecordingWriter": "writer",
    "RankInfo": "arguments", "RunInfo": "arguments",
}  # fmt: skip
"""Modules of those that are not the manifest's."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'manifest')}"), name)
