"""Faults that nobody chose: drawn with a seed, and kept only if they change something."""
