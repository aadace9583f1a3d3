"""A check in every form."""
