"""A fault: a mistake that is put into an engine, with the truth of where it shows and what may be said of its cause.

For faults that no recording shows there are property suites of the reference engine. Hypothesis is imported when one
runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from harness.base.numerics import Numerics

if TYPE_CHECKING:
    from hypothesis import settings


PROMPT_LENGTHS = (37, 9, 21)
"""Tokens of the usual workload's prompts: after several blocks, inside the second, inside the third."""
NUM_NEW_TOKENS = 6
BLOCK_SIZE = 8
Row = tuple[int | None, int | None]
"""(request, position). The tokens decide what is None."""
NOTHING = r"(?!)"
"""The pattern of no statement at all."""
FIRST: Row = (0, 0)
SECOND: Row = (0, 1)
FIRST_DECODE: Row = (0, PROMPT_LENGTHS[0])
FIRST_SAMPLED: Row = (0, PROMPT_LENGTHS[0] - 1)
ANY_ROW: Row = (None, None)


class Category(StrEnum):
    """The kind of a mistake: the part of an engine that it is in."""

    POSITION = "position"
    NORM = "norm"
    WEIGHTS = "weights"
    ATTENTION = "attention"
    CACHE = "cache"
    SCHEDULER = "scheduler"
    SAMPLING = "sampling"
    NUMBERS = "numbers"
    EXPERTS = "experts"
    DRAFTS = "drafts"
    WIRING = "wiring"
    STATES = "states"
    QUANTISED = "quantised"


class EngineKind(StrEnum):
    """The kind of engine that a fault is put into, and that a tool gets."""

    REFERENCE = "reference"
    """The reference engine: scheduler, paged cache, continuous batches."""
    MODULE = "module"
    """A model object of transformers, as an engine with kernels of its own holds one."""
    STEP = "step"
    """An engine of steps without any name of HuggingFace's."""
    DUMP = "dump"
    """A folder of tensors that a module left in one prefill."""
    SERVER = "server"
    """The reference engine behind HTTP: it shows tokens and log probabilities alone."""


_OF_REFERENCE = (EngineKind.REFERENCE, EngineKind.SERVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """The conditions of a check under which a fault shows, in the terms of a case."""

    model: str = "qwen3-tiny"
    """Of the reference engine an embedded checkpoint; else a `model_type` of transformers, which is made tiny."""
    dtype: str = "float32"
    schedule: str = "batched"
    prompts: tuple[tuple[int, ...], ...] | None = None
    """Token ids; None: random ones of `PROMPT_LENGTHS`."""
    max_new_tokens: int = NUM_NEW_TOKENS
    options: Mapping[str, str] = field(default_factory=dict)
    """Engine options besides the block size."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json that the checkpoint is given instead of its own."""
    threads: int = 1
    scaled: Mapping[str, float] = field(default_factory=dict)
    """Weights of the checkpoint, by name, and what they are multiplied by: activations of another magnitude."""
    weights_in: str | None = None
    """Dtype or format (`Q8_0`) whose values the checkpoint's matrices are rounded to."""
    numerics: Numerics | None = None
    """The engine's declaration of its arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One bug and the truth about it."""

    id: str
    category: Category
    summary: str
    """The mistake, in one sentence."""
    inject: Callable[..., Any]
    """Of the reference engine, a context in which its code has the fault; else what changes the object."""
    tap: str | None
    """Pattern of the first operation that shows it, in the order of the graph: of the whole name in the reference
    engine, else of a part of it. None if the engine itself raises, or a property suite."""
    row: Row | None
    """The first row of that operation that is wrong."""
    cause: str
    """Pattern of every true statement about the cause; `NOTHING` if no known cause is true."""
    engine: EngineKind = EngineKind.REFERENCE
    setting: FaultConfig = FaultConfig()
    suite: Callable[[], None] | None = None
    """A property suite that is run in place of a check, for what no recording shows; it raises where a property is
    broken."""
    instance: str = ""
    """A public report of the same bug."""
    equivalent: str = ""
    """The proof that nothing can show it if that is so."""

    def is_at(self, operation: str | None) -> bool:
        """Return whether an operation is where the fault begins."""
        if operation is None or self.tap is None:
            return False
        matches = re.fullmatch if self.engine in _OF_REFERENCE else re.search
        return matches(self.tap, operation) is not None

    def is_row(self, row: Row | None) -> bool:
        """Return whether a row is the first wrong one; how long drafts are right depends on the prompts."""
        request, position = self.row or ANY_ROW
        if self.setting.schedule.startswith("speculative"):
            position = None
        pairs = zip((request, position), row or ANY_ROW, strict=True)
        return all(true is None or true == said for true, said in pairs)

    def is_cause(self, statement: str) -> bool:
        """Return whether a statement about the cause is true."""
        flags = 0 if self.engine in _OF_REFERENCE else re.IGNORECASE
        return re.search(self.cause, statement, flags) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A legitimate difference, which must not alarm."""

    id: str
    summary: str
    setting: FaultConfig
    engine: EngineKind = EngineKind.REFERENCE
    engine_name: str = "reference"
    """Of the engine, where that is opened by its name."""
    inject: Callable[..., Any] | None = None
    """As of a fault; None changes nothing."""


def table_of(**defaults: Any) -> Callable[..., Fault]:
    """Return what makes the lines of a table of faults: `fault(id, summary, inject, cause, tap, row, ...)`.

    What a line leaves out is as given here, fields of a fault and of its setting. A fault without a tap has no row.
    """

    def fault(id: str, summary: str, inject: Any, cause: str, *place: Any, **fields_of_line: Any) -> Fault:
        line = {**defaults, "id": id, "summary": summary, "inject": inject, "cause": cause, **fields_of_line}
        line |= zip(("tap", "row"), place, strict=False)
        line["row"] = line["row"] if line["tap"] is not None else None
        changes = {item.name: line.pop(item.name) for item in fields(FaultConfig) if item.name in line}
        setting = replace(line.pop("setting", FaultConfig()), **changes)
        return Fault(**line, setting=setting)

    return fault


def of(category: Category, faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults of one category."""
    return [fault for fault in faults if fault.category is category]


def block_manager_suite() -> None:
    """Hold the block manager to its invariants."""
    from harness.properties.blocks.suite import search_block_manager
    from harness.properties.reference.blocks import BlockManagerSubject

    search_block_manager(BlockManagerSubject, _settings()).raise_findings()


def sampling_suite() -> None:
    """Hold the sampler to its properties."""
    from harness.properties.ops.tokens import check_sampling
    from harness.properties.reference.ops import Ops

    check_sampling(Ops, _settings())


def stopping_suite() -> None:
    """Hold the ends of requests to their property."""
    from harness.properties.ops.tokens import check_stopping
    from harness.properties.reference.ops import Ops

    check_stopping(Ops, _settings())


def _settings() -> "settings":
    from harness.properties.core.search import PROFILES

    return PROFILES["dev"].settings()
