"""`harness quant`: what the formats of a model cost, and what an engine's arithmetic costs besides."""
