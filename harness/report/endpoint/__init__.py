"""A check of a server in every form."""
