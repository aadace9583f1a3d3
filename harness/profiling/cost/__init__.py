"""The cost of work: formulas by operation, costs by operator, the machine's roofs."""
