"""Invariants of a scheduler, and those of the blocks behind it."""
