"""Training against rollout: the gap in log probabilities, split into terms that are measured and add up."""
