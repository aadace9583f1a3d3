"""The trial: every hypothesis against the wrong rows, and what is said where none fits."""
