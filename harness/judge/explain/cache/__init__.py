"""Ways to get the cache wrong: whose content a slot holds, and what became of it."""
