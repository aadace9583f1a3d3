"""Open-loop load on a server, with every answer checked against HF's truth."""
