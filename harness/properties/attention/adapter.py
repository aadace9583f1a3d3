"""The interface of an attention function under test.

Shapes: T rows of all requests one after the other, R requests, C context tokens, N query heads, K KV heads, H head dim,
B blocks, S slots in a block, P parts of a split.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class AttentionAdapter(Protocol):
    """The method that every adapter has. What is optional stands in `KEYWORDS` and `OPTIONAL`.

    Attributes that an adapter may declare, all of them lists of what it serves, or facts about it:

    - `dtypes`: names, by default `("float32", "bfloat16", "float16")`
    - `head_dims`, `block_sizes`, `group_sizes` (query heads of a KV head): by default a choice of many
    - `device`: where its tensors lie, by default `"cpu"`
    - `rounds_scores`: True if it rounds the scores to the dtype before the softmax, as HF's eager code does; the bounds
      are then wider
    - `is_batch_invariant`: True if a request's bits do not depend on the rest of the batch; this is then checked
    - `serves_masked_rows`: True if it gives zeros to a request without keys; then such requests occur
    """

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_cache_BSKH: torch.Tensor,
        v_cache_BSKH: torch.Tensor,
        *,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
    ) -> torch.Tensor:
        """Return [T, N, H]: softmax(q k / sqrt(H)) v of each row over its own past.

        The rows of request r are the last `query_lens[r]` of its `context_lens[r]` positions; a row sees the positions
        up to its own. Position i lies in slot i % S of block `block_tables[r][i // S]`: K and V of the rows themselves
        are written already. Query head n reads KV head n // (N / K). All other slots may hold any value, also NaN, and
        nothing may be written.
        """


KEYWORDS = {
    "scale": "scale: float in place of 1 / sqrt(H)",
    "window": "window: int | None: a row sees the latest so many positions, its own among them",
    "softcap": "softcap: float | None: scores s become softcap * tanh(s / softcap)",
    "num_splits": "num_splits: int: keys are cut into so many parts, which are merged",
}
"""Optional parameters of `attend`, by name. A parameter that exists is checked."""

OPTIONAL = {
    "store": "store(k_TKH, v_TKH, slots_T, k_cache_BSKH, v_cache_BSKH): write row t to slot block * S + offset",
    "read_back": "read_back(k_cache_BSKH, v_cache_BSKH, block_table, num_tokens) -> k_CKH, v_CKH",
    "merge": "merge(out_PTNH, log_sum_PTN) -> out_TNH: join parts, given the logarithms of their sums of exp(score)",
    "attend_padded": "attend_padded(q_RTNH, k_RCKH, v_RCKH, query_lens, context_lens) -> out_RTNH: padding at the end",
}
"""Optional methods, by name."""
