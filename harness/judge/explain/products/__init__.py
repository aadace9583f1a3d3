"""Ways to get a matrix product wrong: its weight, its rows, its adapter, its blocks of scales."""
