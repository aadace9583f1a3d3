"""Metamorphic relations of a whole engine."""
