"""Adapters of the reference engine: what the suites run on where no other is named.

No other package of `harness.properties` imports the reference engine.
"""
