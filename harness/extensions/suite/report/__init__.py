"""A suite as text, Markdown, JSON, a page with a matrix, and a JUnit file."""
