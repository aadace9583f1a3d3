"""Many checks as one: cases and a matrix become tasks, which run in processes here or on the nodes of a Ray cluster."""
