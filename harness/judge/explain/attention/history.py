"""Wrong histories that attention may read in place of the request's own, the likelier first."""

from harness.judge.explain.attention.drafts import nothing_forgotten, rejected_drafts
from harness.judge.explain.attention.place import wrong_place
from harness.judge.explain.attention.table import cache_played_back, other_block_table, past_the_context, wrong_block
from harness.judge.explain.attention.tensors import (
    coarse_cache,
    other_request,
    other_tensors,
    read_back,
)
from harness.judge.explain.cache.declared import declared_format

EXPLANATIONS = (
    cache_played_back,
    rejected_drafts,
    nothing_forgotten,
    other_block_table,
    other_tensors,
    other_request,
    coarse_cache,
    declared_format,
    past_the_context,
    wrong_block,
    read_back,
    wrong_place,
)
