"""Adapters of the reference engine: what the suites run on where no other is named."""
