"""Ways to get rotary embeddings wrong: frequencies, pairs, positions."""
