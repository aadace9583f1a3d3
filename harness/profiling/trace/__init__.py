"""Chrome traces of torch, anybody's: one reader, and what is made of its columns."""
