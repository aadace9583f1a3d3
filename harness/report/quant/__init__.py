"""Quantised forms side by side."""
