"""The interchange format: a folder with the intermediate tensors of one run (docs/recording-format.md)."""

from harness.recording.manifest import (
    SCHEMA_VERSION,
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
from harness.recording.reader import Recording, Step
from harness.recording.writer import RecordingWriter

__all__ = [
    "SCHEMA_VERSION",
    "Concat",
    "Manifest",
    "ModelInfo",
    "Producer",
    "Recording",
    "RecordingWriter",
    "Replicated",
    "RequestInfo",
    "Shard",
    "Step",
    "StepEntry",
    "Sum",
    "TapEntry",
]
