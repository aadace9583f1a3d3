"""A server's sampler under test: single draws of many rows against the exact distribution of each row.

`requests` asks for draws, `draws` finds the row of each, `evidence` compares each draw with the claimed chain and with
alternatives, `judge` decides, `logprobs` says what log probabilities are of, `run` is the job.
"""
