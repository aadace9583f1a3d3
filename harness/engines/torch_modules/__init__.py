"""Any torch engine by a table: which tensors of its modules are which of HF's values.

`Entry` is a line of the table, `Split`, `PackedHeads` and `Fields` say how a tensor is cut, `ModuleRecorder` hooks the
modules and records steps, `CacheLayout` learns where a paged cache keeps its elements. docs/check-your-torch-engine.md
puts a small engine with fused modules under test.
"""

from harness.engines.torch_modules.cache_layout import CacheLayout
from harness.engines.torch_modules.recorder import ModuleRecorder, StepRows
from harness.engines.torch_modules.table import Entry
from harness.engines.torch_modules.values import Fields, PackedHeads, Split

__all__ = ["CacheLayout", "Entry", "Fields", "ModuleRecorder", "PackedHeads", "Split", "StepRows"]
