"""A profile in every form."""
