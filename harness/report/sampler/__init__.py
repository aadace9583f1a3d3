"""A check of a server's sampler in every form."""
