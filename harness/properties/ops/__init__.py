"""Properties of an engine's smaller parts: rotary embedding, norms, sampling, tokenizer and the loader of weights."""
