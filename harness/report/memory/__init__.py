"""Memory snapshots in every form."""
