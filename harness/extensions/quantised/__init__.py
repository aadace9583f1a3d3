"""Quantised checkpoints as servers load them: read by our own readers, dequantised for HF's architecture."""
