"""A check, a comparison, a profile, with every name resolved. The CLI, pytest and Python run these."""
