"""A server's sampler under test: single draws of many rows against the exact distribution of each row.

`settings` says what is asked, `ask` asks it, `evidence` holds each draw against the truth's logits, under the chain
that is claimed and under those of `alternatives`, `judge` decides, `logprobs` tells what log probabilities are of.
"""
