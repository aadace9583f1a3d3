"""A comparison of a trainer with a rollout engine: its terms as a table, and as JSON."""
