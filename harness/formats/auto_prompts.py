"""Prompts for a model of which the user gave none: random tokens, enough of them to reach what the config declares."""

import math
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from harness.formats.case import RequestSpec

_LENGTHS = (24, 37, 53)
"""Tokens of the prompts: three requests of different lengths, none of them a whole number of blocks."""
_PAST = 8
"""Tokens past a limit that the longest prompt has."""
_LONGEST = 1024
"""Tokens beyond which a limit is not passed: a check would take minutes."""
_PER_EXPERT = 6
"""Times that a token chooses an expert, on average, for all experts to be chosen with 95 % (128 experts)."""
_LIMITS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = ("num_experts_per_tok", "moe_top_k", "top_k")


def auto_requests(config: Mapping[str, Any]) -> list[RequestSpec]:
    """Return three requests of random token ids, which are the same for each config.

    The longest one passes the sliding window and the positions before rope scaling, and all together are long enough
    for every expert to be chosen, as far as 1,024 tokens allow.

    Args:
        config: the contents of config.json.
    """
    parts = list(_parts(config))
    vocab_size = next((part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)), 256)
    special = {
        value
        for part in parts
        for name, value in part.items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    usable = [token for token in range(min(3, vocab_size // 2), max(4, vocab_size * 9 // 10)) if token not in special]
    shortest, middle, longest = _LENGTHS
    longest = max([longest, *(limit + _PAST for limit in _numbers(parts, _LIMITS) if limit + _PAST <= _LONGEST)])
    experts, chosen = max(_numbers(parts, _EXPERTS), default=0), max(1, min(_numbers(parts, _CHOSEN), default=1))
    longest = max(longest, min(_LONGEST, math.ceil(_PER_EXPERT * experts / chosen) - shortest - middle))
    generator = Random(0)
    return [RequestSpec(token_ids=generator.choices(usable, k=length)) for length in (shortest, middle, longest)]


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the config and the configs inside it: those of the text model, of rope scaling."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def _numbers(parts: list[Mapping[str, Any]], names: tuple[str, ...]) -> list[int]:
    values = (part.get(name) for part in parts for name in names)
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]
