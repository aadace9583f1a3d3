"""Properties of an attention function: its definition in float64, and what must not change a bit."""

from harness.properties.attention.suite import check_batching, check_definition, check_placement

__all__ = ["check_batching", "check_definition", "check_placement"]
