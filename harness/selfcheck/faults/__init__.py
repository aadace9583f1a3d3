"""Bugs put into the reference engine on purpose, and the score of the harness on them."""
