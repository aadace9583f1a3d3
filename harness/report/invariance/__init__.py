"""A search for changes of bits in every form."""
