"""The cost of prefill and decode: passes over an engine, trace files, gates."""
