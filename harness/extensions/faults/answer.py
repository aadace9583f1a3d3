"""The contract of a tool: it gets an engine, and says whether that is sound, and if not, where and why."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """What a tool says of one engine."""

    is_sound: bool
    operation: str | None = None
    """The first wrong operation: a path of a module of transformers, or a tap of the harness."""
    row: tuple[int, int] | None = None
    """The first wrong row of it: request and position."""
    cause: str | None = None
    """The statement about the cause that the tool asserts; None if it asserts none."""
    error: str | None = None
    """What the engine raised under the tool."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ToolAnswer":
        """Return what `as_json` made."""
        row = fields.get("row")
        return cls(**{**fields, "row": None if row is None else (int(row[0]), int(row[1]))})


NO_ANSWER: Mapping[str, Any] = {"answers": {}, "notes": [], "seconds": 0.0, "distances": {}, "is_refused": False}
"""What the process of a tool says, beside `problem`, of an engine that the tool was not asked about."""


class Tool(Protocol):
    """A tool, or several that share their work."""

    names: tuple[str, ...]
    """Of the tools; `check` answers for each."""
    kinds: frozenset[EngineKind]
    """The engines that it takes."""
    rules: frozenset[str]
    """Names of tools that are not run: only their published rule is, on tensors that the harness collected."""

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """Return the answers by name.

        Raises:
            ImportError: the tool is not installed.
            HarnessError: ENGINE_FAILED and PROPERTY_VIOLATED: the engine raised, which is an answer
                (`ToolAnswer.error`). Any other code: there is no answer.
        """
