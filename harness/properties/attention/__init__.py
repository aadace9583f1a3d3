"""Properties of an attention function: its definition in float64, and what must not change a bit."""
