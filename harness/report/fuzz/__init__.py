"""A search in every form."""
