"""Open-loop load on a server, whose every answer is held to HF's truth."""
