"""Invariants of a block manager, by an oracle that knows which prefix each slot holds."""
