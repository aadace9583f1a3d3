"""What a user asks for, every name resolved: a check, a comparison, a profile. The CLI, pytest and Python run these."""
