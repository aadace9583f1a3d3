"""Invariants of a block manager, held against an oracle that knows which prefix each slot holds."""

from harness.properties.blocks.suite import not_checked, search_block_manager

__all__ = ["not_checked", "search_block_manager"]
