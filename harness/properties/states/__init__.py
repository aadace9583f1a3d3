"""Invariants of a cache of recurrent states, held against an oracle that knows the state of every prefix."""
