"""The interface of a whole engine under test."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

Taps = Mapping[str, Mapping[tuple[int, int], torch.Tensor]]
"""By name, then by (index of the prompt, position): one row of an intermediate, in the engine's own dtype."""


class EngineAdapter(Protocol):
    """An engine with a model in it. What is optional stands in `OPTIONS` and `OPTIONAL`.

    Attributes that an adapter may declare:

    - `max_model_len`: tokens of prompt and continuation together, 48 by default; longer requests do not occur
    - `tap_bound`: by how many roundings a row of a tap may differ between two ways to compute it, by default 3,000 in
      float32 and 300 in bfloat16 and float16
    """

    vocab_size: int

    def __init__(self, **options: Any) -> None:
        """Open the engine; `options` are those of `OPTIONS` that the constructor names. Each has a default."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """Continue all prompts together, greedily and past every end-of-sequence token; return the new tokens.

        It may be called again, with what the first call left in the prefix cache.
        """


OPTIONS = {
    "block_size": "block_size: int: tokens in a KV block",
    "num_blocks": "num_blocks: int: KV blocks that requests can own",
    "max_num_batched_tokens": "max_num_batched_tokens: int: tokens of a step, so that prompts are cut into chunks",
    "max_num_seqs": "max_num_seqs: int: requests that run at once",
    "prefix_caching": "prefix_caching: bool: requests share the K and V of equal prefixes",
    "block_order": "block_order: int: seed of a permutation of the free blocks",
    "poison": "poison: bool: unallocated blocks are filled with NaN",
    "padding": "padding: int: rows of padding in each step",
    "num_drafts": "num_drafts: int: tokens that a step guesses and verifies beside the next one",
}
"""Optional parameters of the constructor."""

OPTIONAL = {
    "taps": "taps() -> {name: {(index of the prompt, position): row}}: intermediates of the last call of generate; "
    "with lm_head among them, a choice between logits as good as equal may be either",
    "num_preemptions": "num_preemptions() -> int: requests that have lost their blocks so far",
    "num_verified_drafts": "num_verified_drafts() -> int: tokens that were guessed and verified so far",
    "num_cached_tokens": "num_cached_tokens() -> int: tokens that were found in the prefix cache so far",
}
"""Optional methods."""
