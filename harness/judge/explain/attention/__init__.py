"""Ways to get attention wrong: its scores, its heads, what it reads, and the rotation that it hides."""
