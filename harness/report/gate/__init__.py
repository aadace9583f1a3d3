"""A gate in every form."""
