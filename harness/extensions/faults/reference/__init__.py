"""Faults and sound variants of the reference engine."""
