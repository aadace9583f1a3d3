"""Memory of the captured steps: allocations with their stacks, snapshots, timelines."""
