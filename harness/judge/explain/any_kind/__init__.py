"""Causes that fit operations of any kind."""
