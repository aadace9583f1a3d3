"""Any torch engine by a table: which tensors of its modules are which of HF's values.

`Entry` is a line of the table, `Split`, `PackedHeads`, `Fields` and `Attribute` say how a value is cut,
`ModuleRecorder` hooks the modules and records steps, `CacheLayout` learns where a paged cache keeps its elements.
docs/check-your-torch-engine.md puts a small engine with fused modules under test.

For an engine that runs its own loop, `StepWatcher` records each forward and the sampling after it, and `find_table`
finds the table of engines with vLLM's kinds of modules, from what `watched_calls` saw them return.
"""

from harness.engines.torch_modules.paged_cache import CacheLayout, PagedCache
from harness.engines.torch_modules.parallel_layers import Calls, find_table, watched_calls
from harness.engines.torch_modules.recorder import ForwardBatch, ModuleRecorder, StepRows, StepWatcher
from harness.engines.torch_modules.table import Attribute, Entry, Fields, PackedHeads, Split

__all__ = [
    "Attribute",
    "CacheLayout",
    "Calls",
    "Entry",
    "Fields",
    "ForwardBatch",
    "ModuleRecorder",
    "PackedHeads",
    "PagedCache",
    "Split",
    "StepRows",
    "StepWatcher",
    "find_table",
    "watched_calls",
]  # fmt: skip
