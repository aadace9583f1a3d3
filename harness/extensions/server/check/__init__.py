"""A server under test: what it can do is probed, and what it says is judged against HF along its own tokens.

`client` speaks HTTP, `probe` finds out what the server can do, `schedules` sends the prompts in several ways, `truth`
runs HF over the tokens that came back, `judge` compares.
"""
