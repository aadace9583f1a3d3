"""Ways to get a state wrong that goes on from row to row."""
