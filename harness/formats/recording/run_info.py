"""What a recorder is told of a run before it begins. Like the writer, it needs neither torch nor pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.base.numerics import Numerics

if TYPE_CHECKING:
    from harness.formats.recording.manifest import ModelInfo, Producer, Scalar, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Who ran which model, where and how: the fields of the manifest of the same names."""

    producer: Producer
    model: ModelInfo
    dtype: str
    device: str
    environment: Mapping[str, Scalar] = field(default_factory=dict)
    schedule: str | None = None
    numerics: Numerics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The part of a sharded engine that a recording is of: the whole, if nothing is said."""

    rank: int = 0
    world_size: int = 1
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """By tap, the way in which the ranks' parts make up the whole."""
