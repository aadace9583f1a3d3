"""Figures of a trace in every form."""
