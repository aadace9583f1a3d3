"""What prefill and decode cost, and where: passes over an engine, trace files, gates."""
