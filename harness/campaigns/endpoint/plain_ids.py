"""Tokens that random prompts for a server are made of."""

from collections.abc import Set

from harness.oracle.model import HFModel


def plain_ids(hf: HFModel, eos: Set[int]) -> list[int]:
    """Return the tokens that prompts are made of: no special ones, which servers may treat in a way of their own."""
    special, size = set(eos), hf.vocab_size
    if hf.checkpoint.has_tokenizer:
        tokenizer = hf.checkpoint.tokenizer.hf
        special, size = special | set(tokenizer.all_special_ids), min(size, len(tokenizer))
    return [token_id for token_id in range(size) if token_id not in special]
