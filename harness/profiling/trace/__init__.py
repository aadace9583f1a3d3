"""Chrome traces of torch, of any program: one reader, and what is made of its columns."""
