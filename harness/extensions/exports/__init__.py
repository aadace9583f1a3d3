"""Exports of graph engines with weights in few bits, read as checkpoints and run by their engines."""
