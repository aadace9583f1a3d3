"""What a model needs of memory, bandwidth and arithmetic, from its config alone."""
