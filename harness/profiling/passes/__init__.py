"""The passes over an engine's steps: load, spans, recorders, times, traces, counts, tables."""
