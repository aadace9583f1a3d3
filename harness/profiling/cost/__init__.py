"""What work costs: formulas by operation, costs by operator, the machine's roofs."""
