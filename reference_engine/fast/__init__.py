"""What makes the engine fast. The core runs without this room, and finds it through `kernels` alone.

`fast_kernels` puts together: `attention/` backends with kernels (`kernels/`, as operators of torch in `cpp_operators`
and `triton_operators`), `products` of packed weights (`packing`), `huge_pages`, the `fused` and the `compiled` decoder,
and decode steps recorded as `graphs`. `threads` is for programs that choose a number of them.
"""

from __future__ import annotations
