"""The reference engine against its peers: the same weights, the same prompts, the same tokens, in the same run."""
