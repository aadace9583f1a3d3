"""A server's tokens and log probabilities against HF's along the server's own tokens.

`requests` sends the prompts in several ways, `judge` compares the answers with the truth, `run` is the job.
"""
